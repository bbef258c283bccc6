"""--environment: runs of episodes, killed, resumed, sampled ahead; refused input."""

import json
import shutil

import numpy as np
import pytest
import toy_episodes
import toy_files

import rlhf_jax.train.methods.grpo
import rlhf_jax.train.methods.reinforce
from rlhf_jax.environments import places
from rlhf_jax.environments.programs import EpisodePrograms
from rlhf_jax.runs import metrics
from rlhf_jax.train import trainer
from rlhf_jax.train.rollouts.environment import make_environment

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORDS = ["go", "left", "right", "key", "door", "hall"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    toy_files.checkpoint(tmp_path / "model", words=WORDS)
    rows = [{"start": word} for word in ("left", "right", "go", "hall")]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    return tmp_path


def environment(name, *more):
    """The option --environment with the limits of all runs here."""
    limits = ("max_turn_tokens=4", "max_turns=3", "observation_chunk=3")
    words = (f"halls:{name}", *limits, *more)
    return f"--environment={','.join(words)}"


def train(files, out, *options, command=rlhf_jax.train.methods.grpo.command):
    command(
        [
            *(environment("Hall"), f"--model={files}/model"),
            *(f"--prompts={files}/rows.jsonl", f"--held-out={files}/rows.jsonl"),
            "--max-new-tokens=14",
            *("--batch-size=8", "--num-steps=4", "--learning-rate=1e-3"),
            *("--snapshot-every=1", "--num-workers=2", f"--out={files / out}"),
            *options,
        ]
    )
    return files / out


def rows_of(run):
    return metrics.read(run / "metrics.jsonl")


GROUPS = ("--group-size=4",)


@pytest.mark.slow
def test_a_run_of_episodes_and_its_resume(files):
    run = train(files, "run", *GROUPS, "--keep-snapshots=4")
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["policy/sampler_mismatch"] < 1e-5
        assert 1 <= row["response/turns"] <= 3
        assert row["reward/turns"] == row["response/turns"]
        assert row["reward/failed"] == 0
    assert max(row["response/turns"] for row in rows) > 1
    assert max(row["response/observed"] for row in rows) > 0
    assert abs(rows[0]["objective/kl"]) < 1e-5
    summary = json.loads((run / "summary.json").read_text())
    assert np.isfinite(summary["held_out_score_after"])
    before = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "snapshots" / "grpo" / "4")
    train(files, "run", *GROUPS, "--keep-snapshots=4", "--resume")
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "kept"), [((), True), (("seconds=60",), False)])
def test_episodes_with_a_limit_of_time_are_drawn_again(
    files, monkeypatch, limits, kept
):
    """The rehearsal's episodes lost time to compilation, so they are drawn again."""
    begun, inner = [], trainer.run_stage

    def run_stage(loop, models, **options):
        begun.append(0 in loop.begun)
        return inner(loop, models, **options)

    monkeypatch.setattr(trainer, "run_stage", run_stage)
    name = f"run_{kept}"
    run = train(files, name, *GROUPS, environment("Hall", *limits), "--num-steps=1")
    assert begun == [kept]
    assert rows_of(run)[0]["response/turns"] >= 1


@pytest.mark.slow
def test_an_async_environment_in_few_places_is_the_same_run(files, monkeypatch):
    monkeypatch.setattr(places, "PATIENCE", 0.1)
    few = "--continuous-batching=2"
    run = train(files, "run", *GROUPS, few)
    parked, inner = [], places.Places._park
    monkeypatch.setattr(
        places.Places, "_park", lambda *a, **b: parked.append(b) or inner(*a, **b)
    )
    slow = train(files, "slow", *GROUPS, few, environment("Slow"))
    assert (slow / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert parked


@pytest.mark.slow
def test_a_tool_that_fails_is_left_out_by_default(files, capsys):
    """One of four rows fails; the message is one line per batch, not per response."""
    run = train(files, "run", *GROUPS, environment("Flaky"), "--num-steps=2")
    rows = rows_of(run)
    assert len(rows) == 2
    for row in rows:
        assert row["reward/failed"] == row["reward/left_out"]
    failed = [8 * row["reward/failed"] for row in rows]
    assert sorted({0, 4} | {*failed}) == [0, 4]  # whole groups, of one prompt
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "raised ConnectionError: no tool for" in line
    ]
    counts = [line.removeprefix("warning: ").partition(" epi")[0] for line in lines]
    # Of two steps, as far as they have that prompt; and held out.
    assert counts.count("4 of 8") >= failed.count(4)
    assert {*counts} == {"4 of 8", "1 of 4"}, lines
    assert len(lines) <= 5


EIGHT = (
    ("--placement.policy=data=4,fsdp=2",),
    ("--placement.policy=fsdp=8", "--placement.sampler=data=4,tensor=2"),
)
LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behind", "meshes"),
    [
        pytest.param(0, EIGHT[0], marks=LONG),
        pytest.param(1, EIGHT[0], marks=LONG),
        (0, EIGHT[1]),
        pytest.param(1, EIGHT[1], marks=LONG),
    ],
)
def test_a_run_on_eight_devices_is_that_of_one(files, behind, meshes, monkeypatch):
    options = (*GROUPS, f"--max-staleness={behind}", "--keep-snapshots=4")
    expected, replicas = train(files, "one", *options), set()

    def made(*args, **kwargs):
        programs = EpisodePrograms(*args, **kwargs)
        replicas.add(programs.shares)
        return programs

    monkeypatch.setattr(f"{make_environment.__module__}.EpisodePrograms", made)
    output = train(files, "eight", *options, *meshes)
    assert replicas == {8 if meshes == EIGHT[0] else 4}
    toy_episodes.assert_same_run(output, expected)
    summaries = [
        json.loads((run / "summary.json").read_text()) for run in (output, expected)
    ]
    assert summaries[0]["held_out_score_after"] == summaries[1]["held_out_score_after"]
    before = (output / "metrics.jsonl").read_bytes()
    shutil.rmtree(output / "snapshots" / "grpo" / "4")
    train(files, "eight", *options, *meshes, "--resume")
    assert (output / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_queue_of_episodes_repeats_to_the_bit(files):
    options = (*GROUPS, "--max-staleness=2", "--keep-snapshots=4")
    run, again = train(files, "run", *options), train(files, "again", *options)
    assert (run / "metrics.jsonl").read_bytes() == (
        again / "metrics.jsonl"
    ).read_bytes()
    assert [row["policy/staleness"] for row in rows_of(run)] == [0, 1, 2, 2]
    before = (run / "metrics.jsonl").read_bytes()
    for step in (3, 4):
        shutil.rmtree(run / "snapshots" / "grpo" / str(step))
    train(files, "run", *options, "--resume")
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_reinforce_has_rewards_of_turns(files):
    run = train(files, "run", command=rlhf_jax.train.methods.reinforce.command)
    assert all(np.isfinite(row["policy/grad_norm"]) for row in rows_of(run))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--sampler=here,cache=int8"],
            "--environment cannot be combined with options of --sampler here, "
            "because episodes",
        ),
        (
            ["--environment=maze"],
            "--environment: expected one of 'calculator', 'guessing',",
        ),
        (
            ["--environment=halls:Dark"],
            "expected a class or a function without arguments that makes an object",
        ),
        (["--environment=calculator"], "rows.jsonl:1: expected a row that the environ"),
    ],
)
def test_what_is_refused(files, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        train(files, "run", *GROUPS, *options)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (files / "run").exists()


def letters(prompts, responses, rows):
    return [float(len(response)) for response in responses]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rewards",
    [
        "--reward=test_environment_option:letters",
        "--rewards env=environment,weight=0 "
        "other=function:test_environment_option:letters",
    ],
)
def test_a_failed_episode_is_left_out_whatever_reward_counts(files, rewards):
    options = (environment("Flaky"), *rewards.split(), "--num-steps=2")
    run = train(files, "run", *GROUPS, *options)
    left_out = [row["reward/left_out"] for row in rows_of(run)]
    assert sorted(left_out) == [0, 0.5]  # the group of a row that is never answered
    failed = "reward/env/failed" if "env=" in rewards else "reward/failed"
    assert left_out == [row[failed] for row in rows_of(run)]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [(), ("--max-staleness=1",)])
def test_the_reference_plays_episodes_beside_the_policy(files, ahead):
    options = ("--sample-reference", "--num-steps=2", "--sample-every=1")
    run = train(files, "run", *GROUPS, *options, *ahead)
    samples = metrics.read(run / "samples.jsonl")
    assert any("⟦" in sample["reference"] for sample in samples)
    for sample in samples:
        if sample["step"] == 0:  # with the same keys
            assert sample["reference"] == sample["response"]


@pytest.mark.slow
def test_an_environment_that_answers_nothing_stops_the_run(files, capsys):
    with pytest.raises(SystemExit):
        train(files, "run", *GROUPS, environment("Broken"))
    errors = " ".join(capsys.readouterr().err.split())
    assert (
        "reward environment=environment: expected a number for some response" in errors
    )
    assert "raised KeyError" in errors
    assert not (files / "run").exists()


@pytest.mark.slow
def test_the_clock_ends_episodes_and_not_those_that_are_measured(files):
    options = (environment("Talk", "seconds=1e-9"), "--num-steps=1")
    run = train(files, "run", *GROUPS, *options)
    (row,) = rows_of(run)
    assert row["reward/late"] == 1
    assert row["objective/scores"] is row["group/std"] is None
    samples = metrics.read(run / "samples.jsonl")
    assert [sample["version"] for sample in samples] == [None] * 4
    summary = json.loads((run / "summary.json").read_text())
    assert summary["held_out_score_before"] > 0


def test_environments_by_name():
    assert type(make_environment("calculator")).__name__ == "Calculator"
    assert type(make_environment("rooms")).__name__ == "Rooms"
