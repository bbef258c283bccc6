"""--sampler process: runs as with our decoder here, to the bit; and what is refused."""

import json
import shutil

import pytest
import toy_files
import toy_server

import rlhf_jax.train.grpo
import rlhf_jax.train.nash_md
import rlhf_jax.train.online_dpo
import rlhf_jax.train.ppo
import rlhf_jax.train.reinforce
from rlhf_jax.runs import metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def files(tmp_path, monkeypatch):
    toy_files.checkpoint(tmp_path / "model")
    rows = [
        {"question": f"the {word}", "answer": "very good"}
        for word in ("cat", "dog", "cat sat", "dog ran")
    ]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "goodness.py").write_text(
        "def check(prompt, response, row):\n    return len(set(response.split())) / 9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def train(files, out, *options, command=rlhf_jax.train.grpo.command):
    command(
        [
            *(f"--model={files}/model", "--verifier=goodness:check"),
            *(f"--data={files}/rows.jsonl", f"--held-out={files}/rows.jsonl"),
            *("--max-new-tokens=6", "--batch-size=8", "--num-steps=4"),
            *("--learning-rate=1e-2", "--snapshot-every=1", "--keep-snapshots=4"),
            *("--num-workers=1", "--no-progress", f"--out={files / out}", *options),
        ]
    )
    return files / out


def bits(run):
    """What a run left, less what only a sampler outside has."""
    rows = metrics.read(run / "metrics.jsonl")
    for row in rows:
        row.pop("policy/sampler_check", None)
    return rows, (run / "model" / "model.safetensors").read_bytes()


GROUPS = "--group-size=4"


@pytest.mark.slow
def test_a_process_is_our_decoder_to_the_bit_and_resumes(files):
    here = train(files, "here", GROUPS)
    weights = f"--sampler-weights={files / 'weights'}"
    outside = ("--sampler=process", weights, GROUPS)
    run = train(files, "run", *outside)
    assert bits(run) == bits(here)
    checks = [
        row["policy/sampler_check"] for row in metrics.read(run / "metrics.jsonl")
    ]
    assert checks == [0, 0, 0, 0]
    timings = metrics.read(run / "timings.jsonl")
    assert all(row["waits"].keys() == {"hand_over", "draw"} for row in timings)
    assert all(row["waits"]["hand_over"] > 0 for row in timings[1:])
    assert not list((files / "weights").iterdir())
    before = (run / "metrics.jsonl").read_bytes(), bits(run)
    for step in (3, 4):
        shutil.rmtree(run / "snapshots" / "grpo" / str(step))
    shutil.rmtree(run / "model")
    train(files, "run", *outside, "--resume")
    assert ((run / "metrics.jsonl").read_bytes(), bits(run)) == before


@pytest.mark.slow
def test_a_process_is_asked_ahead(files):
    options = (GROUPS, "--max-staleness=2")
    here = train(files, "here", *options)
    run = train(files, "run", "--sampler=process", *options)
    assert bits(run) == bits(here)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["waits"].keys() == {"trainer", "sampler", "hand_over", "draw"}
    before = (run / "metrics.jsonl").read_bytes()
    for step in (3, 4):
        shutil.rmtree(run / "snapshots" / "grpo" / str(step))
    train(files, "run", "--sampler=process", *options, "--resume")
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_reinforce_and_redraws_take_a_process(files):
    command = rlhf_jax.train.reinforce.command
    runs = [
        train(files, out, *options, command=command)
        for out, options in {"a": (), "b": ("--sampler=process",)}.items()
    ]
    assert bits(runs[0]) == bits(runs[1])
    options = (GROUPS, "--max-redraws=2", "--sampler=process")
    (rows, _) = bits(train(files, "redrawn", *options))
    assert "group/redraws" in rows[0]


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_which_then_goes_on(files, capsys):
    toy = toy_server.Toy()
    options = (GROUPS, "--max-new-tokens=3")
    with toy_server.serving(toy) as url:

        def die(path, answer):
            gone = path.endswith("/completions") and len(toy.loads) == 3
            return None if gone else answer

        toy.change = die
        with pytest.raises(SystemExit) as stop:
            train(files, "run", f"--sampler={url}", *options)
        assert stop.value.code == 1
        assert (
            "/v1/completions: expected a server there, got" in capsys.readouterr().err
        )
        assert len(metrics.read(files / "run" / "metrics.jsonl")) == 2
        toy.change = lambda path, answer: answer
        run = train(files, "run", f"--sampler={url}", *options, "--resume")
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["policy/sampler_check"] < 1e-5 for row in rows)
    assert all(row["response/length"] == 3 for row in rows)
    # Of the rehearsal and every step; the one that resumes rehearses again.
    names = [name for name, _ in toy.loads]
    assert names == [f"version-{n}" for n in (0, 1, 2, 0, 2, 3)]


URL = "--sampler=http://localhost:9"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampler=elsewhere"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=http://[::1"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=http://h:x"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=http://"], "--sampler: expected here, process or http://HOST"),
        (["--sampler-model=m"], "--sampler-model: expected --sampler with process or"),
        (
            ["--sampler=process", "--sampler-check-tolerance=1"],
            "--sampler-check-tolerance: expected --sampler with a server",
        ),
        ([URL, "--sampler-timeout=0"], "sampler_timeout: expected"),
        (
            ["--sampler=process", "--sampler-cache=int8"],
            "--sampler-cache: expected",
        ),
        ([URL, "--environment=rooms"], "--environment: expected none with --sampler"),
        (
            [URL, "--placement.policy=fsdp=2", "--placement.sampler=data=2"],
            "--placement.sampler: expected none with --sampler http",
        ),
        (
            ["--sampler=process", "--placement.policy=data=8"],
            "--sampler process: expected a trainer of one process and one device",
        ),
        ([URL, "--fixed-length"], "--fixed-length: expected none with --sampler http"),
        (
            [URL, "--recompute-logprobs"],
            "--recompute-logprobs: expected --sampler-weight-cap with it",
        ),
    ],
)
def test_what_is_refused(files, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        train(files, "run", GROUPS, *options)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (files / "run").exists()


@pytest.mark.parametrize("option", ["--sampler=process", "--sampler-timeout"])
def test_ppo_says_who_takes_another_sampler(capsys, option):
    with pytest.raises(SystemExit) as stop:
        rlhf_jax.train.ppo.command([option, "9"])
    assert stop.value.code == 2
    name = option.partition("=")[0]
    assert (
        f"{name}: expected an option of this command, got one of rlhf-jax grpo and "
        f"rlhf-jax reinforce"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [rlhf_jax.train.nash_md.command, rlhf_jax.train.online_dpo.command]
)
def test_others_refuse_another_sampler(files, capsys, command):
    with pytest.raises(SystemExit):
        train(files, "run", "--sampler=process", command=command)
    assert "--sampler: expected here for" in capsys.readouterr().err
