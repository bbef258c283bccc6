"""The console script `rlhf-jax`: trainers, and what can be asked without one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rlhf_jax.functional.checks import InputError, StopError

TRAINERS = {
    "sft": "Supervised fine-tuning on your own texts.",
    "reward-model": "A reward model from your own preference pairs.",
    "ppo": "PPO on your own model, prompts and reward.",
    "grpo": "GRPO or RLOO on your own model, with a verifier.",
    "reinforce": "REINFORCE++ on your own model, with a verifier.",
    "dpo": "DPO from your own preference pairs, without a reward model.",
    "distill": "A student learns a teacher's distributions on its own samples.",
    "online-dpo": "DPO on pairs of the model's own samples, with a verifier.",
    "nash-md": "Nash-MD against a mixture with the reference, with a verifier.",
}
EVALUATE = {
    "evaluate": "A policy and its reference on held-out prompts, with intervals."
}
SWEEP = {"sweep": "Many runs as one question: a grid, seeds, and claims answered."}
QUERIES = {
    "verify": "Whether the snapshots of a run are whole and its frozen models unmoved.",
    "memory": "What PPO on a model takes of a device's memory.",
    "plan": "Whether a job fits TPUs or GPUs that are not there, and how fast it is.",
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
        elif name in EVALUATE:
            from rlhf_jax.train import evaluate

            evaluate.command(options)
        elif name in SWEEP:
            from rlhf_jax.train import sweep

            sweep.command(options)
        else:
            known = ", ".join((*TRAINERS, *EVALUATE, *SWEEP, *QUERIES))
            raise InputError(f"expected one of the commands {known}, got {name!r}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except StopError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def trainer(name: str) -> Any:
    """The module of a trainer, with its `Config` and `command`; no other is loaded."""
    match name:
        case "sft":
            from rlhf_jax.train import sft

            return sft
        case "reward-model":
            from rlhf_jax.train import reward_model

            return reward_model
        case "ppo":
            from rlhf_jax.train import ppo

            return ppo
        case "grpo":
            from rlhf_jax.train import grpo

            return grpo
        case "reinforce":
            from rlhf_jax.train import reinforce

            return reinforce
        case "dpo":
            from rlhf_jax.train import dpo

            return dpo
        case "distill":
            from rlhf_jax.train import distill

            return distill
        case "online-dpo":
            from rlhf_jax.train import online_dpo

            return online_dpo
        case "nash-md":
            from rlhf_jax.train import nash_md

            return nash_md
    raise AssertionError(name)  # of TRAINERS


def usage() -> str:
    """All commands, on one screen."""
    lines = ["usage: rlhf-jax COMMAND [OPTIONS]; rlhf-jax COMMAND --help lists options"]
    titled = {"Train": TRAINERS, "Compare": EVALUATE | SWEEP, "Ask": QUERIES}
    for title, commands in titled.items():
        lines += ["", f"{title}:", *(f"  {k:13} {v}" for k, v in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
