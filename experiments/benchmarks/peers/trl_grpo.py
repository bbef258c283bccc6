"""TRL's GRPOTrainer, with unchanged `train`, for `benchmarks.pretrained`.

    PYTHON trl_grpo.py SETTINGS

SETTINGS is a JSON object: a `Task` of `benchmarks.pretrained`, `num_steps` and `out`.
The folder `out` gets the files of `rlhf-jax grpo`: after each step a row of
timings.jsonl and of metrics.jsonl, which has evidence of the work done, and at the end
model/.

All options that make it faster are set: the whole batch is generated, scored and
trained on in one pass, without gradient checkpointing, in float32, without logging or
snapshots. With one update per batch TRL does not compute old log-probs. Rewards without
the std and a mean over tokens (`dapo`) are the defaults of `rlhf-jax grpo`. TRL
differentiates k3 and rlhf_jax k2.

In addition TRL generates from a left-padded batch of all responses, so that it reads a
prompt once per response, computes the entropy in the update and shuffles the batch.
`torch_compile` is off, because it would recompile for every length of the longest
response. Transformers' continuous batching is off, because it took more CPU time with a
toy model.
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
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d+")


class Record(TrainerCallback):
    """Computes the reward and writes the rows of each step."""

    def __init__(self, folder: Path, *, length_penalty: float) -> None:
        self.folder, self.length_penalty = folder, length_penalty
        self.scores: list[float] = []  # of the latest batch
        self.lengths: list[int] = []  # tokens of its responses, EOS included

    def reward(
        self,
        *,
        completions: list[Any],
        completion_ids: list[list[int]],
        answer: list[int],
        **_: Any,
    ) -> list[float]:
        """1 if a response's last number is the answer, minus penalty·length."""
        numbers = [NUMBER.findall(messages[0]["content"]) for messages in completions]
        self.lengths = [len(tokens) for tokens in completion_ids]
        self.scores = [
            float(bool(answers) and int(answers[-1]) == right)
            - self.length_penalty * size
            for answers, right, size in zip(numbers, answer, self.lengths, strict=True)
        ]
        return self.scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.before = last_of(named["model"]).clone()
        self.seen, self.since = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        now, rows, drawn = time.perf_counter(), len(self.lengths), sum(self.lengths)
        moved = last_of(named["model"]) - self.before
        self._append("timings", state, {"seconds": now - self.since})
        row = {
            "prompt/length": (state.num_input_tokens_seen - self.seen - drawn) / rows,
            "response/length": drawn / rows,
            "objective/scores": sum(self.scores) / rows,
            "drift/relative": float(moved.norm() / self.before.norm()),
        }
        self._append("metrics", state, row)
        self.seen, self.since = state.num_input_tokens_seen, now

    def _append(self, name: str, state: Any, row: dict[str, float]) -> None:
        with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps({"step": state.global_step - 1, **row}), file=file)


def last_of(model: torch.nn.Module) -> torch.Tensor:
    """The last parameter: the final norm, in a Llama with a tied head."""
    return list(model.parameters())[-1].detach()


def main(settings: dict[str, Any]) -> None:
    folder = Path(settings["out"])
    folder.mkdir()
    prompts = Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()
    record = Record(folder, length_penalty=settings["length_penalty"])
    trainer = GRPOTrainer(
        model=settings["model"],
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            model_init_kwargs={"dtype": "float32"},
            max_steps=settings["num_steps"],
            per_device_train_batch_size=settings["batch_size"],
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_iterations=1,
            num_generations=settings["group_size"],
            max_completion_length=settings["max_new_tokens"],
            temperature=settings["temperature"],
            beta=settings["kl_coef"],
            loss_type="dapo",
            scale_rewards="none",
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        reward_funcs=record.reward,
        train_dataset=Dataset.from_list([json.loads(line) for line in prompts]),
        callbacks=[record],
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
