"""A PPO loop by hand in PyTorch, by today's practice, without compilation.

It uses Hugging Face's GPT-2 with its attention (SDPA) and key-value cache. The head
runs only at response positions, log-probs come from the sampling loop, and the update
is one fused AdamW over policy and critic. It runs eagerly, without `torch.compile`.
Advantages count as "score"; the only metric is the loss.

With lengths, EOS is written at the end of a response, and sampling ends with the
longest of the batch. Minibatches are cut to their longest response, the saving that is
possible without a kernel for packed rows on CPUs. Padding is masked in losses and
means.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy

import line_protocol
import torch
from line_protocol import Clock, Workload
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, GPT2Model


class Critic(nn.Module):
    """A value per position, from its own trunk."""

    def __init__(self, trunk: GPT2Model) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.n_embd, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, *, prompt_length: int) -> Tensor:
        """[B, R]: values of the states just before each response token."""
        hidden = self.trunk(tokens[:, :-1], use_cache=False).last_hidden_state
        return self.head(hidden[:, prompt_length - 1 :]).squeeze(-1)


@torch.no_grad()
def sample(policy: GPT2LMHeadModel, prompts: Tensor, stops: Tensor, workload: Workload):
    """Tokens [B, P + R] and the log-probs of the responses [B, R].

    R is the length of the longest response; row b has EOS as token `stops[b]`, counted
    from 1.
    """
    cache, tokens, logprobs = DynamicCache(config=policy.config), [prompts], []
    longest = int(stops.max())
    for step in range(longest):
        logits = policy(
            tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        scaled = functional.log_softmax(logits / workload.temperature, dim=-1)
        token = torch.multinomial(scaled.exp(), 1)
        if workload.lengths:
            token[stops <= step + 1] = line_protocol.EOS
        tokens.append(token)
        logprobs.append(scaled.gather(1, token))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def token_logprobs(
    policy: GPT2LMHeadModel, tokens: Tensor, workload: Workload
) -> Tensor:
    """[B, R]: log-probs of the response tokens."""
    hidden = policy.transformer(tokens[:, :-1], use_cache=False).last_hidden_state
    logits = policy.lm_head(hidden[:, workload.prompt_length - 1 :])
    response = tokens[:, workload.prompt_length :]
    loss = functional.cross_entropy(
        logits.flatten(0, 1) / workload.temperature,
        response.flatten(),
        reduction="none",
    )
    return -loss.view_as(response)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, workload: Workload):
    """Whitened advantages and returns, [B, R], for the tokens in the mask."""
    last = torch.zeros_like(values[:, 0])
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        delta = rewards[:, t] + workload.gamma * following - values[:, t]
        last = delta + workload.gamma * workload.lam * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], 1)
    std, mean = torch.std_mean(advantages[mask])
    return (advantages - mean) / (std + 1e-8), advantages + values


def masked_mean(x: Tensor, mask: Tensor, *dimensions: int) -> Tensor:
    """Mean over the tokens in the mask."""
    return (x * mask).sum(dimensions) / mask.sum(dimensions)


def main(workload: Workload) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt_length, clip = workload.prompt_length, workload.clip_range
    policy = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=workload.vocab_size,
            n_positions=workload.max_positions,
            n_embd=workload.hidden_size,
            n_layer=workload.num_layers,
            n_head=workload.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    critic = Critic(copy.deepcopy(policy.transformer)).to(device)
    optimizer = torch.optim.AdamW(
        [*policy.parameters(), *critic.parameters()],
        lr=workload.learning_rate,
        weight_decay=workload.weight_decay,
        fused=True,
    )
    before = policy.transformer.ln_f.weight.detach().clone()
    mask = scores = loss = torch.zeros(())

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def check() -> dict[str, float]:
        return {
            "response_tokens": int(mask.sum()),
            "mean_score": scores.mean().item(),
            "loss": loss.item(),
            "moved": (policy.transformer.ln_f.weight - before).abs().max().item(),
        }

    clock = Clock()
    for step in line_protocol.iterations(
        clock=clock,
        versions=line_protocol.versions_of("torch", "transformers"),
        about={
            "parameters": sum(p.numel() for p in policy.parameters()),
            "threads": torch.get_num_threads(),
        },
        check=check,
        wait=wait,
    ):
        prompts = torch.tensor(workload.prompts(step), device=device)
        stops = torch.tensor(workload.stops(step), device=device)
        clock.start()
        tokens, old_logprobs = sample(policy, prompts, stops, workload)
        wait()
        clock.lap("rollout")

        with torch.no_grad():
            responses = tokens[:, prompt_length:]
            columns = torch.arange(responses.shape[1], device=device)
            mask = columns < stops[:, None]
            worth = (responses % line_protocol.DIVISOR == 0).float()
            scores = masked_mean(worth, mask, 1)
            ref_logprobs = token_logprobs(reference, tokens, workload)
            old_values = critic(tokens, prompt_length=prompt_length)
            old_values = old_values * mask
            rewards = -workload.kl_coef * (old_logprobs - ref_logprobs) * mask
            rewards[columns == stops[:, None] - 1] += scores
            advantages, returns = gae(rewards, old_values, mask, workload)
        wait()
        clock.lap("score")

        for _ in range(workload.num_epochs):
            order = torch.randperm(workload.num_prompts, device=device)
            for rows in order.split(workload.minibatch_size):
                longest = int(stops[rows].max())
                own, read = (
                    mask[rows, :longest],
                    tokens[rows, : prompt_length + longest],
                )
                logprobs = token_logprobs(policy, read, workload)
                ratio = torch.exp(logprobs - old_logprobs[rows, :longest])
                advantage = advantages[rows, :longest]
                surrogate = torch.min(
                    ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
                )
                values = critic(read, prompt_length=prompt_length)
                old, target = old_values[rows, :longest], returns[rows, :longest]
                clipped = torch.clamp(values, old - clip, old + clip)
                value_loss = torch.max((values - target) ** 2, (clipped - target) ** 2)
                loss = workload.vf_coef * 0.5 * masked_mean(value_loss, own)
                loss = loss - masked_mean(surrogate, own)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main(line_protocol.read_workload())
