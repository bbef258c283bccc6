"""--sampler process: runs equal those of the local decoder to the bit; refusals."""

import itertools
import json
import shutil

import pytest
import toy_episodes
import toy_files
import toy_server

import rlhf_jax.train.methods.grpo
import rlhf_jax.train.methods.nash_md
import rlhf_jax.train.methods.online_dpo
import rlhf_jax.train.methods.ppo
import rlhf_jax.train.methods.reinforce
from rlhf_jax.runs import metrics
from rlhf_jax.samplers import protocol

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


def train(files, out, *options, command=rlhf_jax.train.methods.grpo.command):
    command(
        [
            *(f"--model={files}/model", "--verifier=goodness:check"),
            *(f"--prompts={files}/rows.jsonl", f"--held-out={files}/rows.jsonl"),
            *("--max-new-tokens=6", "--batch-size=8", "--num-steps=4"),
            *("--prompt-field=question", "--kl-coef=0.01"),
            *("--learning-rate=1e-2", "--snapshot-every=1", "--keep-snapshots=4"),
            *("--num-workers=1", "--no-progress", f"--out={files / out}", *options),
        ]
    )
    return files / out


def bits(run):
    """A run's metrics and weights, without metrics that only outside samplers have."""
    rows = metrics.read(run / "metrics.jsonl")
    for row in rows:
        row.pop("policy/sampler_check", None)
    return rows, (run / "model" / "model.safetensors").read_bytes()


GROUPS = "--group-size=4"


@pytest.mark.slow
def test_a_process_is_our_decoder_to_the_bit_and_resumes(files):
    here = train(files, "here", GROUPS)
    (files / "weights").mkdir()
    outside = (f"--sampler=process,weights={files / 'weights'}", GROUPS)
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
    command = rlhf_jax.train.methods.reinforce.command
    runs = [
        train(files, out, *options, command=command)
        for out, options in {"a": (), "b": ("--sampler=process",)}.items()
    ]
    assert bits(runs[0]) == bits(runs[1])
    options = (GROUPS, "--max-redraws=2", "--sampler=process")
    (rows, _) = bits(train(files, "redrawn", *options))
    assert "group/redraws" in rows[0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-staleness=1",)], ids=["", "ahead"])
def test_a_trainer_on_a_mesh_asks_a_process(files, more):
    """Responses equal those on one device; only the trainer's numbers round apart."""
    one = train(files, "one", GROUPS, "--sampler=process", *more)
    mesh = ("--sampler=process", "--placement.policy=data=4,fsdp=2")
    toy_episodes.assert_same_run(train(files, "mesh", GROUPS, *mesh, *more), one)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-staleness=1",)], ids=["", "ahead"])
def test_a_trainer_on_a_mesh_asks_a_server(files, more):
    toy, options = toy_server.Toy(), (GROUPS, "--max-new-tokens=3", *more)
    with toy_server.serving(toy) as url:
        one = train(files, "one", f"--sampler={url}", *options)
        mesh = (f"--sampler={url}", "--placement.policy=data=4,fsdp=2")
        toy_episodes.assert_same_run(train(files, "mesh", *mesh, *options), one)


@pytest.mark.slow
def test_failures_that_pass_leave_no_trace_but_a_count(files, capsys, monkeypatch):
    monkeypatch.setattr(protocol, "SECONDS", 0.01)
    toy, options = toy_server.Toy(), (GROUPS, "--max-new-tokens=3")
    with toy_server.serving(toy) as url:
        run = train(files, "run", f"--sampler={url}", *options)
        count = itertools.count()

        def fail(path, answer):
            """One request in 25 has no answer, or that of an overloaded server."""
            number = next(count) if path.endswith("/completions") else 1
            return {0: None, 13: (503, {})}.get(number % 25, answer)

        toy.change = fail
        other = train(files, "other", f"--sampler={url},tries=9", *options)
    assert bits(other) == bits(run)
    retried = json.loads((other / "summary.json").read_text())["sampler_retries"]
    lines = capsys.readouterr().err.count("sampler: try ")
    assert retried == lines >= 3


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_which_then_goes_on(
    files, capsys, monkeypatch
):
    monkeypatch.setattr(protocol, "SECONDS", 0.01)
    toy = toy_server.Toy()
    options = (GROUPS, "--max-new-tokens=3")
    with toy_server.serving(toy) as url:

        def die(path, answer):
            gone = path.endswith("/completions") and len(toy.loads) >= 3
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
    # Of every step and of each try; who resumes rehearses with the start again.
    names = [name for name, _ in toy.loads]
    assert names == [f"version-{n}" for n in (0, 1, 2, 2, 2, 2, 2, 0, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(), ("--max-staleness=1",), ("--fixed-length=2", "--num-shown=8")],
    ids=["", "ahead", "fixed"],
)
def test_the_reference_responds_beside_a_process(files, more):
    """It is not handed over, as the next responses would then be the reference's.

    Its responses end where those of our decoder would.
    """
    options = (GROUPS, "--sample-reference", "--sample-every=1", *more)
    here = train(files, "here", *options)
    run = train(files, "run", "--sampler=process", *options)
    assert bits(run) == bits(here)
    responses = [
        [row["reference"] for row in metrics.read(run_folder / "samples.jsonl")]
        for run_folder in (run, here)
    ]
    assert responses[0] == responses[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-staleness=1",)], ids=["", "ahead"])
def test_adapters_are_handed_over_merged(files, more):
    """Outside samplers have no adapters; they draw what the local decoder draws."""
    options = (GROUPS, "--lora=2", "--max-new-tokens=3", "--sample-every=1", *more)
    here = train(files, "here", *options)
    run = train(files, "run", "--sampler=process", *options)
    responses = [
        [row["response"] for row in metrics.read(run_folder / "samples.jsonl")]
        for run_folder in (run, here)
    ]
    assert responses[0] == responses[1]
    with toy_server.serving(toy_server.Toy()) as url:
        served = train(files, "served", f"--sampler={url}", *options)
    for run_folder in (run, served):
        first, *_ = metrics.read(run_folder / "metrics.jsonl")
        assert first["policy/sampler_mismatch"] < 1e-5


URL = "--sampler=http://localhost:9"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampler=elsewhere"], "expected one of here, process, server, got"),
        (["--sampler=http://[::1"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=http://h:x"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=http://"], "--sampler: expected here, process or http://HOST"),
        (["--sampler=htp://h:1"], "--sampler: expected here, process or http://HOST"),
        (
            ["--sampler=process,model=m"],
            "expected weights, timeout, tries, each with = and a",
        ),
        (["--sampler=process,cache=int8"], "got 'cache=int8'; give each once"),
        ([f"{URL},timeout=0"], "timeout: expected"),
        (["--sampler=process,tries=0"], "tries: expected"),
        (
            [URL, "--environment=rooms"],
            "--sampler cannot be combined with --environment, because only the decoder",
        ),
        (
            [URL, "--placement.policy=fsdp=2", "--placement.sampler=data=2"],
            "--sampler cannot be combined with --placement.sampler, because only the "
            "decoder",
        ),
        (
            [URL, "--fixed-length=0"],
            "--sampler http://... cannot be combined with --fixed-length, because a "
            "server",
        ),
        (
            [URL, "--sampler-correction=recompute"],
            "with --sampler-correction recompute, because recompute",
        ),
    ],
)
def test_what_is_refused(files, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        train(files, "run", GROUPS, *options)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (files / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (rlhf_jax.train.methods.ppo.command, ("--num-minibatches=1",)),
        (rlhf_jax.train.methods.online_dpo.command, ("--group-size=2",)),
    ],
)
def test_every_method_but_the_mixture_takes_a_process(files, command, options):
    runs = [
        train(files, out, *options, *more, "--num-steps=2", command=command)
        for out, more in {"a": (), "b": ("--sampler=process",)}.items()
    ]
    assert bits(runs[0]) == bits(runs[1])


@pytest.mark.slow
def test_the_mixture_of_nash_md_is_drawn_beside_the_policy(files, capsys):
    command = rlhf_jax.train.methods.nash_md.command
    with pytest.raises(SystemExit):
        train(files, "run", "--sampler=process", command=command)
    errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert (
        "nash-md cannot be combined with --sampler, because its mixture or greedy"
        in errors
    )
