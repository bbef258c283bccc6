"""Run folders, recorded configs and rewards that trainers refuse."""

import json

import bad_inputs
import pytest
import reread
import test_bad_options
from bad_inputs import TRAINERS
from tiers import one_in

from rlhf_jax.runs import command_line, folder, run_config
from rlhf_jax.train.methods import ppo

files = test_bad_options.files


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("trainer", one_in(2, TRAINERS))
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("a\0b", "--out .*: expected a folder, .* got: a name with NUL"),
        ("x" * 300, "--out .*: expected a folder, .* got: File name too"),
        ("text.txt", "text.txt': expected a folder, absent or .* got: a file"),
        ("text.txt/run", "--out .*(Not a directory|is a file)"),
        ("model", "--out .* already holds config.json"),
    ],
    ids=["NUL", "long", "a file", "in a file", "in use"],
)
def test_an_out_that_is_refused(files, capsys, trainer, out, message):
    bad_inputs.refused(
        capsys, trainer, [], files=files, out=files / out, message=message
    )


def begun(trainer, files, out, **changes):
    """A valid recorded config with changed fields; the value ... removes one."""
    experiment = TRAINERS[trainer]
    words = ["--out", str(out), "--no-progress", *bad_inputs.in_order(trainer, files)]
    config = command_line.parse(experiment.Config, description="", argv=words)
    out.mkdir()
    fields = run_config.to_json(config)
    for name, value in changes.items():
        group = next(
            (of for of in fields.values() if isinstance(of, dict) and name in of),
            fields,
        )
        if value is ...:
            del group[name]
        else:
            group[name] = value
    recorded = {"config": fields, "versions": folder.versions()}
    (out / "config.json").write_text(json.dumps(recorded))


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    one_in(
        3,
        [
            (
                {"seed": "x"},
                "config.json does not fit .* seed: expected a whole number, got .x",
            ),
            (
                {"seed": 1.5},
                "config.json does not fit .* seed: expected a whole number, got 1.5",
            ),
            (
                {"seed": True},
                "config.json does not fit .* seed: expected a whole number, got true",
            ),
            ({"seed": -1}, "--seed: expected a number of at least 0 .* got -1"),
            (
                {"batch_size": ...},
                r"batch.batch_size: recorded \(no such field\), given 4",
            ),
            ({"colour": 1}, "config.json does not fit .* colour: unknown"),
            ({"placement": 3}, "config.json does not fit .*\\bplacement: expected"),
            (
                {"placement": {"policy": {"data": 0}}},
                "mesh data: expected at least 1 device, got 0",
            ),
            ({"model": ["a"]}, "config.json does not fit .*\\bmodel: expected"),
            ({"dtype": "float64"}, "config.json does not fit .*\\bdtype: expected"),
        ],
    ),
    ids=lambda of: "" if isinstance(of, str) else str(of).replace("Ellipsis", "gone"),
)
def test_a_recorded_config_that_is_refused(
    files, tmp_path, capsys, trainer, changes, message
):
    begun(trainer, files, tmp_path / "run", **changes)
    bad_inputs.refused(
        capsys,
        trainer,
        ["--config", str(tmp_path / "run" / "config.json"), "--resume"],
        files=files,
        out=tmp_path / "run",
        message=message,
    )


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_resume_with_another_seed(files, tmp_path, capsys, trainer):
    begun(trainer, files, tmp_path / "run", seed=5)
    bad_inputs.refused(
        capsys,
        trainer,
        ["--resume"],
        files=files,
        out=tmp_path / "run",
        message="seed: .*5",
    )


def test_recorded_is_what_a_run_records(files, tmp_path):
    begun("ppo", files, tmp_path / "run")
    read = folder.read_config(tmp_path / "run" / "config.json")
    path = tmp_path / "run" / "config.json"
    config = reread.config(ppo.Config, read, source=path)
    assert config.out == tmp_path / "run"
