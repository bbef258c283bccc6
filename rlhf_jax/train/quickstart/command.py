"""`rlhf-jax quickstart`: SFT, a reward model and PPO on data that it writes itself.

Every command that it prints and runs also works on a user's own files.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_jax.functional.errors import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.quickstart import language

LINES = (
    "sft --tokenizer OUT/tokenizer --data OUT/demonstrations.jsonl"
    " --fresh-num-layers 2 --fresh-max-positions 64 --batch-size 64 --num-steps 100"
    " --learning-rate 3e-3 --out OUT/sft",
    "reward-model --model OUT/sft/model --data OUT/pairs.jsonl --batch-size 64"
    " --num-steps 100 --learning-rate 1e-3 --out OUT/reward",
    "ppo --model OUT/sft/model --reward-model OUT/reward/model"
    " --prompts OUT/prompts.jsonl --held-out OUT/held_out.jsonl --max-new-tokens 24"
    " --num-steps 20 --learning-rate 3e-4 --critic.learning-rate 1e-3 --kl-coef 0.1"
    " --out OUT/ppo",
)


def commands(out: Path, *, num_steps: int | None = None) -> list[list[str]]:
    """Returns the words of each command line, with OUT and the steps replaced."""
    lines = [
        [
            str(out / word.removeprefix("OUT/")) if word.startswith("OUT/") else word
            for word in line.split()
        ]
        for line in LINES
    ]
    if num_steps is not None:
        for words in lines:
            words[words.index("--num-steps") + 1] = str(num_steps)
    return lines


def run(out: Path, *, num_steps: int | None = None) -> None:
    """Writes the data, then prints and runs one command after the other.

    Raises:
      SystemExit: a command failed, and has printed its error.
    """
    from rlhf_jax.functional import checks
    from rlhf_jax.train.main import COMMANDS

    if num_steps is not None:
        checks.at_least_one(**{"--num-steps": num_steps})
    started = time.perf_counter()
    written = prepare(out)
    print("wrote", *written, sep="\n  ")
    for name, *options in commands(out, num_steps=num_steps):
        print(f"\n$ rlhf-jax {shlex.join([name, *options])}", flush=True)
        sys.argv[1:] = [name, *options]  # a stopped run prints it as how to resume
        COMMANDS[name].load().command(options)
    print(
        f"\n{time.perf_counter() - started:.0f} s. The lines with $ are all that ran:"
        f" use them with your own files, another --out, and --model in place of"
        f" --tokenizer and --fresh-.... Responses of the policy are in"
        f" {out / 'ppo' / 'samples.jsonl'}."
    )


def prepare(out: Path) -> list[Path]:
    """Writes the data into a new folder, and returns the paths."""
    from rlhf_jax.runs.object_storage import urls  # loads JAX, unneeded for --help

    urls.refuse(out, option="--out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if names := sorted(path.name for path in out.iterdir()):
            raise InputError(
                f"--out {out}: expected a folder that is absent or empty, got one with "
                f"{', '.join(names[:4])}; give another"
            )
        return language.write(out)
    except OSError as error:
        raise InputError(
            f"--out {out}: expected a folder that can be written, got {error.strerror};"
            f" give another"
        ) from error


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax quickstart`: runs all stages from a command line."""
    parser = command_line.Arguments(
        prog="rlhf-jax quickstart",
        description="Writes a tiny data set and trains on it: SFT, a reward model and "
        "PPO, by the commands that it prints. A minute or two on two CPU cores, "
        "without a network.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("quickstart"),
        help="folder for data and runs, absent or empty (default: quickstart)",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        help="steps of each stage, to see in short whether all of it runs (default: "
        "100, 100 and 20)",
    )
    options = parser.parse_args(argv)
    run(options.out, num_steps=options.num_steps)
