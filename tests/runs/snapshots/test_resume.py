"""The options that a resumed run may change, and its messages on changed files."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from rlhf_jax.data import digests
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import Place, Placement
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, folder, metrics, run, run_config
from rlhf_jax.runs.snapshots import files, jsonl, resume


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 6
    kl_coef: float = 0.1
    sample_every: int = 1
    snapshot_every: int = 2
    progress: bool = False


def play(config, *, meta=None, stop=None):
    """Runs steps that add `kl_coef`; returns the sum and the steps made."""
    steps = []
    with (
        run.Run(config, num_steps={"only": config.num_steps}) as job,
        job.stage("only", {"sum": jnp.float32(0)}, meta=meta or {}) as stage,
    ):
        for step in stage.steps():
            if step == stop:
                break
            stage.state = {"sum": stage.state["sum"] + config.kl_coef}
            samples = [{"a": 1}] if step % config.sample_every == 0 else []
            stage.end_step(step, {"x": (jnp.float32(step), jnp.float32(1))}, samples)
            steps.append(step)
    return float(stage.state["sum"]), steps


def edit(path, **fields):
    """Changes fields of a config.json, as a user would."""
    content = json.loads(path.read_text())
    content["config"] |= fields
    path.write_text(json.dumps(content))


def recorded(config):
    return json.loads((config.out / "config.json").read_text())["config"]


@pytest.fixture
def begun(tmp_path):
    """The config of a run whose newest snapshot is 4 of 6."""
    config = Config(out=tmp_path / "run")
    play(config, stop=5)
    return dataclasses.replace(config, resume=True)


def test_a_config_that_nothing_could_read_again_is_refused(tmp_path):
    out = tmp_path / "\udcff"  # a byte that is not UTF-8
    with pytest.raises(InputError, match=r"can hold, got one with .*half a surrogate"):
        folder.open_run(Config(out=out))
    assert not out.exists()


def test_an_edited_config_json_is_refused(begun):
    edit(begun.out / "config.json", kl_coef=0.2)
    before = (begun.out / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError) as error:
        folder.check_run(dataclasses.replace(begun, kl_coef=0.2))
    message = str(error.value)
    assert "config that snapshot 4 of only was made with" in message
    assert "\n  kl_coef: recorded 0.1, given 0.2\n" in message
    assert "\nonly num_steps, sample_every, options of where" in message  # it has both
    with pytest.raises(InputError, match="kl_coef: recorded"):
        play(dataclasses.replace(begun, kl_coef=0.2))
    assert (begun.out / "metrics.jsonl").read_bytes() == before
    # With what it was made with it goes on, and config.json says so again.
    total, steps = play(begun)
    assert steps == [4, 5]
    assert total == pytest.approx(0.6)
    assert recorded(begun)["kl_coef"] == 0.1


def test_num_steps_and_reporting_may_change_and_are_told(begun, capsys):
    longer = dataclasses.replace(begun, num_steps=8, sample_every=3)
    _, steps = play(longer)
    assert steps == [4, 5, 6, 7]
    errors = capsys.readouterr().err
    assert "num_steps was 6 up to snapshot 4 of only, 8 now" in errors
    assert "sample_every was 1 up to snapshot 4 of only, 3 now" in errors
    assert "learning rates" in errors
    assert recorded(begun)["num_steps"] == 8
    assert recorded(begun)["sample_every"] == 3
    with pytest.raises(InputError, match="only: expected at least the 8 steps"):
        play(dataclasses.replace(longer, num_steps=7))
    assert recorded(begun)["num_steps"] == 8


def test_another_kind_of_sampler_may_go_on_and_the_same_kind_no_other_way():
    here = {"sampler": {"sampler": {"kind": "here", "dtype": "float32"}}}
    recorded = resume.Recorded("snapshot 4", here)
    check = functools.partial(
        resume.check_config, recorded, but=frozenset(), folder=Path("none")
    )
    process = {"sampler": {"sampler": {"kind": "process", "timeout": 9.0}}}
    changed = [f"sampler.sampler.{name}" for name in ("dtype", "kind", "timeout")]
    assert check(process) == changed
    with pytest.raises(InputError, match=r"sampler\.dtype: recorded \"float32\""):
        check({"sampler": {"sampler": {"kind": "here", "dtype": "int8"}}})
    with pytest.raises(
        InputError, match=r"placement\.sampler: recorded .no such field"
    ):
        check(here | {"placement": {"sampler": "last"}})


def test_a_finished_run_is_not_made_longer_around_its_model(begun):
    play(begun)
    (begun.out / "model").mkdir()
    before = (begun.out / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"is finished.*move model away"):
        play(dataclasses.replace(begun, num_steps=8))
    assert (begun.out / "config.json").read_bytes() == before


def test_the_config_is_read_from_the_snapshot_that_orbax_wrote(begun):
    (config,) = resume.recorded_configs(begun.out)
    stage = begun.out / "snapshots" / "only"
    assert config.where == "snapshot 4 of only"
    assert config.config == files.read_meta(stage, 4)["config"]


def test_an_edited_config_is_refused_beside_a_damaged_snapshot(begun):
    """Checked against the newest readable snapshot, here 2 of 2 and 4."""
    stage = begun.out / "snapshots" / "only"
    assert resume.steps(stage) == [2, 4]
    (stage / "4" / "meta" / "metadata").write_bytes(b"{")
    (stage / "²").mkdir()  # a digit to Python, and no number
    edited = dataclasses.replace(begun, resume_from=2, kl_coef=0.2)
    with pytest.raises(
        InputError, match="config that snapshot 2 of only was made with"
    ):
        folder.check_run(edited)


def test_a_row_that_a_reward_reads_may_not_change(tmp_path):
    rows = [{"prompt": "2 + 2", "answer": 4}, {"prompt": "1 + 1", "answer": 2}]
    # Of the JSON text, by hand.
    text = '[{"answer": 4, "prompt": "2 + 2"}, {"answer": 2, "prompt": "1 + 1"}]'
    assert digests.of_values(rows) == hashlib.sha256(text.encode()).hexdigest()
    other = [{"prompt": "2 + 2", "answer": 5}, rows[1]]
    config = Config(out=tmp_path / "run")
    play(config, meta={"rows_digest": digests.of_values(rows)}, stop=4)
    again = dataclasses.replace(config, resume=True)
    with pytest.raises(InputError, match=r"snapshot 4 of only: expected rows_digest"):
        play(again, meta={"rows_digest": digests.of_values(other)})
    play(again, meta={"rows_digest": digests.of_values(rows)})


def test_rows_with_values_that_json_does_not_hold():
    one, same, other = (
        digests.of_values([{"image": value}]) for value in (b"1", b"1", b"2")
    )
    assert one == same != other


def test_a_snapshot_that_does_not_say_is_told(capsys):
    resume.check_meta({"old": 1}, {"old": 1, "rows_digest": "a"}, where="snapshot 2")
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "snapshot 2 does not say which rows_digest" in warning


def without(path, *steps):
    """Removes rows from a JSONL file."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(x for x in lines if json.loads(x)["step"] not in steps))


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("metrics", (1,), "rows of only that snapshot 4 was saved with, got 3 (missi"),
        ("metrics", (0, 1, 3), "got 1 (missing are steps 0 to 1, 3)"),
        ("metrics", range(9), "got 0 (missing are steps 0 to 3)"),
        ("timings", (3,), "got 3 (missing are step 3)"),
        ("samples", (2,), "expected the 4 rows of only"),
    ],
)
def test_lost_rows_are_told_and_can_be_accepted(begun, capsys, name, steps, message):
    path = begun.out / f"{name}.jsonl"
    without(path, *steps)
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        play(begun)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "--accept-lost-rows" in str(error.value)
    assert path.read_bytes() == before
    play(dataclasses.replace(begun, accept_lost_rows=True), stop=5)
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {path}: expected the 4 rows of only")
    steps_left = sorted(set(range(4)) - set(steps))
    if name == "metrics":
        assert [row["step"] for row in metrics.read(path)] == [*steps_left, 4]


def test_lost_rows_are_refused_before_anything_is_loaded(begun, capsys):
    path = begun.out / "metrics.jsonl"
    whole = path.read_text()
    jsonl.require_rows(begun.out)
    path.write_text(whole.replace('"x": 2.0', '"x": 2.5'))
    called = []
    argv = ["--out", str(begun.out), "--resume", "--no-progress"]
    options = [*argv, "--snapshot-every", "2", "--compilation-cache", "None"]
    with pytest.raises(SystemExit) as stop:
        command_line.main(called.append, Config, description=None, argv=options)
    early = capsys.readouterr().err.strip().removeprefix("error: ")
    with pytest.raises(InputError) as late:
        play(begun)
    assert (stop.value.code, early, called) == (2, str(late.value), [])
    path.write_text(whole)
    command_line.main(called.append, Config, description=None, argv=options)
    assert len(called) == 1


def test_versions_are_recorded_only_where_steps_follow(tmp_path, monkeypatch):
    config = Config(out=tmp_path)
    play(config, meta={"data": "one"}, stop=5)
    begun = dataclasses.replace(config, resume=True)
    path = begun.out / "config.json"
    before = path.read_text()

    def versions():
        return json.loads(path.read_text())["versions"]["jax"]

    first = versions()
    monkeypatch.setattr(run, "versions", lambda: {"jax": "9"})
    with pytest.raises(InputError):
        play(begun, meta={"data": "another"})
    assert path.read_text() == before
    play(begun, meta={"data": "one"})
    assert versions() == f"{first} then 9"
    monkeypatch.setattr(run, "versions", lambda: {"jax": "10"})
    play(begun, meta={"data": "one"})  # is complete
    assert versions() == f"{first} then 9"


def test_rows_that_stand_twice_are_told(begun):
    path = begun.out / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 1', 1) * 2)
    with pytest.raises(InputError, match=r"got 8 \(missing are step 2\) \(more than"):
        play(begun)


def test_rows_after_the_snapshot_and_a_cut_line_are_no_loss(begun, capsys):
    path = begun.out / "metrics.jsonl"
    without(path, 4)
    path.write_bytes(path.read_bytes() + b'{"stage": "only", "st')
    _, steps = play(begun)
    assert steps == [4, 5]
    assert [row["step"] for row in metrics.read(path)] == list(range(6))
    assert capsys.readouterr().err == ""


def test_a_broken_line_in_the_middle_is_told_with_what_to_do(begun):
    path = begun.out / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[2:]]))
    with pytest.raises(InputError, match=r"jsonl:2: .*--accept-lost-rows"):
        play(begun)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed(run_config.RunConfig):
    placement: Placement = dataclasses.field(default_factory=Placement)


def placed(**places):
    return run_config.to_json(Placed(out=Path("run"), placement=Placement(**places)))


@pytest.mark.parametrize(
    ("before", "now", "names"),
    [
        ({}, {"policy": MeshShape(data=2)}, []),
        ({}, {"reference": Place.parse("last")}, []),
        ({}, {"reward": Place.parse("tensor=4")}, []),
        ({}, {"reference": Place.parse("cpu"), "policy": MeshShape(fsdp=8)}, []),
        (
            {},
            {"reference": Place.parse("pinned_host")},
            ["placement.reference.memory"],
        ),
        ({}, {"critic": Place.parse("last")}, ["placement.critic.devices"]),
        (
            {"sampler": Place.parse("last:data=2")},
            {"sampler": Place.parse("last:data=4")},
            ["placement.sampler.mesh.data"],
        ),
    ],
)
def test_a_resume_may_move_the_policy_and_frozen_models_only(before, now, names):
    """In a snapshot, sampled responses and the critic's state must stay in place."""
    recorded, current = placed(**before), placed(**now)
    but = frozenset(run_config.MAY_DIFFER)
    assert resume.differing(recorded, current, but=but) == names


def test_a_name_is_left_out_with_its_group_and_not_what_begins_like_it():
    recorded = {"mesh": {"data": 1}, "mesh_size": 1, "other": {"mesh": 1}}
    current = {"mesh": {"data": 2}, "mesh_size": 2, "other": {"mesh": 2}}
    names = resume.differing(recorded, current, but=frozenset({"mesh"}))
    assert names == ["mesh_size", "other.mesh"]


def test_a_snapshot_of_other_numbers_is_refused_with_the_reason():
    """Of a model with unused ids, and of scored messages."""
    new = {"data_digest": "a", "unused_ids": [[5, 8]]}
    with pytest.raises(InputError, match=r"got none: it is of a version before 0\.3"):
        resume.check_meta({"data_digest": "a"}, new, where="snapshot 2")
    resume.check_meta(new, new, where="snapshot 2")
    resume.check_meta({"data_digest": "a"}, {"data_digest": "a"}, where="snapshot 2")
    chat = {"data_digest": "a", "prompts_given": "messages"}
    with pytest.raises(InputError, match=r"got none: .* of a row's messages"):
        resume.check_meta({"data_digest": "a"}, chat, where="snapshot 2")
