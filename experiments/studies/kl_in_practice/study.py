"""Does the choice of the KL matter? Every choice × β × 5 seeds, by PPO and GRPO.

    python experiments studies.kl_in_practice.study --out runs/kl_in_practice

The study makes two sweeps of 550 runs (`language.py` against a reward model,
`arithmetic.py` with a verifier) and their figures. The sweeps cover the 17 choices of
estimator, placement and direction with different expected gradients (`choices.py`) and
the weighted k2 of responses, at three β, and β = 0. Each sweep's results.json answers
the published claims (`published.py`). After an interruption the same command resumes.
References and reward models are trained once, in runs/prepared.

Expect about two hours on two idle CPU cores; recorded in recorded/kl_in_practice.
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
    """Number of processes; each compiles every program once."""


def main(options: Options) -> None:
    """Runs the unfinished runs of both sweeps and prints the figures."""
    failed = []
    for world in WORLDS:
        file = Path(__file__).with_name(f"{world}.py")
        out = options.out / world
        try:
            sweep.main(sweep.Config(file=file, out=out, jobs=options.jobs, map=True))
        except StopError as error:  # some runs failed, the others are complete
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
