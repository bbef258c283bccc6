"""Files of a run resumed after losing rows, or from an older snapshot."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, run, run_config
from rlhf_jax.runs.proof import run_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 6
    snapshot_every: int = 2
    progress: bool = False


def play(config, *, stop=None, version=1):
    steps = {"only": config.num_steps}
    data = {"sources": [], "prompts_shared_with_training": {}, "version": version}
    with (
        run.Run(config, num_steps=steps, data=data) as job,
        job.stage("only", {"sum": jnp.float32(0)}, meta={}) as stage,
    ):
        for step in stage.steps():
            if step == stop:
                break
            stage.end_step(step, {"x": (jnp.float32(step), jnp.float32(1))})


@pytest.fixture
def begun(tmp_path):
    """The config of a run whose newest snapshot is at step 4 of 6."""
    config = Config(out=tmp_path / "run")
    play(config, stop=5)
    return dataclasses.replace(config, resume=True, accept_lost_rows=True)


def lose(path, step):
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if json.loads(row)["step"] != step))


def test_rows_that_a_run_went_on_without_are_no_damage(begun):
    lose(begun.out / "metrics.jsonl", 1)
    assert run_files.check(begun.out).faults
    play(begun)  # snapshot 4 has the rows as they were, and 6 as they are
    assert run_files.check(begun.out).faults == []
    folder.write_summary(begun.out, {})
    assert run_files.check(begun.out)[1:] == ([], [], [], [])


def test_rows_that_were_lost_at_the_end_are_not_proven(begun):
    play(begun)
    lose(begun.out / "metrics.jsonl", 1)
    play(begun)
    folder.write_summary(begun.out, {})
    checked = run_files.check(begun.out)
    (doubt,) = checked.unproven
    assert doubt.startswith("metrics.jsonl, rows up to snapshot 6 of only: ")
    assert checked.faults == []
    lose(begun.out / "metrics.jsonl", 2)
    assert len(run_files.check(begun.out).faults) == 2  # by summary and snapshot


def test_what_is_set_aside_may_be_deleted(begun):
    older = dataclasses.replace(begun, resume=False, resume_from=2)
    play(older)
    folder.write_summary(begun.out, {})
    (aside,) = begun.out.glob("snapshots/*/*.set-aside")
    shutil.rmtree(aside)
    assert run_files.check(begun.out).faults == []


def test_what_a_killed_write_left_is_not_missed(begun):
    play(begun)
    (begun.out / "summary.json.tmp").write_text("{")
    folder.write_summary(begun.out, {})
    assert not (begun.out / "summary.json.tmp").exists()
    assert run_files.check(begun.out).faults == []


def test_a_damaged_data_json_is_refused_and_one_that_is_removed_is_written(begun):
    file = begun.out / "data.json"
    file.write_text("{}")
    with pytest.raises(InputError, match="put it back, or remove it to have it"):
        play(begun)
    file.unlink()
    play(begun, version=2)  # of a library that says more of the data
    folder.write_summary(begun.out, {})
    assert run_files.check(begun.out).faults == []
