"""What the choice of the KL does: every choice × β × 5 seeds, PPO and GRPO, two worlds.

    python experiments studies.kl_in_practice.study --out runs/kl_in_practice

Two sweeps of 550 runs (`language.py` against a reward model, `arithmetic.py` with a
verifier), and their figures: the 17 choices of estimator, placement and direction whose
expected gradient is their own (`choices.py`) and the weighted square of responses, at
three β, and β = 0. The field's claims
about them (`published.py`) are answered in each sweep's results.json. The same command
goes on where it was stopped. References and reward models are made once, in
runs/prepared.

About two hours of two idle CPU cores; recorded in experiments/recorded/kl_in_practice.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import tyro

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs.command_line import Interrupted
from rlhf_jax.train import sweep
from studies import finished
from studies.kl_in_practice import figures

WORLDS = ("language", "arithmetic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    """Folder of both sweeps."""
    jobs: int = 2
    """Processes at a time; each compiles every program once."""


def main(options: Options) -> None:
    """Runs what is left of both sweeps, and tells what they have come to."""
    failed = []
    for world in WORLDS:
        file = Path(__file__).with_name(f"{world}.py")
        out = options.out / world
        try:
            sweep.main(sweep.Config(file=file, out=out, jobs=options.jobs, map=True))
        except StopError as error:  # some runs failed, and the others are complete
            failed.append(str(error))
        figures.main(finished.Options(out))
    if failed:
        raise StopError("\n".join(failed))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
    except StopError as error:
        sys.exit(f"stopped: {error}")
    except Interrupted as stop:
        print("stopped and saved; the same command goes on", file=sys.stderr)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        print("stopped without saving; the same command goes on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
