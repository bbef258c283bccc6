"""benchmarks.pretrained: its commands, their measurements and refused input."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import commands, pretrained
from benchmarks.environments import PeerError

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.methods import grpo, ppo

TASK = pretrained.Task(model="m", prompts="p.jsonl", learning_rate=2e-6)
PEER, _ = pretrained.PEERS["grpo"]

# A command that trains nothing: NUM_STEPS OUT, then words that change what it does.
FAKE = """\
import json, pathlib, sys
num_steps, out, *words = sys.argv[1:]
out = pathlib.Path(out)
out.mkdir()
moved = 0.0 if "still" in words else 1e-6
length = 7.0 if "long" in words else 4.0
for step in range(int(num_steps)):
    if "dies" in words and step == 1:
        sys.exit("out of luck")
    row = {"prompt/length": 46.0, "response/length": length}
    row |= {"objective/scores": 0.5, "drift/relative": moved}
    for name, row in (("timings", {"seconds": float(step)}), ("metrics", row)):
        with (out / f"{name}.jsonl").open("a") as file:
            print(json.dumps({"step": step, **row}), file=file)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "POLL", 0.02)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def made(*words):
        return lambda *, num_steps, out: [
            *(sys.executable, str(script), str(num_steps), str(out)),
            *words,
        ]

    return made


def run(command, out, *, num_steps=4, limit=60.0):
    return commands.run(
        command(num_steps=num_steps, out=out),
        out=out,
        num_steps=num_steps,
        limit=limit,
        variables=dict(os.environ),
    )


# --- the task ---------------------------------------------------------------------


def test_sums_are_of_two_digits_and_their_answers_right():
    rows = pretrained.sums()
    assert len(rows) == 400
    message = {"role": "user", "content": "What is 12 + 26? Answer with the number "}
    message["content"] += "alone."
    assert {"prompt": [message], "answer": 38} in rows
    assert len({len(row["prompt"][0]["content"]) for row in rows}) == 1


@pytest.mark.parametrize(("method", "of"), [("grpo", grpo), ("ppo", ppo)])
def test_our_command_sets_every_number_of_the_task(method, of):
    [own, *_] = pretrained.OURS[method].values()
    words = pretrained.ours(method, TASK, *own, cache=Path("cache"))(
        num_steps=3, out=Path("out")
    )
    options = words[words.index(method) + 1 :]
    cache = options.index("--compilation-cache")  # is no option of the config
    assert options[cache + 1] == "cache"
    argv = [*options[:cache], *options[cache + 2 :]]
    config = command_line.parse(of.Config, description=None, argv=argv)
    assert config.start.model == TASK.model
    assert config.data.prompts == TASK.prompts
    assert config.batch.batch_size == TASK.batch_size
    assert config.batch.max_new_tokens == TASK.max_new_tokens
    assert config.method.temperature == TASK.temperature
    assert config.optimizer.learning_rate == TASK.learning_rate
    assert config.kl.kl_coef == TASK.kl_coef
    right, short = config.rewards.rewards
    assert (right.weight, short.weight) == (1.0, -TASK.length_penalty)
    assert config.num_steps == 3
    theirs = settings_of(pretrained.theirs(method, TASK, python=Path("python")))
    if method == "grpo":
        assert config.batch.packing is not None
        assert config.method.group_size == theirs["group_size"]
        return
    assert config.start.lora.rank == config.start.lora.alpha == theirs["lora"]
    assert config.method.shared_trunk
    assert (config.method.num_epochs, config.method.num_minibatches) == (1, 1)
    assert config.optimizer.max_grad_norm == 1.0
    assert config.method.lam == torch_number("LAM")
    assert config.method.vf_coef == torch_number("VF_COEF")
    clip = torch_number("CLIP")
    assert config.method.surrogate.clip_range == clip
    assert config.method.value_clip_range == clip


def torch_number(name):
    """A constant of the peer, which needs torch to be imported."""
    file = Path(pretrained.FOLDER) / pretrained.PEERS["ppo"][1]
    names, values = re.search(
        r"^(CLIP, VF_COEF, LAM) = (.*?) +#", file.read_text(encoding="utf-8"), re.M
    ).groups()
    return float(dict(zip(names.split(", "), values.split(", "), strict=True))[name])


def settings_of(command):
    return json.loads(command(num_steps=3, out=Path("out"))[-1])


@pytest.mark.parametrize(
    ("method", "own"), [("grpo", {"group_size": 8}), ("ppo", {"lora": 16})]
)
def test_the_peer_is_given_the_same_and_reads_nothing_else(method, own):
    command = pretrained.theirs(method, TASK, python=Path("python"))
    python, script, settings = command(num_steps=3, out=Path("out"))
    expected = dataclasses.asdict(TASK) | own | {"num_steps": 3, "out": "out"}
    assert (python, json.loads(settings)) == ("python", expected)
    text = Path(script).read_text(encoding="utf-8")
    assert all(f'settings["{name}"]' in text for name in expected)


# --- a command from its start to its end ------------------------------------------


def test_steps_start_and_work_are_those_of_the_rows(fake, tmp_path):
    measured = run(fake(), tmp_path / "run")
    assert measured["step"] == 2.5  # of 2 and 3; 0 and 1 do not count
    assert measured["start"] is None
    assert measured["work"] == {
        "prompt/length": 46.0,
        "response/length": 4.0,
        "objective/scores": 0.5,
        "drift/relative": 1e-6,
    }
    measured = run(fake(), tmp_path / "one", num_steps=1)
    assert 0 < measured["start"] < 60
    assert measured["step"] is None


def test_ours_has_its_prompts_in_the_receipt(tmp_path):
    rows = [{"response/length": 4.0, "objective/scores": 1.0, "drift/relative": 0.0}]

    def prompt_length(longest):
        lengths = {"prompt": {"median": 46.0, "longest": longest}}
        source = {"uses": {"training": {"lengths": lengths}}}
        (tmp_path / "data.json").write_text(json.dumps({"sources": [source]}))
        return commands.work_of(tmp_path, rows)["prompt/length"]

    assert prompt_length(46) == 46
    with pytest.raises(PeerError, match=r"of one length, got \[46\.0, 47\]"):
        prompt_length(47)


def test_memory_is_that_of_a_process_and_those_it_has_started():
    code = "import sys; held = bytearray(2**26); print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pids, alone = commands.resident(process.pid, before=set())
        again, together = commands.resident(process.pid, before=pids)
        process.communicate()
    assert pids == again
    assert len(pids) == 2
    assert together - alone > 2**26
    assert commands.resident(process.pid, before=pids) == ({process.pid}, 0)


def test_a_command_that_fails_is_told_with_its_last_words(fake, tmp_path):
    with pytest.raises(PeerError) as raised:
        run(fake("dies"), tmp_path / "run")
    assert "expected 4 steps, got 1 and status 1" in str(raised.value)
    assert str(raised.value).endswith("its output:\n    out of luck")


def test_one_that_does_not_end_is_stopped(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(PeerError, match=r"got 0 and no end within 0\.4 s"):
        run(lambda **_: command, tmp_path / "run", limit=0.4)


# --- rounds -----------------------------------------------------------------------


def measured_of(made, tmp_path, **options):
    config = pretrained.Config(model=Path("m"), num_steps=3, limit=60, **options)
    return pretrained.measure(made, options=config, scratch=tmp_path)


@pytest.mark.slow
def test_participants_take_turns_and_the_tables_have_ratios(
    fake, tmp_path, capsys, monkeypatch
):
    # Of what it measures here is nothing but noise, of a width that no one knows.
    monkeypatch.setenv("COLUMNS", "200")
    made = {"rlhf_jax": fake(), PEER: fake(), "other": fake("dies")}
    results = measured_of(made, tmp_path, rounds=2)
    told = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    turns = [line for line in told if line.split(":")[0] in made]
    assert turns == [
        f"{name}: {turn}"
        for turn in ("cold start", "round 1", "round 2")
        for name in ("rlhf_jax", "trl", "other")
        if (name, turn) not in (("other", "round 1"), ("other", "round 2"))
    ]
    assert [*results["participants"]] == ["rlhf_jax", "trl"]
    assert "out of luck" in results["failed"]["other"]
    assert {*tmp_path.iterdir()} == {tmp_path / "fake.py"}  # run folders are gone
    for each in results["participants"].values():
        assert each["cold"] > 0
        assert [line["step"] for line in each["rounds"]] == [2.0, 2.0]
        assert all(line["whole"] >= line["peak"] > 0 for line in each["rounds"])
    json.dumps(results, allow_nan=False)
    pretrained.show(results["participants"], method="grpo", task=TASK)
    printed = capsys.readouterr().out
    assert "Ours / trl" in printed
    assert "1.00 (1.00" in printed


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("long", "expected responses of about 4 tokens, got 7"),
        ("still", "expected parameters that moved"),
    ],
)
def test_one_that_does_other_work_is_left_out(fake, tmp_path, words, message):
    made = {"rlhf_jax": fake(), PEER: fake(words)}
    results = measured_of(made, tmp_path, rounds=1)
    assert [*results["participants"]] == ["rlhf_jax"]
    assert message in results["failed"]["trl"]


@pytest.mark.parametrize(("peak", "holds"), [(69.0, True), (71.0, False)])
def test_bounds_are_of_the_first_of_ours_beside_the_peer(peak, holds, capsys):
    work = {"prompt": 1.0, "response": 1.0, "score": 1.0, "drift": 1.0}
    ours = {"step": 0.3, "start": 9.0, "peak": peak, "whole": 1.0, "work": work}
    theirs = {"step": 1.0, "start": 10.0, "peak": 100.0, "whole": 1.0, "work": work}
    participants = {
        "rlhf_jax, packed": {"cold": 12.0, "rounds": [ours]},
        "rlhf_jax": {"cold": 900.0, "rounds": [theirs]},
        PEER: {"cold": 10.0, "rounds": [theirs]},
    }
    assert pretrained.show(participants, method="grpo", task=TASK) == holds
    printed = capsys.readouterr().out
    assert ("NO" in printed) == (not holds)
    del participants[PEER]
    assert pretrained.show(participants, method="grpo", task=TASK)


def test_options_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="num_steps - 2: expected"):
        pretrained.Config(model=tmp_path, num_steps=2)
    with pytest.raises(InputError, match=r"--model: expected a checkpoint folder"):
        pretrained.main(pretrained.Config(model=tmp_path))
