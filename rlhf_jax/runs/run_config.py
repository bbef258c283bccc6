"""The options that every run has, and configs as JSON and as command lines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
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
        checks.at_least_one(
            snapshot_every=self.snapshot_every, keep_snapshots=self.keep_snapshots
        )
        checks.within(
            least=0,
            advice="choose a snapshot of OUT/snapshots/STAGE, or 0 for its start",
            resume_from=self.resume_from,
        )
        checks.within(least=0, most=2**32 - 1, advice="choose another", seed=self.seed)
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
    words, faults = _words(config_class, fields, prefix="--")
    if faults:
        paths = list(_paths(config_class))
        lines = sorted(_advised(line, paths, renamed or {}) for line in faults)
        raise InputError(
            f"{source} does not fit the options of this command:\n"
            + "\n".join(lines)
            + "\ncorrect the file, or give the options without it"
        )
    return words


def _words(
    kind: Any, fields: Mapping[str, Any], *, prefix: str, within: str = ""
) -> tuple[list[str], list[str]]:
    """The command line that sets fields of a config or of a group, and the faults.

    Args:
      prefix, within: the beginnings of options and of names in messages, such as
        "--" and "method.".
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    words: list[str] = []
    faults = [f"  {within}{name}: unknown" for name in fields.keys() - {*names}]
    for name in (name for name in names if name in fields):
        hint, value, option = hints[name], fields[name], f"{prefix}{name}"
        group, spec = choices.bare(hint), choices.spec_of(hint)
        option = option.replace("_", "-")
        if (
            spec is None
            and dataclasses.is_dataclass(group)
            and isinstance(value, Mapping)
        ):
            inner = prefix if choices.is_unnamed(hint) else f"{option}."
            more = _words(group, value, prefix=inner, within=f"{within}{name}.")
            words, faults = words + more[0], faults + more[1]
            continue
        try:
            value = _decode(value, group)
        except TypeError as error:
            faults.append(f"  {within}{name}: {error}")
            continue
        if spec is not None:
            words += [option, *spec.str_from_instance(value)]
        else:
            words += words_of(f"{prefix}{name}", value)
    return words, faults


def words_of(option: str, value: Any) -> list[str]:
    """Returns --OPTION on a command line; True is --OPTION, False is --no-OPTION."""
    option = option.replace("_", "-")
    if isinstance(value, bool):
        group, dot, last = option.removeprefix("--").rpartition(".")
        return [option if value else f"--{group}{dot}no-{last}"]
    if isinstance(value, list | tuple):
        return [option, *map(word, value)]
    return [f"{option}={word(value)}"]


def word(value: Any) -> str:
    """Returns a value as text of a command line; 1.0 is 1."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def _paths(kind: Any, *, within: str = "") -> Iterator[str]:
    """Yields the names of all options in a file, as "start.model"."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (field.name for field in dataclasses.fields(kind)):
        group = choices.bare(hints[name])
        if dataclasses.is_dataclass(group) and choices.spec_of(hints[name]) is None:
            yield from _paths(group, within=f"{within}{name}.")
        else:
            yield f"{within}{name}"


def _advised(line: str, paths: Sequence[str], renamed: Mapping[str, str]) -> str:
    """Adds to the line about an unknown field its group, or the option that it is now.

    A file with the options of a command line names no groups.
    """
    path, _, fault = line.strip().partition(": ")
    inner = [one for one in paths if one.endswith(f".{path.replace('-', '_')}")]
    if fault == "unknown" and inner:
        return f"{line}; it is {' or '.join(inner)}"
    parts = path.replace("_", "-").split(".")
    for start in range(len(parts) if fault == "unknown" else 0):  # groups have no name
        successor = renamed.get("--" + ".".join(parts[start:]))
        if successor is not None:
            return f"{line}; it is {successor} now"
    return line


def _decode(value: Any, kind: Any) -> Any:
    """A JSON value as the Python type `kind`; TypeError if it is not one."""
    kind = choices.bare(kind)
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind)
    kinds = choices.kinds_of(kind)
    if kinds and isinstance(value, Mapping):
        return _record(value, kinds)
    if choices.is_union(kind):
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
    elif hasattr(kind, "parse") and isinstance(value, str):
        try:
            return kind.parse(value)
        except InputError as error:
            raise TypeError(str(error)) from None
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
    raise TypeError(f"expected {choices.described(kind)}, got {json.dumps(value):.80}")


def _record(fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    """The dataclass of a JSON object; of several, "kind" names it."""
    values = dict(fields)
    name = next(iter(kinds)) if len(kinds) == 1 else str(values.pop("kind", None))
    if name not in kinds:
        got = repr(fields.get("kind"))
        raise TypeError(f"expected a kind of {', '.join(kinds)}, got {got}")
    kind, hints = kinds[name], typing.get_type_hints(kinds[name])
    names = [field.name for field in dataclasses.fields(kind)]
    faults = []
    if unknown := [key for key in values if key not in names]:
        expected = ", ".join(names) or "no option"
        faults.append(f"expected {expected} with {name}, got {', '.join(unknown)}")
    for key in (key for key in names if key in values):
        try:
            values[key] = _decode(values[key], hints[key])
        except TypeError as error:
            faults.append(f"{key}: {error}")
    if missing := choices.missing(kind, values):
        faults.append(f"expected {', '.join(missing)} with {name}, got none")
    if faults:
        raise TypeError("; ".join(faults))
    try:
        return kind(**values)
    except InputError as error:  # a value is out of its range
        raise TypeError(str(error)) from error
