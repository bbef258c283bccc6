"""benchmarks: the floor by hand, the line protocol, and our participant at toy size."""

import dataclasses
import io
import json
import math
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from benchmarks import (
    environments,
    floor,
    iteration,
    lengths,
    participants,
    tables,
    workloads,
)
from benchmarks.floor import Rates, Step
from benchmarks.peers import line_protocol
from benchmarks.peers.line_protocol import Workload

from rlhf_jax.functional import checks

# L = 2, D = 8, V = 10, B = 3, P = 4, R = 2, and two epochs of one minibatch.
TOY = Workload(
    name="toy",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    vocab_size=10,
    max_positions=6,
    num_prompts=3,
    prompt_length=4,
    response_length=2,
    num_epochs=2,
    num_minibatches=1,
)
WEIGHTS = 4 * (12 * 2 * 64 + 80)  # bytes


# --- the floor --------------------------------------------------------------------


def test_forward_flops_by_hand():
    """24 L D² = 3072 per token; 4 L D = 64 per token and visible position."""
    assert floor.forward(TOY, tokens=1) == 3 * (3072 + 64)
    # Tokens of 1, 2, 3 and 4 positions, the head (2 D V = 160) at one of them.
    prompt = floor.forward(TOY, tokens=4, head_columns=1)
    assert prompt == 3 * (4 * 3072 + 64 * 10 + 160)
    after = floor.forward(TOY, tokens=1, context=4, head_columns=1)
    assert after == 3 * (3072 + 64 * 5 + 160)
    # The same tokens in one pass or in two.
    assert floor.forward(TOY, tokens=5, head_columns=2) == prompt + after


def test_steps_by_hand():
    steps = floor.steps(TOY)
    # The first response token comes from the prompt's logits, so one step decodes. It
    # reads keys and values of 4 positions: 2 · 4 bytes · L · D · B a position.
    assert steps["rollout"] == [
        Step(3 * (4 * 3072 + 640 + 160), WEIGHTS),
        Step(3 * (3072 + 320 + 160), WEIGHTS + 4 * 2 * 4 * 2 * 8 * 3),
    ]
    policy, critic = 3 * (5 * 3072 + 64 * 15 + 2 * 160), 3 * (5 * 3072 + 64 * 15)
    assert steps["score"] == [Step(policy, WEIGHTS), Step(critic, WEIGHTS)]
    # A layer: 12 D² + 13 D; tables 16 rows; last norm 2 D; the critic's score D + 1.
    num_parameters = 2 * (12 * 64 + 13 * 8) + 16 * 8 + 16
    assert floor.parameters(TOY) == num_parameters
    assert steps["update"] == [
        Step(3 * (policy + critic), 0, 2),
        Step(0, 28 * (2 * num_parameters + 9), 2),
    ]


def test_gpt2_small_has_its_known_size():
    assert floor.parameters(workloads.GPT2_SMALL) == 124_439_808


def test_a_step_takes_the_longer_of_products_and_copies():
    rates = Rates(flops=10.0, bytes=2.0)
    steps = [Step(100, 8), Step(10, 8, 3)]  # 10 s of products; thrice 4 s of copies
    assert floor.seconds(steps, rates=rates) == 22
    assert floor.total(steps) == Step(130, 32)
    floors = floor.floors(TOY, rates=rates)
    assert floors["iteration"] == sum(floors[p] for p in floor.PHASES)


# --- tables -----------------------------------------------------------------------


def test_ratios_are_of_the_same_round():
    """The participants slow down together: ratios 1/2, 1/2, 2, whatever the medians."""
    ours = [{"update": s} for s in (1.0, 10.0, 2.0)]
    theirs = [{"update": s} for s in (2.0, 20.0, 1.0)]
    assert tables.paired_ratio(ours, theirs, "update") == 0.5
    assert tables.median(ours, "update") == 2.0
    assert tables.spread(ours, "update") == "2 (1 - 10)"


# --- the protocol -----------------------------------------------------------------

FAKE = """\
import json, sys
workload = json.loads(sys.argv[-1])
tokens = workload["num_prompts"] * workload["response_length"]
checks = {"response_tokens": tokens, "mean_score": 0.2, "loss": 0.0, "moved": 1.0}
start = {"versions": {}, "start_up": 1.0, "warm_up": [3.0, 1.0], "parameters": 7}
memory = {"before_bytes": 2**20, "peak_bytes": 2**21}
last = {"last_peak_bytes": 2**22}
print("a library says hello")
print(json.dumps(start | memory | {"checks": checks}), flush=True)
for number, line in enumerate(sys.stdin):
    if line == "end\\n":
        break
    if "--dies" in sys.argv and number == 1:
        sys.exit("out of luck")
    times = dict.fromkeys(("rollout", "score", "update", "iteration"), 2.0)
    print(json.dumps(times | {"checks": checks}), flush=True)
print(json.dumps(last), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """A command that starts a participant which computes nothing."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return [sys.executable, str(script)]


def participant(command, *, limit=60.0):
    return participants.Participant("fake", command, workload=TOY, limit=limit)


def one_iteration(peer):
    return peer.ready(), peer.go()


def changed(command, old, new):
    assert old in FAKE
    with open(command[1], "w") as file:
        file.write(FAKE.replace(old, new))
    return command


def test_a_participant_starts_goes_and_ends(fake):
    with participant(fake) as peer:
        assert peer.ready()["parameters"] == 7
        assert peer.go()["update"] == 2.0
        assert peer.go()["update"] == 2.0
        assert peer.end()["last_peak_bytes"] == 2**22
    assert peer.idle_seconds > 0


def test_one_that_dies_is_told_with_its_last_words(fake):
    command = changed(fake, '"--dies" in sys.argv and ', "")
    with participant(command) as peer:
        peer.ready()
        peer.go()
        with pytest.raises(environments.PeerError) as raised:
            peer.go()
    message = str(raised.value)
    assert "fake: expected it to say the times of an iteration" in message
    assert "its end with status 1" in message
    assert "    out of luck" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"mean_score": 0.2', '"mean_score": 0.9', "a mean score within 0.1 of 0.200"),
        ('"loss": 0.0', '"loss": float("nan")', "a finite loss, got nan"),
        ('"moved": 1.0', '"moved": 0.0', "parameters that moved, got 0.0"),
        ('tokens, "mean', '1, "mean', "6 response tokens, got 1"),
        ('("rollout", "score", ', '("rollout", ', "without score"),
        ("print(json.dumps(start", "print(str({}), str(start", "as a JSON object"),
    ],
)
def test_one_that_does_not_do_the_work_is_told(fake, old, new, message):
    with (
        participant(changed(fake, old, new)) as peer,
        pytest.raises(environments.PeerError, match=message),
    ):
        one_iteration(peer)


def test_one_that_does_not_answer_is_told(fake):
    command = changed(fake, 'print("a library', 'sys.stdin.read(); print("a library')
    with (
        participant(command, limit=0.3) as peer,
        pytest.raises(environments.PeerError, match=r"its first line within 0\.3 s"),
    ):
        peer.ready()


def test_the_others_go_on_without_one_that_dies(fake, capsys):
    commands = {"rlhf_jax": fake, "torch": [*fake, "--dies"], "trl": fake}
    options = iteration.Config(rounds=3)
    measured = iteration.measure(TOY, commands=commands, options=options)
    assert list(measured["participants"]) == ["rlhf_jax", "trl"]
    assert "out of luck" in measured["failed"]["torch"]
    trl = measured["participants"]["trl"]
    assert len(trl["rounds"]) == 3
    assert trl["cold"]["warm_up"] == [3.0, 1.0]
    assert trl["cold"]["peak_bytes"] == trl["start"]["peak_bytes"] == 2**21
    assert trl["cold"]["last_peak_bytes"] == trl["end"]["last_peak_bytes"] == 2**22
    json.dumps(measured, allow_nan=False)

    rates = Rates(flops=1e9, bytes=1e9)
    measured["floor"] = floor.floors(TOY, rates=rates)
    chip = {"peak_flops": 1e12, "peak_bytes": 1e12}
    capsys.readouterr()
    tables.workload(TOY, measured, machine=chip)
    printed = capsys.readouterr().out
    assert "toy: 3 x (4 + 2), 2 x 1" in printed
    assert "Ours / peer" in printed
    assert "MFU of the update" in printed


# --- uneven lengths ---------------------------------------------------------------


def test_lengths_are_quantiles_of_the_distribution_cut_to_the_columns():
    workload = workloads.SMALL
    geometric = lengths.uneven(workload, lengths="geometric", mean=0.25).lengths
    # P(n <= k) = 1 - (1 - 1/12)^k.
    for k in (1, 6, 12, 24):
        share = sum(n <= k for n in geometric) / len(geometric)
        assert share == pytest.approx(1 - (11 / 12) ** k, abs=1 / lengths.POOL)
    lognormal = lengths.uneven(workload, lengths="lognormal", mean=0.25).lengths
    assert sorted(lognormal)[lengths.POOL // 2] == int(12 * math.exp(-0.32))
    for drawn in (geometric, lognormal):
        assert (min(drawn), max(drawn)) == (1, 48)
        assert 10 < statistics.mean(drawn) < 12.5


def test_lengths_of_a_file_and_one_too_long_for_the_workload(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"length": 2}\n1\n1\n1\n')
    workload = lengths.uneven(TOY, lengths=str(file), mean=0.5)
    assert sorted(workload.lengths) == [1] * 192 + [2] * 64
    file.write_text("1\n3\n")
    with pytest.raises(checks.InputError, match=r"at most 2 tokens, .* toy has, got 3"):
        lengths.uneven(TOY, lengths=str(file), mean=0.5)
    file.write_text("17\n")
    with pytest.raises(checks.InputError, match=r"at most 16 tokens, .* tiny has"):
        iteration.Config(workloads=("tiny",), lengths=str(file))


def test_a_prompt_chooses_its_length_by_the_sum_of_its_tokens():
    workload = dataclasses.replace(TOY, lengths=(1, 2, 1))
    expected = [(1, 2, 1)[sum(prompt) % 3] for prompt in workload.prompts(4)]
    assert workload.stops(4) == expected
    assert TOY.stops(4) == [2, 2, 2]


def test_the_floor_of_uneven_responses_is_that_of_their_mean():
    """Half of the rows draw two tokens; a step reads weights if any row still draws."""
    steps = floor.steps(dataclasses.replace(TOY, lengths=(1, 2)))
    decoding = steps["rollout"][1]
    assert decoding.flops == 0.5 * 3 * (3072 + 320 + 160)
    assert decoding.bytes == (1 - 0.5**3) * WEIGHTS + 0.5 * 4 * 2 * 4 * 2 * 8 * 3
    long, short = 3 * (5 * 3072 + 64 * 15), 3 * (4 * 3072 + 64 * 10)
    assert steps["score"][1].flops == (long + short) / 2
    assert floor.steps(dataclasses.replace(TOY, lengths=(2, 2))) == floor.steps(TOY)


# --- options and environments -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ("large",)}, "--workloads: expected some of gpt2-small, "),
        ({"workloads": ()}, "--workloads: expected at least one"),
        ({"peers": ("verl",)}, "--peers: expected some of trl, torch, tunix, each"),
        ({"peers": ("trl", "trl")}, "--peers: expected some of"),
        ({"rounds": 0}, "rounds: expected"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(checks.InputError, match=message):
        iteration.Config(**options)


CACHING = """\
import os, pathlib
folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
folder.mkdir(exist_ok=True)
found = len(list(folder.iterdir()))
(folder / str(found)).touch()
"""


def test_the_second_start_finds_what_the_first_compiled(fake):
    """Each participant finds its own programs and none of another workload."""
    command = changed(fake, '"parameters": 7', '"parameters": found')
    script = Path(command[1])
    script.write_text(CACHING + script.read_text())
    commands = {"rlhf_jax": command, "trl": command}
    options = iteration.Config(rounds=1)
    for _ in range(2):
        measured = iteration.measure(TOY, commands=commands, options=options)
        for participant in measured["participants"].values():
            assert (
                participant["cold"]["parameters"],
                participant["start"]["parameters"],
            ) == (0, 1)
    compiled = tables.compile_seconds(measured["participants"]["trl"])
    assert compiled == 3.0 - 1.0


def test_an_environment_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "trl").write_text("a file where a folder should be")
    with pytest.raises(environments.PeerError, match=r"trl==1\.12\.0 at .*pip inst"):
        environments.python_of("trl", folder=tmp_path)


@pytest.mark.slow
def test_an_environment_is_complete_with_the_versions_that_are_pinned(
    tmp_path, monkeypatch
):
    def complete(*pins):
        return environments._complete(Path(sys.executable), pins)

    have = f"numpy=={metadata.version('numpy')}"
    assert complete(have, "jax==0.0.1; python_version < '3'")
    assert not complete(have, "jax==0.0.1")
    assert not complete("no-such-package==1.0")
    info = tmp_path / "torch_like-1.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torch-like\nVersion: 1.0+cpu\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert complete("torch-like==1.0")
    assert not complete("torch-like==1.1")


# --- ours -------------------------------------------------------------------------


def test_prompts_are_others_at_every_step_and_the_same_in_every_process():
    assert TOY.prompts(0) == TOY.prompts(0) != TOY.prompts(1)
    assert {len(row) for row in TOY.prompts(0)} == {4}
    assert {token for row in TOY.prompts(0) for token in row} <= set(range(10))


def test_phases_add_up_to_the_iteration():
    clock = line_protocol.Clock()
    for phase in ("rollout", "score", "rollout", "update"):
        clock.lap(phase)
    assert set(clock.seconds) == {"rollout", "score", "update"}
    assert sum(clock.seconds.values()) == pytest.approx(clock.total)


@pytest.mark.long
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", [TOY.hidden_size, 128], ids=["apart", "whole"])
def test_ours_does_an_iteration_at_toy_size(hidden_size):
    """Once with the critic on its own device, once in one program."""
    workload = dataclasses.replace(
        TOY,
        num_layers=1,
        hidden_size=hidden_size,
        num_prompts=8,
        response_length=8,
        max_positions=12,
    )
    command = [sys.executable, str(environments.FOLDER / "rlhf_jax_ppo.py")]
    with participants.Participant(
        "rlhf_jax", command, workload=workload, limit=300.0
    ) as peer:
        start, times, end = peer.ready(), peer.go(), peer.end()
    if hidden_size == 128:
        assert 0 < start["compile"] < start["start_up"]
    else:  # compiled by the first iteration
        assert "compile" not in start
        assert start["warm_up"][0] > start["warm_up"][1]
    assert start["parameters"] >= floor.parameters(workload)
    assert times["checks"]["response_tokens"] == 64
    assert all(times[phase] > 0 for phase in tables.PHASES)
    assert end["last_peak_bytes"] >= start["peak_bytes"] >= start["before_bytes"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", [TOY.hidden_size, 128], ids=["apart", "whole"])
def test_ours_packed_does_the_work_of_padded_rows(hidden_size):
    """Packed and padded draw the same tokens; the prompts determine the lengths."""
    workload = dataclasses.replace(
        TOY,
        num_layers=1,
        hidden_size=hidden_size,
        num_prompts=16,
        num_minibatches=2,
        response_length=12,
        max_positions=16,
    )
    workload = lengths.uneven(workload, lengths="lognormal", mean=0.3)
    checked = []
    for arguments in ([], ["--padded"]):
        script = str(environments.FOLDER / "rlhf_jax_ppo.py")
        with participants.Participant(
            *("rlhf_jax", [sys.executable, script, *arguments]),
            workload=workload,
            limit=300.0,
        ) as peer:
            checked.append(peer.ready()["checks"])
            assert peer.go()["cpu"]["update"] > 0
    packed, padded = checked
    assert packed.pop("packing")
    assert packed.pop("moved") > 0
    assert packed == pytest.approx({k: padded[k] for k in packed}, rel=1e-3, abs=1e-5)


def test_of_a_turn_the_second_iteration_counts(monkeypatch):
    """The first iteration of a turn pays for the pause, so the second is timed."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(line_protocol, "say", lines.append)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\ngo\nend\n"))
    monkeypatch.setattr(line_protocol, "resident", lambda _: len(lines))
    clock, done = line_protocol.Clock(), []
    for step in line_protocol.iterations(
        clock=clock,
        versions={},
        about={},
        check=lambda: {"step": done[-1]},
        prepare=lambda: lines.append({"prepared after": done[-1]}),
    ):
        done.append(step)
        clock.seconds["rollout"] = float(step)
    assert done == [0, 1, 2, 3, 4, 5]  # two to warm up, then two a turn
    assert [step for step in done if line_protocol.counts(step)] == [3, 5]
    assert lines[0] == {"prepared after": 1}
    assert lines[1]["peak_bytes"] == 0  # of before that
    turns = [line for line in lines if "iteration" in line]
    assert [line["checks"]["step"] for line in turns] == [3, 5]
    assert [line["rollout"] for line in turns] == [3.0, 5.0]
