"""Writes the HTML reference of the public API: `python .ci/reference.py [FOLDER]`.

The pages are those of the pure packages, of the front door's modules, and of what a
program of one's own imports besides. It needs the extra `docs`. Anything that pdoc
warns of ends the command with status 1.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

import chex
import pdoc
import pdoc.extract
import pdoc.render
from transformers import PreTrainedTokenizerBase

import rlhf_jax

PACKAGES = ("functional", "models", "roles", "algorithms", "devices", "checkpoints")
MODULES = ("verification.pool", "verification.code.verifier", "runs.metrics")
# Names in annotations that no module of ours holds when it runs: optax.OptState is a
# union that names itself, and transformers is imported by type checkers alone.
NAMES = {
    "ArrayTree": chex.ArrayTree,
    "PreTrainedTokenizerBase": PreTrainedTokenizerBase,
}


def public_modules() -> list[str]:
    """The specifications of what has a page: packages bring their modules."""
    specs = ["rlhf_jax", *(f"rlhf_jax.{name}" for name in (*PACKAGES, *MODULES))]
    covered = pdoc.extract.walk_specs(specs)
    # A package that names what it exports does not bring its other modules.
    front = [getattr(rlhf_jax, name).__name__ for name in rlhf_jax.__all__]
    return specs + [name for name in front if name not in covered]


def resolve_annotations(module: ModuleType) -> None:
    """Gives the generated constructors of a module's records their types.

    Those of dataclasses and named tuples have strings for annotations, which pdoc
    looks up in the module of the subclass and not in that of the field.
    """
    for name, value in NAMES.items():
        vars(module).setdefault(name, value)
    for cls in vars(module).values():
        if not inspect.isclass(cls) or not cls.__module__.startswith("rlhf_jax"):
            continue
        if dataclasses.is_dataclass(cls):
            constructor = cls.__init__
        elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
            constructor = cls.__new__
        else:
            continue
        types = typing.get_type_hints(cls, localns=NAMES)
        for name in constructor.__annotations__.keys() & types.keys():
            constructor.__annotations__[name] = types[name]


def write(folder: Path) -> int:
    """Writes the pages and returns how many modules they show."""
    warnings.simplefilter("error")
    specs = public_modules()
    names = pdoc.extract.walk_specs(specs)
    # Packages that load names on first use: pdoc reads what is loaded.
    for name in names:
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            vars(module)[exported] = getattr(module, exported)
        resolve_annotations(module)
    # pdoc links full names in backquotes to their pages.
    lines = []
    for name in rlhf_jax.__all__:
        module = getattr(rlhf_jax, name)
        summary = (module.__doc__ or "").partition("\n")[0]
        lines.append(f"- {name} (`{module.__name__}`): {summary}")
    lines += ["", "Everything that has a page:", ""]
    lines += [f"- `{name}`" for name in names]
    rlhf_jax.__doc__ = "\n".join([rlhf_jax.__doc__ or "", *lines])
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*specs, output_directory=folder)
    return len(names)


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    print(f"{write(out)} modules in {out / 'index.html'}")
