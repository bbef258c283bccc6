"""`rlhf-jax kl`: the KL of a text between two models, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import tyro

from rlhf_jax.devices import precision, processes
from rlhf_jax.inspection import token_kl
from rlhf_jax.runs import command_line


def kl(options: Annotated[token_kl.Options, tyro.conf.arg(name="")]) -> None:
    """KL of a text between two models, token by token, on the terminal or as HTML."""
    processes.check_platform()
    with precision.of("float32"):
        token_kl.run(options)


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax kl`: runs the command from a command line."""
    command_line.call(kl, prog="rlhf-jax kl", args=argv)
