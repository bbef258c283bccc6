"""Choices with options of their own, each one option of the command line.

    --kl-control adaptive,target=6,unit=response
    --lora 16,alpha=32
    --sampler http://localhost:8000,model=mine

A choice is a union of small dataclasses, its kinds, so an option that nothing reads
cannot be written. The first word names the kind (`Adaptive` is adaptive). It is instead
the value of the first field for the kind whose `OPEN` is True, and for a single kind
whose first field is not None by default. In a file a choice is {"kind": "adaptive",
"target": 6.0, "unit": "response"}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from rlhf_jax.devices import mesh_shape
from rlhf_jax.functional.checks import InputError

TRUTH = {"true": True, "false": False}
NAMES = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
NAMES |= {bool: "true or false", types.NoneType: "None"}

REGISTRY = ConstructorRegistry()
"""Lets tyro read choices: `tyro.cli(..., registry=choices.REGISTRY)`."""
REGISTRY.primitive_rule(lambda info: spec(info.type))


@functools.cache
def spec(annotation: Any) -> PrimitiveConstructorSpec[Any] | None:
    """Returns the tyro spec that makes a choice one option; None for any other type.

    Args:
      annotation: a union of dataclasses, in which None is off, or a tuple[K, ...] of
        records, each one word that K.parse reads and str writes.
    """
    if is_union(annotation) and kinds_of(annotation):
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar(annotation),
            instance_from_str=lambda texts: parse(texts[0], annotation),
            is_instance=lambda value: (
                value is None or isinstance(value, tuple(kinds_of(annotation).values()))
            ),
            str_from_instance=lambda value: [text(value, annotation)],
        )
    kind: Any = next(iter(typing.get_args(annotation)), None)
    if typing.get_origin(annotation) is tuple and hasattr(kind, "parse"):
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="NAME=SOURCE[,KEY=VALUE...]",
            instance_from_str=lambda texts: tuple(map(kind.parse, texts)),
            is_instance=lambda value: (
                isinstance(value, tuple) and all(isinstance(one, kind) for one in value)
            ),
            str_from_instance=lambda value: list(map(str, value)),
        )
    return None


def spec_of(hint: Any) -> Any:
    """Returns the spec that reads a field as one option; None for a type or group."""
    extras = getattr(hint, "__metadata__", ())
    own = (one for one in extras if hasattr(one, "str_from_instance"))
    return next(own, spec(bare(hint)))


def bare(hint: Any) -> Any:
    """Returns a field's annotation without `Annotated` metadata."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def is_unnamed(hint: Any) -> bool:
    """Returns whether a group's options leave out its name."""
    extras = getattr(hint, "__metadata__", ())
    return any(getattr(one, "name", None) == "" for one in extras)


def options(wanted: Any, *, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """Yields (option, annotation) for a config's tree, or a function's arguments.

    These are one per choice or plain value, and those of each group's fields.
    """
    hints = typing.get_type_hints(wanted, include_extras=True)
    names = [name for name in hints if name != "return"]
    if dataclasses.is_dataclass(wanted):
        names = [field.name for field in dataclasses.fields(wanted)]
    for name in names:
        hint, option = hints[name], f"{prefix}{name}".replace("_", "-")
        if dataclasses.is_dataclass(bare(hint)) and spec_of(hint) is None:
            inner = prefix if is_unnamed(hint) else f"{option}."
            yield from options(bare(hint), prefix=inner)
        else:
            yield option, hint


def metavar(choice: Any) -> str:
    """Returns "adam|adamw[,KEY=VALUE...]"; for a single kind its first field's name."""
    kinds = kinds_of(choice)
    alone = _begins_with_a_value(kinds)
    names = [_first(*kinds.values()).upper()] if alone else list(kinds)
    keys = any(len(dataclasses.fields(kind)) > 0 for kind in kinds.values())
    return "|".join(names) + ("[,KEY=VALUE...]" if keys else "")


@functools.cache
def kinds_of(choice: Any) -> dict[str, Any]:
    """Returns {name on the command line: dataclass} of a union."""
    members = typing.get_args(choice) if is_union(choice) else (choice,)
    return {name_of(one): one for one in members if dataclasses.is_dataclass(one)}


def is_union(annotation: Any) -> bool:
    """Returns whether an annotation is A | B or Optional[A]."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def name_of(kind: Any) -> str:
    """Returns a class's name on the command line: TFAdam is tf_adam, AdamW is adamw."""
    return re.sub(r"(?<=.)(?=[A-Z][a-z])", "_", kind.__name__).lower()


def parse(written: str, choice: Any) -> Any:
    """Parses the text of a choice, such as "adaptive,target=6".

    Raises:
      InputError: the kind or a key is unknown, a key is missing or repeated, or a value
        is not of its type.
    """
    kinds = kinds_of(choice)
    optional = type(None) in typing.get_args(choice)
    if written.strip() in ("None", "none", "off") and optional:
        return None
    named = kinds.get(written.partition(",")[0].strip().replace("-", "_"))
    keys = {field.name for kind in kinds.values() for field in dataclasses.fields(kind)}
    own = None if named is None else [one.name for one in dataclasses.fields(named)]
    first, *rest = split(written.strip(), keys, own=own)
    word = first.replace("-", "_")
    opens = [kind for kind in kinds.values() if getattr(kind, "OPEN", False)]
    if word in kinds:
        kind, values = kinds[word], rest
    elif _begins_with_a_value(kinds) or (opens and ":" in first):
        (kind,) = opens or kinds.values()
        keyed = "=" in first and first.partition("=")[0].replace("-", "_") in keys
        values = [first if keyed else f"{_first(kind)}={first}", *rest]
    else:
        known = [*kinds, *(["None"] if optional else [])]
        raise InputError(
            f"expected one of {', '.join(known)}, got {first!r}; choose one"
        )
    return build(kind, fields(values, kind, written=written), written=written)


def fields(words: Iterable[str], kind: Any, *, written: str) -> dict[str, str]:
    """Returns {field: text} of words KEY=VALUE.

    Raises:
      InputError: a word has another form, or its key is not a field of the dataclass
        or is repeated.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in names or key in values:
            expected = f"{', '.join(names)}, each with = and a value"
            if not names:
                expected = f"{name_of(kind)} alone, which has no options"
            got = f"{key} twice" if key in values else repr(word)
            raise InputError(
                f"{written!r}: expected {expected}, got {got}; "
                f"{'give each once' if names else 'leave it out'}"
            )
        values[key] = value
    return values


def split(
    written: str, keys: Iterable[str], *, own: Sequence[str] | None = None
) -> list[str]:
    """Splits a text at each comma that precedes a key and an equals sign.

    Other commas belong to a value, such as a mesh: place=last:data=2,tensor=4. `own`
    holds the keys of the chosen kind, which a message names; None names all.

    Raises:
      InputError: a word before an equals sign is not a key.
    """
    known = sorted(keys)
    pattern = "|".join(re.escape(key).replace("_", "[_-]") for key in known)
    words = re.split(rf",(?=(?:{pattern})=)", written)
    for word in words:
        for other in re.findall(r",([\w-]+)=", word):
            if other not in mesh_shape.AXES:
                either = ", ".join(known if own is None else own) or "no key"
                raise InputError(
                    f"{written!r}: expected {either} before an equals sign, got "
                    f"{other}; choose one, or leave it out"
                )
    return words


def missing(kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a dataclass that have neither a default nor a value."""
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]


def build(kind: Any, values: dict[str, str], *, written: str) -> Any:
    """Makes a dataclass from the texts of its fields.

    Raises:
      InputError: a field is missing, or a value is not of its type or range.
    """
    hints = typing.get_type_hints(kind)
    if absent := missing(kind, values):
        raise InputError(
            f"{written!r}: expected {', '.join(absent)} with {name_of(kind)}, got "
            f"none; add {','.join(f'{name}=VALUE' for name in absent)}"
        )
    made = {}
    for name, value in values.items():
        try:
            made[name] = _value(value.strip(), hints[name])
        except (InputError, ValueError, TypeError) as error:
            why = f"{name}: {error}"
            if not isinstance(error, InputError):
                expected = f"expected {name} to be {described(hints[name])}"
                why = f"{expected}, got {value!r}; correct it"
            raise InputError(f"{written!r}: {why}") from None
    return kind(**made)


def _value(written: str, annotation: Any) -> Any:
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if is_union(annotation):
        if written == "None" and type(None) in inner:
            return None
        for one in inner:
            if one is not type(None):
                with contextlib.suppress(ValueError, TypeError):
                    return _value(written, one)
    elif origin is Literal:
        for one in inner:
            if str(one) == written:
                return one
    elif origin is tuple:
        return tuple(_value(one, inner[0]) for one in written.split("+"))
    elif annotation is bool:
        if written.lower() in TRUTH:
            return TRUTH[written.lower()]
    elif hasattr(annotation, "parse"):
        return annotation.parse(written)
    else:
        return annotation(written)
    raise ValueError


def text(value: Any, choice: Any) -> str:
    """Returns the text that `parse` reads as `value`, without default fields."""
    if value is None:
        return "None"
    alone = _begins_with_a_value(kinds_of(choice))
    words = [] if alone else [name_of(type(value))]
    if getattr(type(value), "OPEN", False):
        words = [str(getattr(value, _first(type(value))))]
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if own == field.default or (words and words[0] == str(own)):
            continue
        words.append(f"{field.name}={_written(own)}")
    return ",".join(words or [name_of(type(value))])


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "+".join(map(_written, value))
    return str(value)


def _begins_with_a_value(kinds: Mapping[str, Any]) -> bool:
    """Whether the first word is a value: there is one kind, and no name is needed."""
    (kind, *others) = kinds.values()
    return not others and dataclasses.fields(kind)[0].default is not None


def _first(kind: Any) -> str:
    return dataclasses.fields(kind)[0].name


def described(hint: Any) -> str:
    """Returns an annotation in words, for messages: "a number or None"."""
    annotation = bare(hint)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if (own := spec_of(hint)) is not None:
        return f"a text {own.metavar}"
    if is_union(annotation):
        return " or ".join(map(described, inner))
    if dataclasses.is_dataclass(annotation):
        names = (field.name for field in dataclasses.fields(annotation))
        return f"an object with {', '.join(names)}"
    if origin is tuple and inner[0] in NAMES:
        count = "" if inner[-1] is ... else f"{len(inner)} "
        return f"{count}{NAMES[inner[0]].removeprefix('a ')}s"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return NAMES.get(annotation, name)
