"""The console script `rlhf-jax`: trainers, and commands that read their results.

Every mistake of a user is an `InputError`: `main` prints it and ends with status 2.
Docstrings of `train`, `sweeps` and `reports` do not list it.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import rlhf_jax
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.errors import InputError, StopError


class Command(NamedTuple):
    """A row of the table of commands."""

    path: str  # module in `rlhf_jax.train` with a function `command(argv)`
    summary: str  # one line

    @property
    def module(self) -> str:
        """The full name of the module."""
        return f"rlhf_jax.train.{self.path}"

    def load(self) -> Any:
        """Imports the module of this command, and no other."""
        return importlib.import_module(self.module)


BEGIN = {
    "quickstart": Command(
        "quickstart.command", "All of RLHF in two minutes, on data that it writes."
    ),
}
TRAINERS = {
    "sft": Command("supervised.sft", "Supervised fine-tuning on your own texts."),
    "reward-model": Command(
        "supervised.reward_model", "A reward model from your own preference pairs."
    ),
    "ppo": Command("methods.ppo", "PPO: a critic, and a clipped loss."),
    "grpo": Command("methods.grpo", "GRPO and RLOO: groups, and no critic."),
    "reinforce": Command("methods.reinforce", "REINFORCE++: rewards to go, whitened."),
    "dpo": Command(
        "supervised.dpo", "DPO from preference pairs, without a reward model."
    ),
    "distill": Command(
        "methods.distill", "A student learns a teacher on its own samples."
    ),
    "online-dpo": Command(
        "methods.online_dpo", "DPO on pairs of the policy's own samples."
    ),
    "nash-md": Command(
        "methods.nash_md", "Nash-MD against a mixture with the reference."
    ),
}
COMPARE = {
    "evaluate": Command(
        "evaluate", "A policy and its reference on held-out prompts, with intervals."
    ),
    "sweep": Command(
        "sweep", "A grid of options with several seeds, and claims that it tests."
    ),
    "report": Command(
        "report", "Runs on one page: curves, tokens by KL, and hacked rewards."
    ),
    "paper": Command(
        "queries.paper", "A sweep as LaTeX: tables, figures, methods, and BibTeX."
    ),
}
ASK = {
    "plan": Command(
        "plan.command",
        "Whether a run fits TPUs or GPUs that are not here, and how fast it is.",
    ),
    "verify": Command(
        "queries.verify",
        "Whether a run, sweep or model is as written, and its reference unmoved.",
    ),
    "audit": Command(
        "queries.audit", "Which KL your own loss really penalises, by enumeration."
    ),
    "audit-verifier": Command(
        "queries.audit_verifier",
        "Whether unit tests as a reward pay solutions and no cheats.",
    ),
    "kl": Command(
        "queries.token_kl", "The KL of a text between two models, token by token."
    ),
}
EXTEND = {
    "new": Command(
        "new", "Your own package: a method, a reward, an environment or a family."
    ),
}
COMMANDS = BEGIN | TRAINERS | COMPARE | ASK | EXTEND
COMPLETION = "--tyro-write-completion"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; status 2 is a mistake of the user, 1 a bad result."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    if argv[0] == "--version":
        print(f"rlhf-jax {rlhf_jax.__version__}")
        return
    name, *options = argv
    try:
        if name == COMPLETION:
            write_completion(argv)
        elif name in COMMANDS:
            COMMANDS[name].load().command(options)
        elif name in (others := entry_points.names("methods")):
            trainer(name).command(options)
        else:
            known = (*COMMANDS, *others)
            close = difflib.get_close_matches(name.lstrip("-"), known, n=1)
            raise InputError(
                f"expected one of the commands {', '.join(known)}, got {name!r}; "
                + (f"did you mean {close[0]}?" if close else "write one of them first")
            )
    except (InputError, StopError) as error:
        word, status = ("error", 2) if isinstance(error, InputError) else ("stopped", 1)
        print(f"{word}: {error}", file=sys.stderr)
        raise SystemExit(status) from None


def trainers() -> tuple[str, ...]:
    """Returns the names of all trainers, those of other packages last."""
    others = entry_points.names("methods")
    return (*TRAINERS, *(name for name in others if name not in COMMANDS))


def trainer(name: str) -> Any:
    """Returns the module of a trainer: `Config`, `command` and perhaps `PRESETS`."""
    if name in TRAINERS:
        return TRAINERS[name].load()
    module = entry_points.load(name, group="methods", kind=ModuleType)
    missing = sorted({"Config", "command"} - vars(module).keys())
    if missing:
        raise InputError(
            f"entry point {name!r}: expected a module with Config and command, got "
            f"{module.__name__} without {' and '.join(missing)}; mend that package, "
            f"or uninstall it"
        )
    return module


def write_completion(argv: Sequence[str]) -> None:
    """`rlhf-jax --tyro-write-completion bash FILE`: writes completion for a shell."""
    from rlhf_jax.train.queries import completion

    options = {name: row.load().Config for name, row in (TRAINERS | COMPARE).items()}
    bare = dict.fromkeys((*trainers(), *COMMANDS), completion.Bare)
    completion.write(argv, commands=bare | options)


def usage() -> str:
    """Returns the list of all commands, on one screen."""
    groups = {"Begin": BEGIN, "Train": TRAINERS, "Compare": COMPARE, "Ask": ASK}
    groups |= {"Extend": EXTEND}
    titled = {
        title: {name: command.summary for name, command in commands.items()}
        for title, commands in groups.items()
    }
    titled["Of other packages"] = {
        name: f"{about} (hidden by our command)" if name in COMMANDS else about
        for name, about in entry_points.described("methods").items()
    }
    lines = ["usage: rlhf-jax COMMAND [OPTIONS]; rlhf-jax COMMAND --help lists options"]
    for title, commands in titled.items():
        if commands:
            rows = [f"  {name:14} {summary}" for name, summary in commands.items()]
            lines += ["", f"{title}:", *rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
