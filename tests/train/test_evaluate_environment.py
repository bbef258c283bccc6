"""`rlhf-jax evaluate --environment`: figures, resume, and refused input."""

import json
import shutil

import numpy as np
import pytest
import toy_files
from halls import LeftHall

from rlhf_jax.environments.single_turn import SingleTurn
from rlhf_jax.roles.rewards.verifiers import Judged, Matches
from rlhf_jax.runs import metrics
from rlhf_jax.train.evaluate import command

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORDS = ["go", "left", "right", "key", "door", "hall", "?"]
says_key = Matches(r"\b(key|left)\b")


class Counting:
    """`says_key` with counts."""

    counts = ("words", "without_key")

    def __call__(self, prompt, response, row):
        return says_key(prompt, response, row)

    def judge(self, prompt, response, row):
        score, words = self(prompt, response, row), response.split()
        return Judged(score, {"words": len(words), "without_key": "key" not in words})


counting = Counting()


def one_counted_turn():
    return SingleTurn(counting)


def one_turn():
    return SingleTurn(says_key)


def replayed(row):
    """Score, turns and end of an episode, recomputed from its text."""
    state, score = LeftHall().reset(row).state, 0.0
    responses = row["response"].split("⟦door hall⟧")
    for number, response in enumerate(responses):
        try:
            _, reward, done, state = LeftHall().step(state, response)
        except KeyError:
            return score, number + 1, "failed"
        score += reward
    stopped = row["ended"]
    early = "truncated" if not stopped else "out_of_turns"
    return score, len(responses), "by_environment" if done and stopped else early


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, seed in (("policy", 0), ("reference", 3)):
        toy_files.checkpoint(folder / name, words=WORDS, seed=seed)
    texts = ("left", "right go", "go", "hall door key key hall", "key")
    toy_files.jsonl(folder / "rows.jsonl", *({"prompt": text} for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(__file__.rpartition("/")[0])
        yield folder


def play(files, out, *options):
    command(
        [
            *(f"--model={files}/policy", f"--reference={files}/reference"),
            *(f"--prompts={files}/rows.jsonl", "--max-new-tokens=11"),
            *("--num-samples=3", "--batch-size=2", "--snapshot-every=1"),
            *("--num-workers=2", "--no-progress", f"--out={out}", *options),
        ]
    )
    return json.loads((out / "results.json").read_text())


NAMED = "--environment=halls:LeftHall,max_turns=2,observation_chunk=2"
HALL = (f"{NAMED},max_turn_tokens=3", "--overlong=drop", "--num-samples=16")


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, play(files, out, *HALL, "--max-new-tokens=12")


@pytest.mark.slow
def test_the_figures_are_those_of_the_episodes(whole):
    out, results = whole
    rows = metrics.read(out / "samples.jsonl")
    assert results["dropped"] == 1  # the fourth has no room
    assert {row["row"] for row in rows} == {0, 1, 2, 4}
    ways = [(m, d) for m in ("policy", "reference") for d in ("sampled", "greedy")]
    for model, decoding in ways:
        of = [
            row for row in rows if (row["model"], row["decoding"]) == (model, decoding)
        ]
        assert len(of) == 4 * (16 if decoding == "sampled" else 1)
        figures = results[model][decoding]
        for name, number in {
            "score": lambda row: row["score"],
            "pass@1": lambda row: row["score"] == 1,
            "best@1": lambda row: row["score"],
            "failed": lambda row: row["failed"],
            "turns": lambda row: row["turns"],
            "observed": lambda row: row["observed"],
            **{
                end: lambda row, end=end: row["end"] == end
                for end in ("by_environment", "truncated", "out_of_turns")
            },
        }.items():
            mean = np.mean([number(row) for row in of])
            assert figures[name]["mean"] == pytest.approx(mean, abs=1e-12), name
    sampled = [row for row in rows if row["decoding"] == "sampled"]
    # Every way of ending is there, and what was read is no part of what was said.
    ends = {"by_environment", "truncated", "out_of_turns", "failed"}
    assert {row["end"] for row in sampled} == ends
    for row in rows:
        assert (row["score"], row["turns"], row["end"]) == replayed(row)
    assert max(row["turns"] for row in sampled) == 2
    for row in sampled:
        assert row["observed"] == 2 * (row["turns"] - 1)
        assert row["response"].count("⟦door hall⟧") == row["turns"] - 1
        assert row["failed"] == (row["end"] == "failed")
        assert row["length"] + row["observed"] <= 12
    for row in sampled:
        if row["model"] == "policy":  # of two passes, and of the sampler and one
            assert row["k1"] == pytest.approx(
                row["logprob"] - row["ref_logprob"], abs=1e-4
            )
            assert row["kl"] > 0
    assert results["policy"]["sampled"]["score"]["low"] is not None


@pytest.mark.slow
def test_it_goes_on_to_the_same_results(files, whole, tmp_path):
    out, _ = whole
    run = tmp_path / "run"
    shutil.copytree(out, run)
    shutil.rmtree(run / "snapshots" / "evaluate" / "2")
    play(files, run, *HALL, "--max-new-tokens=12", "--resume")
    for name in ("results.json", "samples.jsonl", "metrics.jsonl"):
        assert (run / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.slow
def test_eight_devices_play_the_episodes_of_one(files, whole, tmp_path):
    out, _ = whole
    mesh = "--placement.policy=data=2,tensor=4"
    play(files, tmp_path / "run", *HALL, "--max-new-tokens=12", mesh)
    rows = [metrics.read(run / "samples.jsonl") for run in (tmp_path / "run", out)]
    for here, other in zip(*rows, strict=True):
        numbers = {key: v for key, v in other.items() if isinstance(v, float)}
        assert {key: here[key] for key in numbers} == pytest.approx(numbers, abs=2e-5)
        assert here == other | {key: here[key] for key in numbers}


@pytest.mark.slow
def test_one_turn_is_a_verifier(files, tmp_path):
    own = "test_evaluate_environment"
    results = play(files, tmp_path / "turn", f"--environment={own}:one_turn")
    expected = play(files, tmp_path / "verifier", f"--verifier={own}:says_key")
    for model in ("policy", "reference"):
        greedy = results[model]["greedy"]
        for name, figure in expected[model]["greedy"].items():
            assert greedy[name] == figure
    sampled, answers = (
        [
            (row["model"], row["row"], row["response"], row["score"])
            for row in metrics.read(tmp_path / name / "samples.jsonl")
            if row["decoding"] == "greedy"
        ]
        for name in ("turn", "verifier")
    )
    assert sampled == answers
    assert len({response for *_, response, _ in sampled}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "scored",
    ["--environment=OWN:one_counted_turn", "--verifier=OWN:counting"],
)
def test_what_is_counted_is_logged(files, tmp_path, scored):
    """Counts of a verifier, and of an environment's verifier."""
    out = tmp_path / "run"
    option = scored.replace("OWN", "test_evaluate_environment")
    results = play(files, out, option, "--batch-size=1")
    rows = metrics.read(out / "samples.jsonl")
    numbers = {
        "words": lambda row: len(row["response"].split()),
        "without_key": lambda row: "key" not in row["response"].split(),
    }
    for name, number in numbers.items():
        assert [row["counts"][name] for row in rows] == [*map(number, rows)]
        for model in ("policy", "reference"):
            of = [row for row in rows if row["model"] == model]
            for decoding in ("sampled", "greedy"):
                mean = np.mean([number(r) for r in of if r["decoding"] == decoding])
                figure = results[model][decoding][name]
                assert figure["mean"] == pytest.approx(mean, abs=1e-12)
    share = results["policy"]["greedy"]["without_key"]
    assert 0 <= share["low"] < share["high"] <= 1  # Wilson's
    logged = metrics.read(out / "metrics.jsonl")
    assert len(logged) == 5
    for step, row in enumerate(logged):
        ours = [
            of
            for of in rows
            if (of["model"], of["decoding"], of["row"]) == ("policy", "sampled", step)
        ]
        for name, number in numbers.items():
            mean = np.mean([number(of) for of in ours])
            assert row[f"reward/{name}"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verifier=exact"], "got --verifier exact and --environment halls:LeftHall"),
        (["--reward=m:f"], "got --reward m:f and --environment halls:LeftHall"),
        (["--template=a {prompt}"], "--template: expected none with --environment"),
        (["--prompt-field=q"], "--prompt-field: expected none with --environment"),
        ([f"{NAMED},seconds=3"], "its figures would depend on the clock"),
        (
            [f"{NAMED},max_turn_tokens=99"],
            "expected a number of at most 11, got 99",
        ),
    ],
)
def test_what_an_evaluation_of_episodes_refuses(
    files, tmp_path, capsys, options, message
):
    with pytest.raises(SystemExit):
        play(files, tmp_path / "run", *HALL, *options)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
