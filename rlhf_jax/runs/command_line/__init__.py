"""From a command line to a config, and from a signal to a clean stop."""

from rlhf_jax.runs.command_line.main import Interrupt, Interrupted, go_on, main
from rlhf_jax.runs.command_line.options import (
    Presets,
    expect_arguments,
    load_function,
    parse,
)
from rlhf_jax.runs.command_line.refusals import Arguments, call, cli

__all__ = [
    "Arguments",
    "Interrupt",
    "Interrupted",
    "Presets",
    "call",
    "cli",
    "expect_arguments",
    "go_on",
    "load_function",
    "main",
    "parse",
]
