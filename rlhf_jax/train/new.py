"""`rlhf-jax new KIND NAME`: writes a package of four files that extends the library.

The templates are working packages whose name is `my_KIND`.
"""

from __future__ import annotations

import importlib.util
import keyword
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_jax.functional.errors import InputError, refuse
from rlhf_jax.runs import command_line

TEMPLATES = Path(__file__).with_name("templates")
KINDS = {
    "method": "a policy gradient: rlhf-jax NAME",
    "reward": "what a response is worth: --verifier NAME",
    "environment": "a task of several turns: --environment NAME",
    "family": "checkpoints with this model_type: --model CHECKPOINT",
}


def write(kind: str, name: str, *, folder: Path) -> list[Path]:
    """Writes the package FOLDER/NAME, and returns its files."""
    refuse(_faults(kind, name))
    target = folder / name
    try:
        target.mkdir()
    except OSError as error:
        raise InputError(
            f"expected to make the folder {target}, got {error.strerror}; choose "
            f"another name, or work in another folder"
        ) from error
    names = {f"my_{kind}": name, "MyFamily": name.title().replace("_", "")}
    written = []
    for template in sorted((TEMPLATES / kind).iterdir()):
        if template.is_file():
            path, text = template.name, template.read_text(encoding="utf-8")
            for old, new in names.items():
                path, text = path.replace(old, new), text.replace(old, new)
            written.append(target / path)
            written[-1].write_text(text, encoding="utf-8")
    return written


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax new`: writes a package from a command line."""
    parser = command_line.Arguments(
        prog="rlhf-jax new",
        description="A package of yours that adds a part to the library: its code, a "
        "test that passes, pyproject.toml with the entry point, and a README.",
        epilog="kinds: " + "; ".join(f"{kind}, {use}" for kind, use in KINDS.items()),
    )
    parser.add_argument("kind", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("name", help="of the module, the package and its folder")
    options = parser.parse_args(argv)
    files = write(options.kind, options.name, folder=Path())
    print(f"{options.name}/ has {', '.join(file.name for file in files)}; next:")
    print(f"  pip install -e {options.name} && pytest {options.name}")


def _faults(kind: str, name: str) -> Iterator[str]:
    if kind not in KINDS:
        yield f"expected one of {', '.join(KINDS)}, got {kind!r}; choose one"
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        yield (
            f"expected a name for a Python module, got {name!r}; write letters, digits "
            f"and _, as my_{kind}"
        )
    elif kind in KINDS and (name in _taken(kind) or importlib.util.find_spec(name)):
        yield (
            f"expected a name that is free, got {name!r}, the name of an existing "
            f"module or {kind}; choose another"
        )


def _taken(kind: str) -> Sequence[str]:
    """Returns the library's own names of a kind, which entry points cannot take."""
    if kind == "method":
        from rlhf_jax.train.main import COMMANDS

        return [*COMMANDS]
    if kind == "reward":
        from rlhf_jax.train.config.rewards import VERIFIERS

        return VERIFIERS
    if kind == "environment":
        from rlhf_jax.train.config.sampler import ENVIRONMENTS

        return ENVIRONMENTS
    from rlhf_jax.checkpoints import hf

    return [*hf.FAMILIES]
