"""The options that every run has, and configs as JSON and as command lines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.extensions import entry_points
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import choices
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.profile import Window
from rlhf_jax.runs.snapshots import resume

LOGGERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options that every experiment has; an experiment adds its own fields.

    Only `seed` changes the result, so a resumed run may change all the others.
    """

    out: Path
    """Run folder or gs:// address; must be absent or empty unless --resume is given."""
    seed: int = 0
    """Seed of every random number."""
    resume: bool = False
    """Continue the run in --out from its newest snapshot."""
    resume_from: int | None = None
    """Step of an older snapshot to resume from, where the newest is damaged; 0 restarts
    the stage."""
    accept_lost_rows: bool = False
    """Whether to resume although files such as metrics.jsonl lost rows from before the
    snapshot."""
    snapshot_every: int = 50
    """Steps between snapshots."""
    keep_snapshots: int = 2
    """Number of newest snapshots to keep."""
    progress: bool = True
    """Whether the terminal shows progress."""
    tensorboard: bool = False
    """Whether to also write TensorBoard events to OUT/tensorboard."""
    wandb: bool = False
    """Whether to also log metrics to Weights & Biases."""
    trackio: bool = False
    """Whether to also log metrics to Trackio on this machine."""
    profile: str | None = None
    """Steps FIRST:END to trace with the JAX profiler into OUT/profile; 5:8 means the
    steps 5, 6 and 7. The rlhf-jax command and the quickstart also print a table."""

    @property
    def compute_dtype(self) -> str:
        """The dtype that models compute in."""
        return "float32"

    def __post_init__(self) -> None:
        # From here on `out` is a local path: of an address, its spool.
        object.__setattr__(self, "out", mirror.local(self.out))
        checks.at_least_one(**{"--snapshot-every": self.snapshot_every})
        checks.at_least_one(**{"--keep-snapshots": self.keep_snapshots})
        checks.within(
            least=0,
            advice="choose a snapshot of OUT/snapshots/STAGE, or 0 for its start",
            **{"--resume-from": self.resume_from},
        )
        checks.within(
            least=0, most=2**32 - 1, advice="choose another", **{"--seed": self.seed}
        )
        if self.profile is not None:
            Window.parse(self.profile)
        for extra, package in self.loggers.items():
            entry_points.require_package(
                package,
                extra=extra,
                needed_by=f"--{extra}",
                instead=f", or leave --{extra} out",
            )

    @property
    def loggers(self) -> dict[str, str]:
        """{option: package} of the loggers that also receive the rows."""
        return {name: one for name, one in LOGGERS.items() if vars(self)[name]}


NAMES = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
NAMES |= {bool: "true or false", type(None): "None"}  # in messages

# Options that do not change the numbers: those of RunConfig, and those of experiments.
MAY_DIFFER = {f.name for f in dataclasses.fields(RunConfig)} - {"seed"}
MAY_DIFFER |= {"stop_timeout", "check_memory", "auto", "placement.policy"}
MAY_DIFFER |= {"start.save_dtype", "watch.judge_failure", "rewards.num_workers"}
MAY_DIFFER |= {f"sampler.sampler.{name}" for name in ("model", "weights", "timeout")}
MAY_DIFFER |= {"sampler.sampler.tolerance", "sampler.sampler.address"}
MAY_DIFFER |= {
    f"placement.{role}.{field}"
    for role in ("reference", "reward")
    for field in ("devices", "mesh")
}


def to_json(config: RunConfig) -> dict[str, Any]:
    """Returns the fields as JSON values: paths are strings, tuples lists.

    A record is an object; one of a union has its kind: {"kind": "adaptive", ...}.

    Raises:
      InputError: a number is NaN or infinite, which JSON cannot hold.
    """
    fields = _plain(config)
    try:
        return json.loads(json.dumps(fields, default=mirror.written, allow_nan=False))
    except ValueError as error:
        wrong = ", ".join(
            f"{name} = {value}"
            for name, value in resume.flat(fields).items()
            if not _is_finite(value)
        )
        raise InputError(
            f"config fields: expected finite numbers (None is off), got {wrong:.200}; "
            "choose others"
        ) from error


def _plain(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(type(record))
    return {
        field.name: _plain_value(getattr(record, field.name), hints[field.name])
        for field in dataclasses.fields(record)
    }


def _plain_value(value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(value):
        of_kind = {}
        if len(choices.kinds_of(kind)) > 1:
            of_kind = {"kind": choices.name_of(type(value))}
        return of_kind | _plain(value)
    if isinstance(value, tuple):
        inner = next(iter(typing.get_args(kind)), Any)
        return [_plain_value(one, inner) for one in value]
    return value


def _is_finite(value: Any) -> bool:
    """Whether JSON can hold the numbers of a value, which may be a list."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(math.isfinite(n) for n in numbers if type(n) is float)


def arguments(
    config_class: type[Any],
    fields: Mapping[str, Any],
    *,
    source: Path,
    renamed: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns the command line that sets the fields of a --config FILE.

    Args:
      fields: any part of the config's tree, as JSON or TOML values.
      source: the file, for messages.
      renamed: {former option: present option}, for messages about unknown fields.

    Raises:
      InputError: fields are unknown or mistyped; the message names them all.
    """
    values, wrong = _decode_fields(fields, config_class, prefix="", made=False)
    if wrong:
        lines = sorted(_with_successor(line, renamed or {}) for line in wrong)
        raise InputError(
            f"{source} does not fit the options of this command:\n"
            + "\n".join(lines)
            + "\ncorrect the file, or give the options without it"
        )
    return _arguments(config_class, values, prefix="--")


def _arguments(kind: Any, values: Mapping[str, Any], *, prefix: str) -> list[str]:
    words: list[str] = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        hint = hints[name]
        option = (prefix + name).replace("_", "-")
        spec = choices.spec_of(hint)
        if spec is not None:
            words += [option, *spec.str_from_instance(value)]
        elif isinstance(value, dict):  # some fields of a group
            inner = prefix if choices.is_unnamed(hint) else f"{option}."
            words += _arguments(_group(choices.bare(hint)), value, prefix=inner)
        elif isinstance(value, bool):
            start, _, last = option.rpartition(".")
            off = f"{start}.no-{last}" if start else f"--no-{option[2:]}"
            words += [option if value else off]
        elif isinstance(value, tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words


def _with_successor(line: str, renamed: Mapping[str, str]) -> str:
    """Adds the present option to the line about a field that was renamed."""
    path, _, fault = line.strip().partition(": ")
    parts = path.replace("_", "-").split(".")
    for start in range(len(parts) if fault == "unknown" else 0):  # groups have no name
        successor = renamed.get("--" + ".".join(parts[start:]))
        if successor is not None:
            return f"{line}; it is {successor} now"
    return line


def _decode_fields(
    fields: Mapping[str, Any], kind: Any, *, prefix: str, made: bool
) -> tuple[dict[str, Any], list[str]]:
    """Decodes the fields of a dataclass and its groups: {name: value}, and the faults.

    Args:
      made: whether groups become records; otherwise they stay dicts of their fields.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    wrong = [f"  {prefix}{name}: unknown" for name in fields.keys() - kinds.keys()]
    for name in (name for name in kinds if name in fields):
        bare, value = choices.bare(kinds[name]), fields[name]
        group = _group(bare)
        if dataclasses.is_dataclass(group) and isinstance(value, Mapping):
            record = made or choices.spec_of(kinds[name]) is not None
            inner, amiss = _decode_fields(
                value, group, prefix=f"{prefix}{name}.", made=record
            )
            wrong += amiss
            if amiss:
                continue
            try:
                values[name] = _made(group, inner) if record else inner
            except TypeError as error:
                wrong.append(f"  {prefix}{name}: {error}")
            continue
        try:
            values[name] = _decode(value, bare)
        except TypeError as error:
            wrong.append(f"  {prefix}{name}: {error}")
    return values, wrong


def _made(kind: Any, values: dict[str, Any]) -> Any:
    if missing := choices.missing(kind, values):
        raise TypeError(
            f"expected {', '.join(missing)} with {choices.name_of(kind)}, got none"
        )
    try:
        return kind(**values)
    except InputError as error:  # a value is out of its range
        raise TypeError(str(error)) from error


def _group(kind: Any) -> Any:
    """The dataclass D of an annotation D or D | None; any other annotation itself."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return parts[0] if len(parts) == 1 and dataclasses.is_dataclass(parts[0]) else kind


def _decode(value: Any, kind: Any) -> Any:
    """A JSON value as the Python type `kind`; TypeError if it is not one."""
    kind = choices.bare(kind)
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind)
    kinds = choices.kinds_of(kind) if choices.is_union(kind) else {}
    if len(kinds) > 1 and isinstance(value, Mapping):
        named = kinds.get(str(value.get("kind")))
        if named is None:
            raise TypeError(
                f"expected a kind of {', '.join(kinds)}, got {value.get('kind')!r}"
            )
        rest = {name: one for name, one in value.items() if name != "kind"}
        return _record(rest, named)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            return _record(value, kind)
        parse = getattr(kind, "parse", None)
        if isinstance(value, str) and parse is not None:
            try:
                return parse(value)
            except InputError as error:
                raise TypeError(str(error)) from None
    elif choices.is_union(kind):
        if kinds and isinstance(value, str | int | float):  # as on a command line
            written = value if isinstance(value, str) else json.dumps(value)
            try:
                return choices.parse(written, kind)
            except InputError as error:
                if not any(hasattr(one, "parse") for one in kinds.values()):
                    raise TypeError(str(error)) from None
        for alternative in inner:
            with contextlib.suppress(TypeError):
                return _decode(value, alternative)
    elif origin is typing.Literal:
        if value in inner:
            return value
    elif origin is tuple and isinstance(value, list):
        if inner[-1] is ...:
            inner = inner[:1] * len(value)
        if len(inner) == len(value):
            return tuple(map(_decode, value, inner))
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):  # an integer beyond float64
            return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(f"expected {_named(kind)}, got {json.dumps(value):.80}")


def _named(kind: Any) -> str:
    """An annotation in words, for messages: "a number or None"."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if (spec := choices.spec(kind)) is not None:
        return f"a text {spec.metavar}"
    if choices.is_union(kind):
        return " or ".join(map(_named, inner))
    if dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"an object with {names}"
    return NAMES.get(kind, kind.__name__ if isinstance(kind, type) else str(kind))


def _record(fields: Mapping[str, Any], kind: Any) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in fields if name not in names]:
        expected = ", ".join(names) or "no option"
        raise TypeError(
            f"expected {expected} with {choices.name_of(kind)}, got "
            f"{', '.join(unknown)}"
        )
    values, wrong = _decode_fields(fields, kind, prefix="", made=True)
    if wrong:
        raise TypeError("; ".join(fault.strip() for fault in wrong))
    return _made(kind, values)
