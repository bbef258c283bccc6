"""The manifest beside an exported model: OUT/model.sha256 of OUT/model.

`sha256sum -c model.sha256` in OUT reads it too. A model that has one is checked when it
is loaded; a copy elsewhere without it is a checkpoint like any other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.proof.run_files import MANIFEST


def path_of(model: Path) -> Path:
    """Where the manifest of a folder is."""
    model = model.absolute()
    return model.parent / (model.name + MANIFEST)  # "/" has no name


def has_manifest(model: Path) -> bool:
    """Whether it is there; False where the system takes no such name."""
    return os.path.exists(path_of(model))  # Path.exists raises of one too long


def write(model: Path, *, anew: bool) -> None:
    """Writes the manifest of a folder that is whole; the first process does so.

    Args:
      anew: the folder is new; else it is written where a killed run left none.
    """
    if processes.is_first() and (anew or not has_manifest(model)):
        folder.write_text(path_of(model), _written(_digests(model)))


def faults(model: Path) -> list[str]:
    """How a folder contradicts its manifest; none of one without."""
    if not has_manifest(model):
        return []
    text = path_of(model).read_bytes().decode(errors="replace")
    listed = {line[66:]: line[:64] for line in text.split("\n")[:-1]}
    if text != _written(listed):
        return [f"{path_of(model).name}: it is not as it was written"]
    now = _digests(model)
    return [
        f"{name}: {'missing' if name not in now else 'another SHA-256'}"
        if name in listed
        else f"{name}: not there when it was written"
        for name in sorted(listed.keys() | now.keys())
        if listed.get(name) != now.get(name)
    ]


def require(model: Path) -> None:
    """Refuses a model that is not what was exported.

    Raises:
      InputError: names the files that differ.
    """
    if differing := faults(model):
        raise InputError(
            f"expected the files that {path_of(model).name} beside it lists, got\n"
            f"{checks.listed(differing)}\nexport it again, or remove that list where "
            f"the change is yours"
        )


def _digests(model: Path) -> dict[str, str]:
    names = [
        path.relative_to(model).as_posix()
        for path in sorted(model.rglob("*"))
        if path.is_file()
    ]
    of = sums.of_files(model, names)
    place = model.absolute().name
    return {f"{place}/{name}": of[name][1] for name in names}


def _written(digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())
