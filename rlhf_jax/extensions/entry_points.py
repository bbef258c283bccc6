"""Other packages: their entry points by name, and whether one is installed.

    [project.entry-points."rlhf_jax.verifiers"]
    short = "my_package:verify"

This module loads no JAX: the list of commands reads it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, get_args

from rlhf_jax.functional.errors import InputError

Group = Literal["methods", "verifiers", "environments", "families"]


def names(group: Group) -> tuple[str, ...]:
    """The names that installed packages have in `rlhf_jax.GROUP`, sorted."""
    return tuple(sorted({point.name for point in _points(group)}))


def described(group: Group) -> dict[str, str]:
    """{name: summary of its package}, with a remark where it cannot be imported."""
    return {point.name: _summary(point) + _missing(point) for point in _points(group)}


def packages() -> dict[str, str]:
    """{name: version} of the installed packages that add a part to any group."""
    owners = [point.dist for group in get_args(Group) for point in _points(group)]
    return {dist.name: dist.version for dist in owners if dist is not None}


def load(name: str, *, group: Group, kind: Any = Callable) -> Any:
    """The object that an entry point names.

    Args:
      kind: the type that it must have.

    Raises:
      InputError: it cannot be imported, is of another type, or two packages have one
        of this name.
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
    except (Exception, SystemExit) as error:  # whatever the other package raises
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
      InputError: it is not; says how to install it, and what to do `instead`.
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
    """A remark where the module is not there; only its package is looked for."""
    top = point.value.partition(":")[0].partition(".")[0].strip()
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # that is no name of a module
        spec = None
    return "" if spec else f" (cannot be imported: no module {top!r})"
