"""`--help` on one screen: a command's purpose and its most important options."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructTypeInfo,
)

from rlhf_jax.runs import choices

NARROWEST, WIDEST = 60, 100  # columns
OPTION = 28  # columns of an option with its metavar

Screen = Mapping[str, Sequence[str]]  # {title: fields}; "ppo.lam" is field of a group
METAVARS = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a config as an option of the command line."""

    name: str  # with its dashes
    metavar: str  # "" for a switch
    text: str
    default: Any  # dataclasses.MISSING if required

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is dataclasses.MISSING

    @property
    def usage(self) -> str:
        """The option as it is typed."""
        return f"{self.name} {self.metavar}".rstrip()

    @property
    def help(self) -> str:
        """The first sentence of the text, with the default in brackets if any."""
        first = re.split(r"(?<=\.) (?=[A-Z])", self.text)[0]
        shown = self.metavar and self.default not in (None, (), dataclasses.MISSING)
        return f"{first} [{self.default}]" if shown else first


def screen(
    config_class: type[Any],
    *,
    prog: str,
    description: str,
    options: Screen,
    notes: Sequence[str],
) -> str:
    """Returns the help screen, as wide as the terminal, from 60 to 100 columns.

    Args:
      config_class: the dataclass whose fields are the options.
      description: a docstring, of which the first two paragraphs are shown: what the
        command does and how it is called.
      options: the fields to show under each title.
      notes: sentences below the options.
    """
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    groups = {
        title: [option(config_class, field) for field in fields]
        for title, fields in options.items()
    }
    required = [
        option.usage for group in groups.values() for option in group if option.required
    ]
    usage = textwrap.wrap(
        " ".join([f"usage: {prog}", *required, "[OPTIONS]"]),
        width,
        subsequent_indent="    ",
    )
    lines = [*usage, "", *"\n\n".join(description.split("\n\n")[:2]).splitlines()]
    lines.append("")
    for title, group in groups.items():
        lines.append(f"{title}:")
        for shown in group:
            lines += _entry(shown, width=width)
    lines += ["", *textwrap.wrap(" ".join(notes), width, break_on_hyphens=False)]
    return "\n".join(lines)


def option(config_class: type[Any], path: str) -> Option:
    """Returns the option of the field at `path`, such as "ppo.lam".

    Raises:
      KeyError: the config has no such field.
    """
    holder, prefix, defaults = config_class, "", None
    *groups, name = path.split(".")
    for group in groups:
        annotation = typing.get_type_hints(holder, include_extras=True)[group]
        defaults = _default(holder, group, defaults)
        prefix += "" if choices.is_unnamed(annotation) else f"{group}."
        if defaults is dataclasses.MISSING:  # a group with required fields
            holder, defaults = choices.bare(annotation), None
        else:
            holder = type(defaults)
    annotation = typing.get_type_hints(holder)[name]
    return Option(
        name="--" + f"{prefix}{name}".replace("_", "-"),
        metavar=_metavar(annotation),
        text=documented(holder)[name],
        default=_written(_default(holder, name, defaults), annotation),
    )


def _written(default: Any, annotation: Any) -> Any:
    """A choice as text of the command line; any other default unchanged."""
    if dataclasses.is_dataclass(default) and choices.is_union(annotation):
        return choices.text(default, annotation)
    return default


def _default(holder: type[Any], name: str, values: Any) -> Any:
    if values is not None:
        return getattr(values, name)
    (field,) = (one for one in dataclasses.fields(holder) if one.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _metavar(annotation: Any) -> str:
    """The metavar of a type: INT for int | None, a|b for a Literal, "" for bool."""
    if annotation is bool:
        return ""
    if (spec := choices.spec(annotation)) is not None:
        return spec.metavar.partition("[")[0]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if choices.is_union(annotation):
        return "|".join(_metavar(kind) for kind in inner if kind is not type(None))
    if origin is typing.Literal:
        return "|".join(str(value) for value in inner)
    if origin is tuple:
        return f"{_metavar(inner[0])} ..."
    return METAVARS.get(annotation, "VALUE")


def _entry(shown: Option, *, width: int) -> list[str]:
    start = f"  {shown.usage}"
    above = [] if len(start) < OPTION - 1 else [start]
    text = textwrap.wrap(
        shown.help,
        width,
        initial_indent=" " * OPTION if above else start.ljust(OPTION),
        subsequent_indent=" " * OPTION,
        break_on_hyphens=False,
    )
    return above + text


@functools.cache
def documented(config_class: type[Any]) -> dict[str, str]:
    """Returns {field: the docstring below it}, inherited fields included."""
    texts: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):  # a class made by code, with its parents' fields
            continue
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.ClassDef)
        for field, below in itertools.pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                texts[field.target.id] = " ".join(below.value.value.split())
    return texts


class _Unwrapped:
    """The rule of tyro for dataclasses, with the texts of fields as one line each.

    tyro keeps the line breaks of a docstring below a field, and a terminal narrower
    than the source would wrap every line again.
    """

    asking = False  # for tyro's own rule, which this one must not answer

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if self.asking or not dataclasses.is_dataclass(info.type):
            return None
        self.asking = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            self.asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        texts = documented(info.type)
        fields = (
            dataclasses.replace(field, helptext=texts.get(field.name, field.helptext))
            for field in spec.fields
        )
        return dataclasses.replace(spec, fields=tuple(fields))


choices.REGISTRY.struct_rule(_Unwrapped())
