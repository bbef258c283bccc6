"""Evaluates every policy of the study on held-out prompts, by `rlhf-jax evaluate`.

    python experiments studies.preferences.evaluation runs/preferences \
        --model runs/smollm2

A policy is evaluated twice with the same seed, and so on the same responses: by the
proxy, with the KL to the reference and the loss on Shakespeare, and by the judge, with
the loss on GSM8K. The reference has more samples per prompt, for best-of-n by the
proxy.

Unfinished runs are skipped and finished evaluations are kept, so the same command
continues the study. With eight processes all 27 policies took four minutes on an H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tyro

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.train import evaluate
from studies import finished

SWEEPS = ("ppo", "dpo")  # folders of the study with a finished sweep
TEXTS = {"proxy": "shakespeare", "judge": "gsm8k"}  # {reward model: texts of its run}
REFERENCE = "reference"
PROXY = "proxy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    study: tyro.conf.Positional[Path]
    """Folder of the study, the --out of its preparation."""
    model: str = "runs/smollm2"
    """Checkpoint of the reference, from which all runs started."""
    num_samples: int = 2
    """Responses of a policy per prompt."""
    best_of: int = 8
    """Responses of the reference per prompt, from which best-of-n chooses."""
    max_new_tokens: int = 48
    """Longest response, tokens, as in the sweeps."""
    temperature: float = 0.7
    """Sampling temperature, as in the sweeps."""
    batch_size: int = 16
    """Prompts per batch."""
    smallest: bool = False
    """Use the sizes of smallest.toml, which override other options."""


class Policy(NamedTuple):
    """A model to evaluate."""

    name: str  # as in "ppo/kl_coef=0,parameters=lora"
    seed: int
    model: str


def policies(options: Options) -> Iterator[Policy]:
    """Yields the reference with each seed of the runs, and every finished run.

    Raises:
      InputError: a sweep has no finished run.
    """
    runs = [
        Policy(f"{sweep}/{run.cell}", run.seed, str(run.folder / "model"))
        for sweep in SWEEPS
        for run in finished.runs_of(options.study / sweep)
    ]
    for seed in sorted({run.seed for run in runs}):
        yield Policy(REFERENCE, seed, options.model)
    yield from runs


def place(study: Path, policy: Policy, *, scorer: str) -> Path:
    """The folder of an evaluation."""
    return study / "evaluation" / policy.name / f"seed_{policy.seed}" / scorer


def command_line(options: Options, policy: Policy, *, scorer: str) -> list[str]:
    """The arguments of `rlhf-jax evaluate`."""
    study, out = options.study, place(options.study, policy, scorer=scorer)
    is_reference = policy.name == REFERENCE
    beside = scorer == PROXY and not is_reference
    samples = options.best_of if is_reference else options.num_samples
    return [
        f"--model={policy.model}",
        *([f"--reference={options.model}"] if beside else []),
        f"--prompts={study / 'data' / 'held_out_prompts.jsonl'}",
        f"--reward-model={study / scorer / 'model'}",
        f"--texts={study / 'data' / TEXTS[scorer]}.jsonl",
        f"--num-samples={samples}",
        f"--max-new-tokens={options.max_new_tokens}",
        f"--temperature={options.temperature}",
        f"--batch-size={max(options.batch_size * options.num_samples // samples, 1)}",
        f"--seed={policy.seed}",
        *("--snapshot-every=1", "--keep-snapshots=1", "--no-progress"),
        f"--out={out}",
        *(["--resume"] if (out / folder.CONFIG).exists() else []),
    ]


def main(options: Options) -> None:
    """Writes STUDY/evaluation, with a folder of `rlhf-jax evaluate` per evaluation."""
    if options.smallest:
        options = dataclasses.replace(options, max_new_tokens=8, best_of=4)
    for policy in policies(options):
        for scorer in TEXTS:
            if (place(options.study, policy, scorer=scorer) / "summary.json").exists():
                continue
            print(f"{policy.name}, seed {policy.seed}, by the {scorer}", flush=True)
            evaluate.command(command_line(options, policy, scorer=scorer))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
