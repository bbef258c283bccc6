"""TRL's PPOTrainer, with unchanged `train`.

Its batches wait for the driver, and three of the functions that `train` calls are
timed: "rollout" ends when `batch_generation` returns, and "update" begins with the
first joint forward pass of policy and critic. Settings: the whole batch in one pass,
one optimizer step per minibatch, no gradient checkpointing, float32, no logging, no
samples. The reward of the tokens replaces the reward model.

In addition to the work of the others, `train` keeps the logits of every sampled token
and every layer's hidden states, runs the head at prompt positions too, computes the
entropy in each minibatch and collects garbage in each iteration. AdamW has no weight
decay on norms and biases. Advantages count as "score".

With lengths, a logits processor allows only EOS at the end of a response and forbids it
earlier; `stop_token_id` makes `generate` end with the last row and `train` mask the
tokens after EOS. PPOTrainer pads: in TRL only SFT and DPO have `padding_free`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import line_protocol
import torch
from datasets import Dataset
from line_protocol import EOS, Clock, Workload
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

NEVER = -1e9  # a logit


class Finished(Exception):
    """The driver requests no more iterations."""


class Batches:
    """The data loader of `train`; `stops` are those of the latest batch."""

    stops: torch.Tensor

    def __init__(self, numbers: Iterator[int], workload: Workload) -> None:
        self.numbers, self.workload = numbers, workload

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in self.numbers:
            self.stops = torch.tensor(self.workload.stops(step))
            yield {"input_ids": torch.tensor(self.workload.prompts(step))}
        raise Finished


class Ends(LogitsProcessor):
    """Makes EOS the only token at the end of a response, and impossible before."""

    def __init__(self, batches: Batches, *, prompt_length: int) -> None:
        self.batches, self.prompt_length = batches, prompt_length

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        drawn = input_ids.shape[1] - self.prompt_length
        last = (self.batches.stops.to(scores.device) == drawn + 1)[:, None]
        is_eos = torch.arange(scores.shape[1], device=scores.device) == EOS
        return scores.masked_fill(last != is_eos, NEVER)


def tokenizer_of(workload: Workload) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are outside the vocabulary, so that none is sampled."""
    vocabulary = {"<pad>": workload.vocab_size, "<eos>": workload.vocab_size + 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def main(workload: Workload) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(
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
    shape.num_labels = 1
    policy, critic = GPT2LMHeadModel(shape), GPT2ForSequenceClassification(shape)
    reward_model = torch.nn.Module()
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=workload.num_prompts,
            gradient_accumulation_steps=1,
            num_mini_batches=workload.num_minibatches,
            num_ppo_epochs=workload.num_epochs,
            local_rollout_forward_batch_size=workload.num_prompts,
            response_length=workload.response_length,
            temperature=workload.temperature,
            total_episodes=10**6 * workload.num_prompts,
            learning_rate=workload.learning_rate,
            weight_decay=workload.weight_decay,
            lr_scheduler_type="constant",
            kl_coef=workload.kl_coef,
            gamma=workload.gamma,
            lam=workload.lam,
            cliprange=workload.clip_range,
            vf_coef=workload.vf_coef,
            stop_token_id=EOS if workload.lengths else None,
            missing_eos_penalty=None,
            gradient_checkpointing=False,
            bf16=False,
            num_sample_generations=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer_of(workload),
        model=policy,
        ref_model=None,
        reward_model=reward_model,
        train_dataset=Dataset.from_dict({"input_ids": workload.prompts(0)}),
        value_model=critic,
    )
    before = policy.transformer.ln_f.weight.detach().clone()
    clock, scoring = Clock(), {}

    def wait() -> None:
        if trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    batch_generation = ppo_trainer.batch_generation
    forward = ppo_trainer.forward
    get_reward = ppo_trainer.get_reward

    def timed_generation(*args: Any, **named: Any) -> Any:
        output = batch_generation(*args, **named)
        wait()
        clock.lap("rollout")
        scoring["scored"] = False
        return output

    def timed_forward(model: Any, *args: Any, **named: Any) -> Any:
        if model is trainer.model and not scoring["scored"]:
            wait()
            clock.lap("score")
            scoring["scored"] = True
        return forward(model, *args, **named)

    def token_reward(model: Any, tokens: Any, pad: int, prompt_length: int) -> Any:
        if model is not trainer.reward_model:
            return get_reward(model, tokens, pad, prompt_length)
        responses = tokens[:, prompt_length:]
        response_mask = responses != pad
        worth = (responses % line_protocol.DIVISOR == 0) & response_mask
        scores = worth.sum(1) / response_mask.sum(1)
        scoring.update(response_mask=response_mask, scores=scores)
        return None, scores, None

    ppo_trainer.batch_generation = timed_generation
    ppo_trainer.forward = timed_forward
    ppo_trainer.get_reward = token_reward
    log = trainer.log

    def log_kept(metrics: dict[str, float], *args: Any) -> None:
        scoring["loss"] = metrics["loss/policy_avg"]
        log(metrics, *args)

    trainer.log = log_kept

    def check() -> dict[str, float]:
        return {
            "response_tokens": int(scoring["response_mask"].sum()),
            "mean_score": scoring["scores"].mean().item(),
            "loss": scoring["loss"],
            "moved": (policy.transformer.ln_f.weight.cpu() - before).abs().max().item(),
        }

    numbers = line_protocol.iterations(
        clock=clock,
        versions=line_protocol.versions_of("trl", "torch", "transformers"),
        about={
            "parameters": sum(p.numel() for p in policy.parameters()),
            "threads": torch.get_num_threads(),
        },
        check=check,
        wait=wait,
    )
    trainer.dataloader = batches = Batches(numbers, workload)
    if workload.lengths:
        ends = Ends(batches, prompt_length=workload.prompt_length)
        processors = LogitsProcessorList([ends])
        generate = functools.partial(policy.generate, logits_processor=processors)
        setattr(policy, "generate", generate)  # noqa: B010
    with contextlib.suppress(Finished):
        trainer.train()


if __name__ == "__main__":
    main(line_protocol.read_workload())
