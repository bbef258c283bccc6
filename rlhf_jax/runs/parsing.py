"""Reads JSON, TOML, YAML and expressions that users and other programs wrote.

Every reader of the package uses this module, so one set of limits holds for all and
each error names its place. Any text is either read or refused with an InputError.

| limit | of |
|---|---|
| MAX_SIZE | bytes of a document, characters of a line of JSON Lines |
| MAX_DEPTH | objects and lists within each other; operations of an expression |
| MAX_DIGITS | of an integer, so that float64 holds every one |
| MAX_EXPRESSION | characters of an expression |

Bytes that are not UTF-8 and repeated keys of an object are refused everywhere. Numbers
that are not finite and lone surrogates are refused unless a file is `foreign`: a row of
data or metrics, or the config of a checkpoint. Other programs write such values in
fields that this package does not read, and the reader of a field checks its value. A
byte order mark is skipped.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import tomllib
import warnings
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_jax.functional.errors import InputError

Shape = Any  # see `misfit`
MAX_SIZE = 2**26
MAX_DEPTH = 100
MAX_DIGITS = 300
MAX_EXPRESSION = 2000
_MOST_VALUES = 10**6  # to which aliases of YAML, or Python code, may expand
_SHOWN = 40  # characters of a refused value in a message
_DEEPER = "nested deeper than {} objects or lists"


class Source(NamedTuple):
    """The place of a text, and the words of the error that refuses it."""

    where: str  # a file, a file and its line, or an option
    expected: str
    advice: str = ""

    def refusal(self, got: str) -> InputError:
        """Returns the error that says what was found instead."""
        advice = f"; {self.advice}" if self.advice else ""
        return InputError(f"{self.where}: expected {self.expected}, got {got}{advice}")


def read_object(
    path: Path,
    *,
    expected: str,
    advice: str,
    shape: Shape = dict,
    foreign: bool = False,
) -> dict[str, Any]:
    """Reads the object in a file, TOML or YAML by its suffix and JSON otherwise.

    Args:
      shape: the expected shape of the object, see `misfit`.

    Raises:
      InputError: the file cannot be read or parsed, or holds no object of the shape.
    """
    source = Source(shown(path), expected, advice)
    text = read_text(path, expected=expected, advice=advice)
    load = _LOADERS.get(path.suffix, _json)
    fields = _value(text, source, load=load, depth=MAX_DEPTH, foreign=foreign)
    if (why := misfit(fields, shape)) is not None:
        raise source.refusal(why)
    return fields


def read_text(path: Path, *, expected: str, advice: str) -> str:
    """Reads the text of a file.

    Raises:
      InputError: the file cannot be read, is too large, or is not UTF-8.
    """
    source = Source(shown(path), expected, advice)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = error.strerror if isinstance(error, OSError) else error
        source = source._replace(advice="give a file that can be read")
        raise source.refusal(f"a file that cannot be read: {why}") from None
    if len(data) > MAX_SIZE:
        raise source.refusal(f"more than {MAX_SIZE} bytes")
    return decoded(data, source)


def shown(path: Path) -> str:
    """Returns a path for messages: at most 200 characters, and no NUL."""
    return f"{path!s:.200}".replace("\0", "\\0")


def decoded(data: bytes, source: Source) -> str:
    """Decodes UTF-8, with line feeds as line ends; raises InputError on other bytes."""
    try:
        # Skips the byte order mark that some editors write.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise source.refusal(f"{byte}, which is not UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def of_json(
    text: str | bytes,
    source: Source,
    *,
    depth: int = MAX_DEPTH,
    size: int | None = MAX_SIZE,
    foreign: bool = False,
) -> Any:
    """Parses a JSON text, such as a line of JSON Lines; raises InputError.

    Args:
      size: largest number of characters; None sets no limit.
    """
    if isinstance(text, bytes):
        text = decoded(text, source)
    if size is not None and len(text) > size:
        raise source.refusal(f"more than {size} characters")
    return _value(text, source, load=_json, depth=depth, foreign=foreign)


def expression(text: str, source: Source) -> ast.expr:
    """Parses a Python expression without evaluating it; raises InputError."""
    if len(text) > MAX_EXPRESSION:
        raise source.refusal(f"{len(text)} characters, more than {MAX_EXPRESSION}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, such as about "1is 2"
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise source.refusal(str(error.msg).partition(";")[0]) from None
    # The compiler has its own limit on depth; a NUL raises ValueError.
    except (ValueError, RecursionError, MemoryError) as error:
        got = str(error) or "more operations than Python reads"
        raise source.refusal(got) from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        for node in level:
            if isinstance(node, ast.Constant) and (why := _of_leaf(node.value)):
                raise source.refusal(f"one {why}")
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise source.refusal(f"operations nested deeper than {MAX_DEPTH}")


def fault(
    value: Any,
    *,
    depth: int = MAX_DEPTH,
    most: int = _MOST_VALUES,
    foreign: bool = False,
) -> str | None:
    """Finds what is not allowed in a value from a text or a user's Python file.

    Args:
      most: largest number of values in it.

    Returns:
      The fault, as "with ..."; None for a valid value. The search does not recurse.
    """
    level, count = [value], 1
    for _ in range(depth + 1):
        if not foreign:
            for leaf in level:
                if (why := _of_leaf(leaf)) is not None:
                    return why
        inner = [of for of in level if isinstance(of, dict | list | tuple)]
        if not inner:
            return None
        count += sum(map(len, inner))
        if count > most:
            return f"with aliases that expand to more than {most} values"
        keys = (key for of in inner if isinstance(of, dict) for key in of)
        # Keys of a foreign value come from JSON, and are texts.
        if not foreign and (why := _of_keys(keys)) is not None:
            return why
        level = [
            leaf
            for of in inner
            for leaf in (of.values() if isinstance(of, dict) else of)
        ]
    return _DEEPER.format(depth)


def misfit(value: Any, shape: Shape, *, at: str = "") -> str | None:
    """Returns the first misfit of a value, as "alarms[0].name = int 3", or None.

    Args:
      shape: a type; [shape] for a list whose entries have that shape; or {name: shape}
        for an object with these fields, which may have others. A field named "name?"
        is optional.
    """
    kind: Any = {dict: dict, list: list}.get(type(shape), shape)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        named = f"{at} = " if at else ""
        return f"{named}{type(value).__name__} {value!r:.{_SHOWN}}"
    if isinstance(shape, list):
        inner = [(f"{at}[{n}]", of, shape[0]) for n, of in enumerate(value)]
    elif isinstance(shape, dict):
        inner = []
        for name, of in shape.items():
            key, dot = name.removesuffix("?"), "." if at else ""
            if key in value:
                inner.append((f"{at}{dot}{key}", value[key], of))
            elif key == name:
                return f"one without {at}{dot}{key}"
    else:
        return None
    whys = (misfit(of, shape, at=at) for at, of, shape in inner)
    return next((why for why in whys if why is not None), None)


def _of_leaf(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"with {value}, which is not a finite number"
    if isinstance(value, int) and not -(10**MAX_DIGITS) < value < 10**MAX_DIGITS:
        return f"with a number of more than {MAX_DIGITS} digits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"with {value[error.start]!r}, half a surrogate pair"
    return None


def _of_keys(keys: Iterable[Any]) -> str | None:
    for key in keys:
        if not isinstance(key, str):
            return f"with the key {key!r:.{_SHOWN}}, which is not a string"
        if (why := _of_leaf(key)) is not None:
            return f"with a key {why}"
    return None


def _value(
    text: str,
    source: Source,
    *,
    load: Callable[[str], Any],
    depth: int,
    foreign: bool,
) -> Any:
    try:
        value = load(text)
        if foreign and load is _json and text.count("{") + text.count("[") <= depth:
            return value  # depth is the only limit on foreign JSON
        # Each value of JSON and TOML has at least one character of the text.
        most = max(len(text), _MOST_VALUES)
        why = fault(value, depth=depth, most=most, foreign=foreign)
        if why is None:
            return value
    except RecursionError:
        why = _DEEPER.format(depth)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if "\n" in text else ""
        why = f"({error.msg}, {at}column {error.colno})"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        why = f"({error.problem}{at})"
    # PyYAML raises many types for a wrong value of a tag, such as `!!int x`. Python's
    # message about too many digits ends with advice for programmers, which is cut.
    except Exception as error:
        message = " ".join(str(error).partition(";")[0].split())
        why = f"({message or type(error).__name__})"
    comma = "" if why.startswith("(") else ","
    raise source.refusal(f"{text[:_SHOWN]!r}{comma} {why}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = _twice(key for key, _ in pairs)
        raise ValueError(f"the key {twice!r:.{_SHOWN}} twice")
    return fields


_json = json.JSONDecoder(object_pairs_hook=_once).decode  # `loads` makes one per call


def _twice(keys: Iterable[Hashable]) -> Hashable:
    earlier = set[Hashable]()
    for key in keys:
        if key in earlier:
            return key
        earlier.add(key)
    return None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses repeated keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Checks the keys of a mapping before `<<` merges others into it."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            problem = f"the key {_twice(keys)!r:.{_SHOWN}} twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


_LOADERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": functools.partial(yaml.load, Loader=_Loader),
    ".yml": functools.partial(yaml.load, Loader=_Loader),
}
