"""`rlhf-jax --tyro-write-completion SHELL FILE`: commands and options, by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from rlhf_jax.functional.errors import InputError
from rlhf_jax.runs import choices

# {shell: {text that tyro writes: its replacement}}.
SHELLS = {
    "bash": {},
    # `source` must only register the function; a file in $fpath must complete.
    "zsh": {
        '\n_tyro_rlhf_jax "$@"': """
if (( $+compstate )); then
  _tyro_rlhf_jax "$@"
else
  compdef _tyro_rlhf_jax rlhf-jax
fi"""
    },
    # One argument may have 128 KiB on Linux, and the options are larger.
    "fish": {
        '($python_cmd -c "$pycode"': '(printf %s "$pycode" | $python_cmd -',
    },
}


@dataclasses.dataclass(frozen=True)
class Bare:
    """A command of which only the name is completed."""


def write(argv: Sequence[str], *, commands: Mapping[str, type[Any]]) -> None:
    """Writes the script that a shell sources.

    It is tyro's script of the union of all commands: that of one command would complete
    its options after every command.
    """
    if len(argv) != 3 or argv[1] not in SHELLS:
        raise InputError(
            f"expected --tyro-write-completion {'|'.join(SHELLS)} FILE, got "
            f"{' '.join(argv)}; write these three words"
        )
    path = Path(argv[2])
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)]
        for name, kind in commands.items()
    ]
    union: Any = Union[tuple(kinds)]  # noqa: UP007
    try:
        with contextlib.suppress(SystemExit):  # tyro exits after writing
            tyro.cli(union, prog="rlhf-jax", args=argv, registry=choices.REGISTRY)
        script = path.read_text(encoding="utf-8")
        # A shell would offer the second line of a help text as a word.
        (spec,) = re.findall(r"^COMPLETION_SPEC = .*$", script, re.MULTILINE)
        script = script.replace(spec, re.sub(r"\\+n", " ", spec))
        for theirs, ours in SHELLS[argv[1]].items():
            script = script.replace(theirs, ours)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"expected to write the file {path}, got {error.strerror}; name another"
        ) from error
    print(f"next: source {path}")
