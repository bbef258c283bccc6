"""Every policy of the study on held-out prompts, by `rlhf-jax evaluate`.

    python experiments studies.preferences.evaluation runs/preferences \
        --model runs/smollm2

A policy is evaluated twice with the same seed, and thus on the same responses: once by
the proxy, beside the reference and on Shakespeare, and once by the judge, on GSM8K. The
reference has more samples for each prompt, whose best by the proxy are best-of-n.

Runs that are not done are left out, and evaluations that are done are kept: the same
command again goes on. With eight programs at a time all 27 policies took four minutes
on an H200.
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
TEXTS = {"proxy": "shakespeare", "judge": "gsm8k"}  # a reward model: texts beside it
REFERENCE = "reference"
PROXY = "proxy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    study: tyro.conf.Positional[Path]
    """Folder of the study, --out of its preparation."""
    model: str = "runs/smollm2"
    """The reference, from which all runs started."""
    num_samples: int = 2
    """Responses of a policy to each prompt."""
    best_of: int = 8
    """Responses of the reference to each prompt, of which best-of-n takes the best."""
    max_new_tokens: int = 48
    """Longest response, tokens, as in the sweeps."""
    temperature: float = 0.7
    """Of the samples, as in the sweeps."""
    batch_size: int = 16
    """Prompts at a time."""
    smallest: bool = False
    """Whether sizes are those of smallest.toml, whatever else is given."""


class Policy(NamedTuple):
    """A model to evaluate."""

    name: str  # as in "ppo/kl_coef=0,parameters=lora"
    seed: int
    model: str


def policies(options: Options) -> Iterator[Policy]:
    """The reference with the seeds of the runs, and every run that is done.

    Raises:
      InputError: a sweep has no run that is done.
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
    """Of `rlhf-jax evaluate`."""
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
    """Writes STUDY/evaluation, a folder of `rlhf-jax evaluate` for each."""
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
