"""The options that a resumed run may change, and the check of all others.

A resumed run is compared with the config and the digests of data in the meta of its
snapshots, since config.json can be edited after a run has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing

Fields = Mapping[str, Any]

# Options that a resume may change. Training depends only on `num_steps` among them,
# about which `tell_changes` warns.
MAY_CHANGE = frozenset(
    (
        *("num_steps", "sample_every", "num_shown", "sample_reference"),
        *("num_alternatives", "drift_every", "eval_every", "alarms"),
    )
)
# A resume may choose another kind of sampler, with options of its own.
SAMPLER = "sampler.sampler."
# Files that a run writes at its end, models only where there are none.
MODELS = ("model", "model.sha256", "adapter", "adapter.sha256")
FINISHED = (*MODELS, "summary.json")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A config that a run was trained with, and where it is recorded."""

    where: str
    config: Fields  # as JSON values, groups as objects


def recorded_configs(folder: Path) -> list[Recorded]:
    """Returns the config of each stage's newest snapshot that can be read.

    They are read as plain files, because the processes of orbax would wait for each
    other. A damaged snapshot is skipped: an attempt to restore it reports the damage.
    """
    return [
        Recorded(f"snapshot {step} of {stage}", meta["config"])
        for stage, (step, meta) in newest_metas(folder).items()
    ]


def newest_metas(
    folder: Path, *, having: str = "config"
) -> dict[str, tuple[int, Fields]]:
    """Returns {stage: (step, meta)} of each stage's newest snapshot that can be read.

    A meta has the config, the versions, and digests of the data: `data_digest`,
    `rows_digest` and so on. Snapshots whose meta lacks the key `having`, as those of an
    older version may, are skipped.
    """
    found: dict[str, tuple[int, Fields]] = {}
    for stage in stages(folder):
        for step, meta in _metas(stage):
            if having in meta:
                found[stage.name] = step, meta
                break
    return found


def stages(run: Path) -> list[Path]:
    """Returns the folders of a run's snapshots, one per stage."""
    return sorted(path for path in (run / "snapshots").glob("*") if path.is_dir())


def steps(stage: Path) -> list[int]:
    """Returns the numbers of the snapshots in a stage's folder, in order."""
    names = [path.name for path in stage.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def newest(stage: Path) -> int:
    """Returns the number of a stage's newest snapshot by its folders; 0 if none."""
    return max(steps(stage), default=0)


def _metas(stage: Path) -> Iterator[tuple[int, Fields]]:
    """Yields (step, meta) of each readable snapshot of a stage, the newest first."""
    for step in reversed(steps(stage)):
        meta = stage / str(step) / "meta" / "metadata"
        with contextlib.suppress(InputError):
            match parsing.read_object(meta, expected="", advice="", foreign=True):
                case {"config": dict()} as fields:
                    yield step, fields


def differing(recorded: Fields, current: Fields, *, but: frozenset[str]) -> list[str]:
    """Returns the names of the fields that differ, without those in `but`.

    Configs are JSON values; a field of a group is named "lora.rank". `but` has names of
    fields and of whole groups.
    """
    before, now = flat(recorded), flat(current)
    return [
        name
        for name in sorted(before.keys() | now.keys())
        if not any(f"{name}.".startswith(f"{prefix}.") for prefix in but)
        and shown(before, name) != shown(now, name)
    ]


def check_config(
    recorded: Recorded, current: Fields, *, but: frozenset[str], folder: Path
) -> list[str]:
    """Checks that a resume changes only options that it may.

    Fields and groups in `but` say where and how the run computes, and are not compared.

    Returns:
      Names of the fields that differ; a resume may change all of them.

    Raises:
      InputError: other fields differ, which the message lists; or `num_steps` differs
        and the run is finished.
    """
    before, now = flat(recorded.config), flat(current)
    names = differing(recorded.config, current, but=but)
    refused = [
        name
        for name in names
        if MAY_CHANGE.isdisjoint(name.split("."))
        and not (f"{SAMPLER}kind" in names and name.startswith(SAMPLER))
    ]
    if refused:
        raise InputError(
            f"--resume: expected the config that {recorded.where} was made with, got "
            f"another in\n"
            + "\n".join(
                f"  {name}: recorded {shown(before, name)}, given {shown(now, name)}"
                for name in refused
            )
            + f"\nonly {', '.join([*_changeable(now), 'options'])} of where the run "
            f"computes and how it saves may change; give the recorded command and "
            f"values, or start a new run with another --out"
        )
    results = [name for name in FINISHED if (folder / name).exists()]
    if "num_steps" in names and results:
        raise InputError(
            f"--num-steps: expected {shown(before, 'num_steps')}, as the run in "
            f"{folder} is finished, got {shown(now, 'num_steps')}; move "
            f"{', '.join(results)} away to go on with it, or start a new run from its "
            f"model with another --out"
        )
    return names


def _changeable(fields: Fields) -> list[str]:
    """The options of a command that a resume may change, by their last names."""
    parts = {part for name in fields for part in name.split(".")}
    return sorted((MAY_CHANGE | {SAMPLER.partition(".")[0]}) & parts)


def old_models(folder: Path) -> Iterator[str]:
    """Describes the models of a finished run that is to go back to an older snapshot.

    They would stay, beside rows and figures of the steps that are computed again.
    """
    if models := [name for name in MODELS if (folder / name).exists()]:
        yield (
            f"--resume-from: expected a run without a model, as an existing one is not "
            f"written again, got {', '.join(models)} in {folder}; move them away"
        )


def tell_changes(recorded: Recorded, current: Fields, names: list[str]) -> None:
    """Prints the changes of a resume on stderr, and their effect on the numbers."""
    before, now = flat(recorded.config), flat(current)
    for name in names:
        change = f"{shown(before, name)} up to {recorded.where}, {shown(now, name)} now"
        print(f"note: {name} was {change}", file=sys.stderr)
    if "num_steps" in names:
        print(
            "note: learning rates and coefficients that change over num_steps follow "
            "the new one from here on, so this run is not the one that would have "
            "begun with it",
            file=sys.stderr,
        )


# Meta entries that snapshots lack if their version computed other numbers.
CHANGED = {
    "unused_ids": "it is of a version before 0.3, which gave ids without a token a"
    " probability and could sample them",
    "prompts_given": "it is of a version before 0.3, which gave a reward or verifier of"
    " yours the chat template's text in place of a row's messages",
}


def check_meta(saved: Fields, meta: Fields, *, where: str) -> None:
    """Checks that a stage reads the data that its snapshot was made with.

    Every entry of the resumed stage's meta, such as the digest of its data, must equal
    the saved one; `where` names the snapshot in messages.

    Raises:
      InputError: an entry differs.
    """
    for key, value in meta.items():
        if key not in saved and key not in CHANGED:  # from a version without it
            print(
                f"warning: {where} does not say which {key} it was made with, so it "
                f"cannot be compared; make sure that the files are the same",
                file=sys.stderr,
            )
        elif key not in saved or saved[key] != value:
            got = saved[key] if key in saved else f"none: {CHANGED[key]}"
            raise InputError(
                f"{where}: expected {key} {value}, as this run has it, got {got}; "
                f"resume with what the run began with, its version too, or start a new "
                f"run with another --out"
            )


def flat(fields: Fields) -> dict[str, Any]:
    """Returns {name: value}; a field of a group is named "lora.rank"."""
    by_name: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            by_name |= {f"{name}.{inner}": x for inner, x in flat(value).items()}
        else:
            by_name[name] = value
    return by_name


def shown(fields: Fields, name: str) -> str:
    """Returns a field as JSON, for a message."""
    return json.dumps(fields[name]) if name in fields else "(no such field)"
