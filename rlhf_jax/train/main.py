"""The console script `rlhf-jax`: trainers, and what can be asked without one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.train.trainers import TRAINERS, outside, trainer

EVALUATE = {
    "evaluate": "A policy and its reference on held-out prompts, with intervals."
}
PLAN = {
    "plan": "Whether a run fits TPUs or GPUs that are not there, and how fast it is."
}
SWEEP = {"sweep": "Many runs as one question: a grid, seeds, and claims answered."}
REPORT = {"report": "Runs on one page: curves, tokens by KL, and hacked rewards."}
QUERIES = {
    "verify": "Whether the snapshots of a run are whole and its frozen models unmoved.",
    "kl": "The KL of a text between two models, token by token.",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command: status 2 for what the user got wrong, 1 for a bad result."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    name, *options = argv
    try:
        if name in TRAINERS:
            trainer(name).command(options)
        elif name in QUERIES:
            from rlhf_jax.train import queries

            queries.command(argv)
        elif name in PLAN:
            from rlhf_jax.train.plan.command import command

            command(options)
        elif name in EVALUATE:
            from rlhf_jax.train import evaluate

            evaluate.command(options)
        elif name in SWEEP:
            from rlhf_jax.train import sweep

            sweep.command(options)
        elif name in REPORT:
            from rlhf_jax.train import report

            report.command(options)
        elif name in (others := outside()):
            others[name].load()(options)
        else:
            own = (*TRAINERS, *EVALUATE, *SWEEP, *REPORT, *PLAN, *QUERIES)
            known = ", ".join((*own, *others))
            raise InputError(f"expected one of the commands {known}, got {name!r}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except StopError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def usage() -> str:
    """All commands, on one screen."""
    lines = ["usage: rlhf-jax COMMAND [OPTIONS]; rlhf-jax COMMAND --help lists options"]
    titled = {
        "Train": {name: trainer.says for name, trainer in TRAINERS.items()},
        "Compare": EVALUATE | SWEEP | REPORT,
        "Ask": PLAN | QUERIES,
        "Of other packages": {name: entry.value for name, entry in outside().items()},
    }
    for title, commands in titled.items():
        if not commands:
            continue
        lines += ["", f"{title}:", *(f"  {k:13} {v}" for k, v in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
