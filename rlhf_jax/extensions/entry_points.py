"""Entry points of other packages, and checks that optional packages are installed.

    [project.entry-points."rlhf_jax.verifiers"]
    short = "my_package:verify"

This module does not import JAX, since the list of commands uses it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, get_args

from rlhf_jax.functional.errors import InputError

Group = Literal["methods", "verifiers", "environments", "families"]


def names(group: Group) -> tuple[str, ...]:
    """Returns the sorted names of all entry points in `rlhf_jax.GROUP`."""
    return tuple(sorted({point.name for point in _points(group)}))


def described(group: Group) -> dict[str, str]:
    """Returns {name: summary of its package}, with a note if it cannot be imported."""
    return {point.name: _summary(point) + _missing(point) for point in _points(group)}


def packages() -> dict[str, str]:
    """Returns {name: version} of the installed packages that add a part."""
    owners = [point.dist for group in get_args(Group) for point in _points(group)]
    return {dist.name: dist.version for dist in owners if dist is not None}


def load(name: str, *, group: Group, kind: Any = Callable) -> Any:
    """Imports the object that an entry point names.

    Args:
      kind: type that the object must have.

    Raises:
      InputError: the object cannot be imported or has another type, or the name does
        not belong to exactly one package.
    """
    points = [point for point in _points(group) if point.name == name]
    owners = " and ".join(sorted(map(_owner, points)))
    if len(points) != 1:
        raise InputError(
            f"expected one package with {name!r} among its rlhf_jax.{group}, got "
            f"{owners or 'none'}; uninstall all but one"
        )
    (point,) = points
    where = f"entry point {name!r} of {owners}"
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:  # the package may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"{where}: expected {point.value} to be imported, got {why}; mend that "
            f"package, or uninstall it"
        ) from error
    if not isinstance(loaded, kind):
        raise InputError(
            f"{where}: expected a {kind.__name__.lower()} at {point.value}, got "
            f"{loaded!r:.80}; mend that package, or uninstall it"
        )
    return loaded


def require_package(
    package: str, *, extra: str, needed_by: str, instead: str = ""
) -> None:
    """Checks that a package of an extra is installed, and imports nothing.

    Raises:
      InputError: it is missing; the message says how to install it, or do `instead`.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{needed_by} needs the package {package}, which is not installed; "
            f"pip install 'rlhf-jax[{extra}]'{instead}"
        )


def _points(group: Group) -> metadata.EntryPoints:
    return metadata.entry_points(group=f"rlhf_jax.{group}")


def _owner(point: metadata.EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else point.dist.name


def _summary(point: metadata.EntryPoint) -> str:
    """The description in its package's pyproject.toml; "module:object" without one."""
    if point.dist is None or "Summary" not in point.dist.metadata:
        return point.value
    return point.dist.metadata["Summary"]


def _missing(point: metadata.EntryPoint) -> str:
    """A note if the top-level module is missing; nothing is imported."""
    top = point.value.partition(":")[0].partition(".")[0].strip()
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # not the name of a module
        spec = None
    return "" if spec else f" (cannot be imported: no module {top!r})"
