"""A PPO loop by hand in PyTorch, as one would write it today, without compilation.

Hugging Face's GPT-2 modules with its attention (SDPA) and key-value cache; the head
runs at response positions alone, log-probs come from the sampling loop, the update is
one fused AdamW over policy and critic. Eager: `torch.compile` is not used. Advantages
count as "score"; there are no metrics beyond the loss.
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
    """A value a position, from a trunk of its own."""

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
def sample(policy: GPT2LMHeadModel, prompts: Tensor, workload: Workload):
    """Tokens [B, P + R] and the log-probs of the responses [B, R]."""
    cache, tokens, logprobs = DynamicCache(config=policy.config), [prompts], []
    for _ in range(workload.response_length):
        logits = policy(
            tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        scaled = functional.log_softmax(logits / workload.temperature, dim=-1)
        token = torch.multinomial(scaled.exp(), 1)
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


def gae(rewards: Tensor, values: Tensor, workload: Workload):
    """Whitened advantages and returns, [B, R]."""
    last = torch.zeros_like(values[:, 0])
    found = []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        delta = rewards[:, t] + workload.gamma * following - values[:, t]
        last = delta + workload.gamma * workload.lam * last
        found.append(last)
    advantages = torch.stack(found[::-1], 1)
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8), advantages + values


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
    responses = scores = loss = torch.zeros(())

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def check() -> dict[str, float]:
        return {
            "response_tokens": responses.numel(),
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
        clock.start()
        tokens, old_logprobs = sample(policy, prompts, workload)
        wait()
        clock.lap("rollout")

        with torch.no_grad():
            responses = tokens[:, prompt_length:]
            scores = (responses % line_protocol.DIVISOR == 0).float().mean(1)
            ref_logprobs = token_logprobs(reference, tokens, workload)
            old_values = critic(tokens, prompt_length=prompt_length)
            rewards = -workload.kl_coef * (old_logprobs - ref_logprobs)
            rewards[:, -1] += scores
            advantages, returns = gae(rewards, old_values, workload)
        wait()
        clock.lap("score")

        for _ in range(workload.num_epochs):
            order = torch.randperm(workload.num_prompts, device=device)
            for rows in order.split(workload.minibatch_size):
                logprobs = token_logprobs(policy, tokens[rows], workload)
                ratio = torch.exp(logprobs - old_logprobs[rows])
                surrogate = torch.min(
                    ratio * advantages[rows],
                    ratio.clamp(1 - clip, 1 + clip) * advantages[rows],
                )
                values = critic(tokens[rows], prompt_length=prompt_length)
                old = old_values[rows]
                clipped = torch.clamp(values, old - clip, old + clip)
                value_loss = torch.max(
                    (values - returns[rows]) ** 2, (clipped - returns[rows]) ** 2
                )
                loss = workload.vf_coef * 0.5 * value_loss.mean() - surrogate.mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main(line_protocol.read_workload())
