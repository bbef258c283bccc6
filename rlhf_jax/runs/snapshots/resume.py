"""What a resumed run may differ in from the one that it goes on with.

A snapshot's meta holds the config that it was trained with, and digests of the data.
They are what counts: a config.json can be edited after a run has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError

Fields = Mapping[str, Any]

# May change on resume, as nothing that is trained depends on them, but for `num_steps`:
# of that `tell_changes` warns.
MAY_CHANGE = frozenset(
    ("num_steps", "sample_every", "num_shown", "drift_every", "eval_every", "alarms")
)
FINISHED = ("model", "adapter", "summary.json")  # what a run writes at its end


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A config that a run was trained with, and where it stands."""

    where: str
    config: Fields  # as JSON values, groups as objects


def recorded_configs(folder: Path) -> list[Recorded]:
    """The config of each stage's newest snapshot that can be read.

    Read as plain files, without orbax, whose processes would wait for each other. A
    damaged snapshot is passed over here: restoring it tells so.
    """
    stages = sorted((folder / "snapshots").glob("*"))
    newest = (_newest_config(stage) for stage in stages)
    return [recorded for recorded in newest if recorded is not None]


def newest(stage: Path) -> int:
    """The number of a stage's newest snapshot by its folders; 0 without any."""
    return max(_steps(stage), default=0)


def _steps(stage: Path) -> list[int]:
    return [int(path.name) for path in stage.glob("*") if path.name.isdecimal()]


def _newest_config(stage: Path) -> Recorded | None:
    for step in sorted(_steps(stage), reverse=True):
        meta = stage / str(step) / "meta" / "metadata"
        with contextlib.suppress(OSError, ValueError):
            match json.loads(meta.read_bytes()):
                case {"config": dict() as config}:
                    return Recorded(f"snapshot {step} of {stage.name}", config)
    return None


def differing(recorded: Fields, given: Fields, *, but: frozenset[str]) -> list[str]:
    """Names of the fields that differ, groups as "lora.rank".

    Args:
      but: fields and groups that are not looked at, at any depth.
    """
    before, now = flat(recorded), flat(given)
    return [
        name
        for name in sorted(before.keys() | now.keys())
        if but.isdisjoint(name.split(".")) and shown(before, name) != shown(now, name)
    ]


def check_config(
    recorded: Recorded, given: Fields, *, but: frozenset[str], folder: Path
) -> list[str]:
    """Names of the fields that a resume changes, all of them such as it may.

    Args:
      given: the config of the resumed run, as JSON values.
      but: as `differing`: fields of where and how it runs.
      folder: of the run.

    Raises:
      InputError: another field differs; lists them all. Or `num_steps` does, of a run
        that is finished.
    """
    before, now = flat(recorded.config), flat(given)
    names = differing(recorded.config, given, but=but)
    refused = [name for name in names if MAY_CHANGE.isdisjoint(name.split("."))]
    if refused:
        raise InputError(
            f"--resume: expected the config that {recorded.where} was made with, got "
            f"another in\n"
            + "\n".join(
                f"  {name}: recorded {shown(before, name)}, given {shown(now, name)}"
                for name in refused
            )
            + f"\nonly {', '.join(sorted(MAY_CHANGE))}, where it computes and how it "
            f"saves may change; give the recorded values, or start a new run with "
            f"another --out"
        )
    there = [name for name in FINISHED if (folder / name).exists()]
    if "num_steps" in names and there:
        raise InputError(
            f"--num-steps: expected {shown(before, 'num_steps')}, as the run in "
            f"{folder} is finished, got {shown(now, 'num_steps')}; move "
            f"{', '.join(there)} away to go on with it, or start a new run from its "
            f"model with another --out"
        )
    return names


def tell_changes(recorded: Recorded, given: Fields, names: list[str]) -> None:
    """Says on stderr what a resume changes, and what that does to the numbers."""
    before, now = flat(recorded.config), flat(given)
    for name in names:
        told = f"{shown(before, name)} up to {recorded.where}, {shown(now, name)} now"
        print(f"note: {name} was {told}", file=sys.stderr)
    if "num_steps" in names:
        print(
            "note: learning rates and coefficients that change over num_steps follow "
            "the new one from here on, so this run is not the one that would have "
            "begun with it",
            file=sys.stderr,
        )


def check_meta(saved: Fields, meta: Fields, *, where: str) -> None:
    """Checks that what a stage reads is what its snapshot was made with.

    Raises:
      InputError: an entry differs, as the digest of the data.
    """
    for key, value in meta.items():
        if key not in saved:  # of a version before this entry
            print(
                f"warning: {where} does not say which {key} it was made with, so it "
                f"cannot be compared; see to it that the files are the same",
                file=sys.stderr,
            )
        elif saved[key] != value:
            raise InputError(
                f"{where}: expected {key} {value}, as this run has it, got "
                f"{saved[key]}; resume with what the run began with, or start a new "
                f"run with another --out"
            )


def flat(fields: Fields) -> dict[str, Any]:
    """Groups of fields taken apart, as the command line names them: "lora.rank"."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": x for inner, x in flat(value).items()}
        else:
            found[name] = value
    return found


def shown(fields: Fields, name: str) -> str:
    """A field as JSON, for a message."""
    return json.dumps(fields[name]) if name in fields else "(no such field)"
