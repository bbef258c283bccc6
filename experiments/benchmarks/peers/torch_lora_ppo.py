"""PPO with LoRA by hand in PyTorch on a checkpoint, for `benchmarks.pretrained`.

    PYTHON torch_lora_ppo.py SETTINGS

SETTINGS is a JSON object: a `Task` of `benchmarks.pretrained`, `num_steps` and `out`.
The folder `out` gets the files of `rlhf-jax ppo`: after each step a row of
timings.jsonl and of metrics.jsonl, and at the end the adapters.

The program is written by today's practice: the transformers checkpoint with its
attention (SDPA) and key-value cache; adapters on every linear layer, merged into a copy
of the weights for sampling; a value head on the policy's last hidden states; the
reference by disabling the adapters; the output head only at response positions;
log-probs kept during sampling; and one fused AdamW. All prompts have the same length,
so there is no left padding. It runs eagerly in float32, without `torch.compile`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

NUMBER = re.compile(r"-?\d+")
CLIP, VF_COEF, LAM = 0.2, 0.1, 0.95  # the defaults of `rlhf-jax ppo`


class Adapted(nn.Module):
    """W x + s B A x; W is frozen, and s is 1, as alpha equals the rank."""

    reference = False  # whether all adapters are disabled

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear, self.merged = linear, None
        scale = linear.in_features**-0.5
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) * scale)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            return functional.linear(x, self.merged)
        y = self.linear(x)
        if Adapted.reference:
            return y
        return y + functional.linear(functional.linear(x, self.a), self.b)

    @torch.no_grad()
    def merge(self) -> None:
        self.merged = torch.addmm(self.linear.weight, self.b, self.a)

    def split(self) -> None:
        self.merged = None


def adapt(model: nn.Module, *, rank: int) -> list[Adapted]:
    """Puts adapters on the linear layers of every block and freezes the rest."""
    model.requires_grad_(False)
    adapted = []
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    adapted.append(Adapted(linear, rank))
                    setattr(part, name, adapted[-1])
    return adapted


@torch.no_grad()
def sample(model: Any, prompts: Tensor, *, stop: int, settings: dict[str, Any]):
    """Samples responses [B, R] and returns them with mask and log-probs."""
    cache, read = DynamicCache(config=model.config), prompts
    tokens, logprobs, masks = [], [], []
    open_rows = torch.ones(len(prompts), 1, dtype=torch.bool)
    for _ in range(settings["max_new_tokens"]):
        logits = model(
            read, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        scaled = functional.log_softmax(logits / settings["temperature"], dim=-1)
        read = torch.multinomial(scaled.exp(), 1).where(open_rows, stop)
        tokens.append(read)
        logprobs.append(scaled.gather(1, read))
        masks.append(open_rows)
        open_rows = open_rows & (read != stop)
        if not open_rows.any():
            break
    return torch.cat(tokens, 1), torch.cat(masks, 1), torch.cat(logprobs, 1)


def evaluate(model: Any, tokens: Tensor, *, prompt_length: int, temperature: float):
    """Log-probs of the response tokens, and the hidden states that predict them."""
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
    hidden = hidden[:, prompt_length - 1 :]
    loss = functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1) / temperature,
        tokens[:, prompt_length:].flatten(),
        reduction="none",
    )
    return -loss.view(hidden.shape[:2]), hidden


def gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns, [B, R]; gamma is 1."""
    last, advantages = torch.zeros_like(values[:, 0]), []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        last = rewards[:, t] + following - values[:, t] + LAM * last
        advantages.append(last)
    raw = torch.stack(advantages[::-1], 1)
    std, mean = torch.std_mean(raw[mask])
    return (raw - mean) / (std + 1e-8), raw + values


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens in the mask."""
    return (x * mask).sum() / mask.sum()


def score(response: str, *, answer: int, length: int, penalty: float) -> float:
    """1 if the last number is the answer, minus penalty·length."""
    numbers = NUMBER.findall(response)
    return float(bool(numbers) and int(numbers[-1]) == answer) - penalty * length


def main(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    folder = Path(settings["out"])
    folder.mkdir()
    text = Path(settings["prompts"]).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32
    )
    adapted = adapt(model, rank=settings["lora"])
    value_head = nn.Linear(model.config.hidden_size, 1)
    nn.init.zeros_(value_head.weight)
    own = [p for p in model.parameters() if p.requires_grad]
    own += value_head.parameters()
    optimizer = torch.optim.AdamW(
        own, lr=settings["learning_rate"], weight_decay=0.0, eps=1e-5, fused=True
    )
    asked = [
        tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    size, temperature = settings["batch_size"], settings["temperature"]
    order = torch.randperm(len(rows)).tolist()
    since = time.perf_counter()
    for step in range(settings["num_steps"]):
        batch = [order[(step * size + i) % len(rows)] for i in range(size)]
        prompts = torch.tensor([asked[i] for i in batch])
        place: dict[str, Any] = {
            "prompt_length": prompts.shape[1],
            "temperature": temperature,
        }
        for one in adapted:
            one.merge()
        responses, mask, old = sample(
            model, prompts, stop=tokenizer.eos_token_id, settings=settings
        )
        for one in adapted:
            one.split()
        lengths = mask.sum(1).tolist()
        texts = tokenizer.batch_decode(
            [r[:n] for r, n in zip(responses.tolist(), lengths, strict=True)],
            skip_special_tokens=True,
        )
        scores = torch.tensor(
            [
                score(
                    text,
                    answer=rows[i]["answer"],
                    length=length,
                    penalty=settings["length_penalty"],
                )
                for text, i, length in zip(texts, batch, lengths, strict=True)
            ]
        )
        tokens = torch.cat([prompts, responses], 1)
        with torch.no_grad():
            Adapted.reference = True
            ref, _ = evaluate(model, tokens, **place)
            Adapted.reference = False
            _, hidden = evaluate(model, tokens, **place)
            old_values = value_head(hidden).squeeze(-1) * mask
            rewards = -settings["kl_coef"] * (old - ref) * mask
            rewards[torch.arange(size), mask.sum(1) - 1] += scores
            advantages, returns = gae(rewards, old_values, mask)
        logprobs, hidden = evaluate(model, tokens, **place)
        ratio = torch.exp(logprobs - old)
        surrogate = torch.min(
            ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
        )
        values = value_head(hidden).squeeze(-1)
        clipped = torch.clamp(values, old_values - CLIP, old_values + CLIP)
        value_loss = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        loss = VF_COEF * 0.5 * masked_mean(value_loss, mask)
        loss = loss - masked_mean(surrogate, mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        now = time.perf_counter()
        moved = torch.stack([one.b.detach().norm() for one in adapted]).norm()
        for name, row in {
            "timings": {"seconds": now - since},
            "metrics": {
                "prompt/length": prompts.shape[1],
                "response/length": sum(lengths) / size,
                "objective/scores": scores.mean().item(),
                "drift/relative": moved.item(),
            },
        }.items():
            with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                print(json.dumps({"step": step, **row}), file=file)
        since = now
    kept = {f"{i}": (one.a, one.b) for i, one in enumerate(adapted)}
    torch.save({"adapters": kept, "value": value_head.state_dict()}, folder / "out.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
