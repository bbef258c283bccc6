"""The manifest beside an exported model: OUT/model.sha256 for OUT/model.

`sha256sum -c model.sha256` in OUT also checks it. A model with a manifest is checked
when it is loaded. A copy without one is loaded like any other checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.proof.run_files import MANIFEST, Checked


def path_of(model: Path) -> Path:
    """Returns the path of a model folder's manifest."""
    model = model.absolute()
    return model.parent / (model.name + MANIFEST)  # "/" has no name


def has_manifest(model: Path) -> bool:
    """Returns whether the manifest exists; False if the system refuses its name."""
    return os.path.exists(path_of(model))  # Path.exists raises if it is too long


def write(model: Path, *, anew: bool) -> None:
    """Writes the manifest of a complete folder; only the first process writes.

    Args:
      anew: whether the folder is new; otherwise only a missing manifest is written.
    """
    if processes.is_first() and (anew or not has_manifest(model)):
        folder.write_text(path_of(model), _written(_digests(model)))


def check(model: Path) -> Checked:
    """Compares a folder with its manifest; without one, nothing is checked."""
    if not has_manifest(model):
        return Checked(0, [], [], [], [])
    text = path_of(model).read_bytes().decode(errors="replace")
    listed = {line[66:]: line[:64] for line in text.split("\n")[:-1]}
    if text != _written(listed):
        fault = f"{path_of(model).name}: it is not as it was written"
        return Checked(0, [fault], [], [], [])
    now = _digests(model)
    faults = [
        f"{name}: {'missing' if name not in now else 'another SHA-256'}"
        for name, digest in sorted(listed.items())
        if now.get(name) != digest
    ]
    added = [name for name in now if name not in listed]
    return Checked(len(listed) - len(faults), faults, [], [], added)


def require(model: Path) -> None:
    """Refuses a model that differs from its manifest; prints a note about added files.

    Raises:
      InputError: files differ; the message names them.
    """
    checked, manifest = check(model), path_of(model).name
    if checked.faults:
        raise InputError(
            f"expected the files that {manifest} beside it lists, got\n"
            f"{checks.listed(checked.faults)}\nexport it again, or remove that list "
            f"if you made the change"
        )
    if checked.added and processes.is_first():
        print(
            f"note: {model} has files that {manifest} does not list:\n"
            f"{checks.listed(checked.added)}",
            file=sys.stderr,
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
