"""What every run asks for: the options of a run folder, and configs as JSON."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import math
import os
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlhf_jax.devices import placement
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.profile import window


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every experiment asks for; an experiment adds its own fields.

    Of these only `seed` changes the result, so a resume may differ in the others.
    """

    out: Path
    """Folder of the run, absent or empty unless --resume is given."""
    seed: int = 0
    """Root of every random number."""
    resume: bool = False
    """Whether the run in --out goes on from its newest snapshot."""
    resume_from: int | None = None
    """Older snapshot to resume from, of the stage whose newest one is damaged."""
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
    """Whether TensorBoard events are written to OUT/tensorboard too."""
    wandb: bool = False
    """Whether metrics go to Weights & Biases too."""
    trackio: bool = False
    """Whether metrics go to Trackio too, on this machine."""
    profile: str | None = None
    """Steps FIRST:END of which a JAX profiler trace is written to OUT/profile, and by
    rlhf-jax and the quickstart a table; 5:8 are the steps 5, 6 and 7."""

    def __post_init__(self) -> None:
        counts = {
            "--snapshot-every": self.snapshot_every,
            "--keep-snapshots": self.keep_snapshots,
        }
        for option, count in counts.items():
            if count < 1:
                raise InputError(f"{option}: expected at least 1, got {count}")
        if self.resume_from is not None and self.resume_from < 0:
            raise InputError(
                f"--resume-from: expected the number of a snapshot, or 0 for the start "
                f"of its stage, got {self.resume_from}; see OUT/snapshots/STAGE"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(
                f"--seed: expected 0 to 4294967295, got {self.seed}; choose another"
            )
        if self.profile is not None:
            window.parse(self.profile)
        extras = {
            "tensorboard": (self.tensorboard, "tensorboardX"),
            "wandb": (self.wandb, "wandb"),
            "trackio": (self.trackio, "trackio"),
        }
        for extra, (wanted, package) in extras.items():
            if wanted and importlib.util.find_spec(package) is None:
                raise InputError(
                    f"--{extra} needs the package {package}, which is not installed; "
                    f"pip install 'rlhf-jax[{extra}]', or leave --{extra} out"
                )


# Of RunConfig, and as experiments call what does not change the numbers either.
MAY_DIFFER = {f.name for f in dataclasses.fields(RunConfig)} - {"seed"}
MAY_DIFFER |= {"judge_failure", "stop_timeout", "check_memory", "placement.policy"}
MAY_DIFFER |= {"sampler_model", "sampler_weights", "sampler_timeout"}
MAY_DIFFER |= {"sampler_check_tolerance", "save_dtype"}
MAY_DIFFER |= {
    f"placement.{role}.{field}"
    for role in ("reference", "reward")
    for field in ("devices", "mesh")
}
# Fields of option groups that were called something else in version 0.1.
RENAMED = {"slots": "continuous_batching", "reprice": "recompute_logprobs"}
# Options that older records do not have, with what those runs did; of a group
# "placement.sampler".
ADDED: dict[str, Any] = {
    "trackio": False,
    "profile": None,
    "save_dtype": "float32",
    "held_out_by": "row",
    "assistant_turns": "last",
    "verifier": "gsm8k",
    "packing": "off",
    "packing_width": None,
    "max_tokens_per_device": None,
    "sampler_cache": "same",
    "sampler_cache_pages": None,
    "sampler_page_size": 64,
    "prefill_chunk": None,
    "sampler_storage": {"dtype": "float32", "embeddings": None},
    "max_redraws": 0,
    "environment": None,
    "max_turns": 8,
    "max_turn_tokens": None,
    "observation_chunk": 32,
    "episodes_timeout": None,
    "chat": False,
    "num_workers": None,
    "timeout": 10.0,
    "on_failure": "zero",
    "sampler": "here",
    "sampler_model": None,
    "sampler_weights": None,
    "sampler_timeout": 600.0,
    "sampler_check_tolerance": None,
    "max_staleness": None,
    "staleness": 0,
    "correction": "truncate",
    "staleness_weight_cap": 2.0,
    "references": [],
    "reference_storage": {"dtype": "float32", "embeddings": None},
    "reward_combine": "mean",
    "reward_std_coef": None,
    "sample_reference": False,
    "num_alternatives": 0,
    "dpo.target_margin": 0.0,
    "dpo.desirable_weight": 1.0,
    "dpo.undesirable_weight": 1.0,
    **{
        f"{name}.{option}": value
        for name in ("ppo", "grpo", "reinforce")
        for option, value in {
            "sampler_weight_cap": None,
            "sampler_correction": "token_truncate",
            "sampler_weight_floor": None,
            "ratio_level": "token",
            "surrogate": "clip",
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "scores.overlong_penalty": 0.0,
            "scores.overlong_after": 0,
            "scores.overlong_buffer": 0,
        }.items()
    },
    "grpo.overlong_mask": None,
    "grpo.equal_groups": "keep",
    "placement.sampler": dataclasses.asdict(placement.WITH_POLICY),
    "placement.reference": dataclasses.asdict(placement.WITH_POLICY),
    "placement.policy.context": 1,
    **{
        f"placement.{role}.mesh.context": 1
        for role in ("sampler", "critic", "reference", "reward")
    },
}
Config = TypeVar("Config", bound=RunConfig)


def complete(recorded: Mapping[str, Any], *, names: Collection[str]) -> dict[str, Any]:
    """A recorded config as the options of today: renamed and added ones included.

    Args:
      recorded: Fields as JSON values.
      names: The options of today, those of `option_names`.
    """
    if "placement" in names:
        recorded = placement.from_0_1(recorded)
    recorded = {
        name: {RENAMED.get(field, field): one for field, one in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in copy.deepcopy(dict(recorded)).items()
    }
    for name in sorted(ADDED.keys() & set(names)):  # a group before its fields
        *groups, field = name.split(".")
        group: Any = recorded
        for part in groups:
            group = group.get(part) if isinstance(group, dict) else None
        if isinstance(group, dict):
            group.setdefault(field, ADDED[name])
    return recorded


def option_names(config_class: type[Any], *, prefix: str = "") -> set[str]:
    """Names of a config's fields; a field of a group is named "placement.sampler"."""
    hints = typing.get_type_hints(config_class)
    names: set[str] = set()
    for field in dataclasses.fields(config_class):
        name, group = f"{prefix}{field.name}", _group(hints[field.name])
        names.add(name)
        if dataclasses.is_dataclass(group):
            names |= option_names(typing.cast(Any, group), prefix=f"{name}.")
    return names


def to_json(config: RunConfig) -> dict[str, Any]:
    """Fields as JSON values: paths become strings and tuples lists.

    Raises:
      InputError: a number is NaN or infinite, which JSON cannot hold.
    """
    fields = dataclasses.asdict(config)
    try:
        return json.loads(json.dumps(fields, default=os.fspath, allow_nan=False))
    except ValueError as error:
        wrong = ", ".join(f"{name} = {value}" for name, value in _not_finite(fields))
        raise InputError(
            f"config fields: expected finite numbers (None is off), got {wrong:.200}; "
            "choose others"
        ) from error


def _not_finite(fields: dict[str, Any], *, prefix: str = "") -> list[tuple[str, Any]]:
    """(name, value) of the fields with a number that JSON cannot hold; groups too."""
    wrong: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            wrong += _not_finite(value, prefix=f"{prefix}{name}.")
        else:
            numbers = value if isinstance(value, list | tuple) else [value]
            if not all(map(math.isfinite, (n for n in numbers if type(n) is float))):
                wrong.append((prefix + name, value))
    return wrong


def from_json(
    config_class: type[Config], fields: dict[str, Any], *, source: Path
) -> Config:
    """The config whose `to_json` is `fields`: every field there and of its type.

    Raises:
      InputError: fields are unknown, missing or mistyped; names them all.
    """
    values, wrong = _decode_fields(fields, config_class, prefix="")
    if wrong:
        raise InputError(
            f"{source} does not fit the options of this experiment:\n"
            + "\n".join(sorted(wrong))
            + "\ncorrect the file, or give the options without it"
        )
    return config_class(**values)


def _decode_fields(
    fields: dict[str, Any], kind: Any, *, prefix: str
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a dataclass by name, and what is wrong with them; groups too."""
    hints = typing.get_type_hints(kind)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    wrong = [f"  {prefix}{name}: unknown" for name in fields.keys() - kinds.keys()]
    wrong += [f"  {prefix}{name}: missing" for name in kinds.keys() - fields.keys()]
    for name in kinds.keys() & fields.keys():
        field, value = kinds[name], fields[name]
        group = _group(field)
        if dataclasses.is_dataclass(group) and isinstance(value, dict):
            inner, amiss = _decode_fields(value, group, prefix=f"{prefix}{name}.")
            wrong += amiss
            if not amiss:
                values[name] = typing.cast(Any, group)(**inner)
            continue
        try:
            values[name] = _decode(value, field)
        except TypeError as error:
            wrong.append(f"  {prefix}{name}: {error}")
    return values, wrong


def _group(kind: Any) -> Any:
    """The dataclass of a field that holds one, or None of one; else the kind itself."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return parts[0] if len(parts) == 1 and dataclasses.is_dataclass(parts[0]) else kind


def _decode(value: Any, kind: Any) -> Any:
    """A JSON value as the Python type `kind`; TypeError if it is not one."""
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
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
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    raise TypeError(f"expected {name}, got {json.dumps(value):.80}")
