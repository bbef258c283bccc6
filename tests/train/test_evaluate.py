"""`rlhf-jax evaluate`: figures recomputed from samples, exact resume, bad input."""

import dataclasses
import importlib
import json
import shutil
import signal
import sys

import numpy as np
import pytest
import toy_files

from rlhf_jax.evaluation import comparison, success
from rlhf_jax.functional import best_of_n
from rlhf_jax.functional.checks import StopError
from rlhf_jax.runs import metrics
from rlhf_jax.train import evaluate
from rlhf_jax.train.evaluate import options, trainer
from rlhf_jax.train.evaluate.responses import Evaluation

pytestmark = pytest.mark.usefixtures("quick_compilation")
slow = pytest.mark.slow

MODULE = r"""
import signal
calls = 0

def early(signum, prompts, responses, rows):
    global calls
    calls += 1
    if calls == 1:  # of the first batch
        signal.raise_signal(signum)
    return length(prompts, responses, rows)

def terminated(prompts, responses, rows):
    return early(signal.SIGTERM, prompts, responses, rows)

def interrupted(prompts, responses, rows):
    return early(signal.SIGINT, prompts, responses, rows)

def stopping(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 6:  # of the second batch; four calls each
        signal.raise_signal(signal.SIGTERM)
    return length(prompts, responses, rows)

def has_a(prompt, response, row):
    return float(row["answer"] in response.split())

def length(prompts, responses, rows):
    return [float(len(response.split())) for response in responses]

def longer(prompts, first, second, rows):
    return [0.5 + 0.4 * ((len(a) > len(b)) - (len(a) < len(b))) + 0.1
            for a, b in zip(first, second)]

def fails(prompts, responses, rows):
    raise KeyError("no score")

class Parity:  # right where the first word's length is even or odd, as the row says
    def __call__(self, prompt, response, row):
        if self.answer(response) is None:
            raise ValueError("no word")
        return float(self.answer(response) == row["parity"])
    def answer(self, response):
        words = response.split()
        return ("even", "odd")[len(words[0]) % 2] if words else None

parity = Parity()

def broken(prompt, response, row):
    raise KeyError("no answer")

def graded(prompt, response, row):
    return 0.5

"""
PROMPTS = ("the cat", "a dog was", "we ran", "it", "so good")
BASICS = (
    *("--num-samples=4", "--max-new-tokens=4", "--batch-size=2", "--no-progress"),
    "--snapshot-every=1",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "measures.py").write_text(MODULE)
    toy_files.checkpoint(folder / "policy")
    toy_files.checkpoint(folder / "reference", seed=3)
    rows = [
        {"prompt": prompt, "answer": "a", "parity": ("even", "odd")[n % 2], "asked": n}
        for n, prompt in enumerate(PROMPTS)
    ]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    (folder / "texts.txt").write_text("the cat sat on a dog . " * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


def play(files, out, *argv, reference="reference"):
    words = ["--out", out, "--model", files / "policy", *BASICS]
    words += ["--prompts", files / "prompts.jsonl", *argv]
    if reference is not None:
        words += ["--reference", files / reference]
    evaluate.command(list(map(str, words)))
    return json.loads((out / "results.json").read_text())


def samples_of(out):
    return metrics.read(out / "samples.jsonl")


def per_prompt(rows, number, *, model="policy", decoding="sampled"):
    """`number` of each prompt's rows."""
    return [
        number(
            [
                row
                for row in rows
                if (row["model"], row["decoding"], row["row"])
                == (model, decoding, prompt)
            ]
        )
        for prompt in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run with a reward, a judge and texts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    options = ("--reward=measures:length", "--judge=measures:longer", "--ks", "1", "3")
    results = play(files, out, *options, "--texts", files / "texts.txt")
    return out, options, results


def test_the_figures_are_those_of_the_samples(whole):
    out, _, results = whole
    rows = samples_of(out)
    assert len(rows) == len(PROMPTS) * 2 * (4 + 1)
    for model in ("policy", "reference"):
        figures = results[model]["sampled"]
        for name, number in {
            "score": lambda of: np.mean([row["score"] for row in of]),
            "best@1": lambda of: np.mean([row["score"] for row in of]),
            "best@3": lambda of: success.best_at_k([r["score"] for r in of], k=3),
            "length": lambda of: np.mean([row["length"] for row in of]),
            "ended": lambda of: np.mean([row["ended"] for row in of]),
            "distinct": lambda of: len({row["response"] for row in of}) / 4,
            "log_perplexity": lambda of: np.mean(
                [-row["ref_logprob"] / row["length"] for row in of]
            ),
        }.items():
            values = per_prompt(rows, number, model=model)
            assert figures[name]["mean"] == pytest.approx(np.mean(values), abs=1e-12)
            assert figures[name]["prompts"] == len(PROMPTS)
            half = 2.776445 * np.std(values, ddof=1) / np.sqrt(5)  # t(0.975, 4)
            width = 0.0 if half == 0 else figures[name]["high"] - figures[name]["low"]
            assert (figures[name]["low"] is None) == (half == 0)
            assert 0 <= width <= 2 * half + 1e-4  # shares are cut to [0, 1]
        texts = {row["response"] for row in rows if is_sampled(row, model)}
        assert figures["distinct_overall"] == len(texts) / 20
        assert not any(name.startswith(("pass", "majority")) for name in figures)
        (best,) = (n for n in results[model]["greedy"] if n.startswith("best"))
        assert best == "best@1"
    kl = results["policy"]["sampled"]
    exact = per_prompt(rows, lambda of: np.mean([row["kl"] for row in of]))
    assert kl["kl"]["mean"] == pytest.approx(np.mean(exact), abs=1e-12)
    assert 0 < kl["kl"]["mean"] == pytest.approx(kl["kl_k1"]["mean"], abs=0.2)


def is_sampled(row, model):
    return (row["model"], row["decoding"]) == (model, "sampled")


def test_the_policy_is_compared_prompt_by_prompt(whole):
    out, _, results = whole
    rows, figures = samples_of(out), results["comparison"]["sampled"]
    ours, theirs = (
        per_prompt(rows, lambda of: [row["score"] for row in of], model=model)
        for model in ("policy", "reference")
    )
    wins = list(map(comparison.win_rate, ours, theirs))
    assert figures["win_rate_by_score"]["mean"] == pytest.approx(np.mean(wins))
    difference = np.mean(ours) - np.mean(theirs)
    assert figures["score_difference"]["mean"] == pytest.approx(difference, abs=1e-12)
    judged = per_prompt(
        rows, lambda of: np.mean([np.mean(row["verdict"]) for row in of])
    )
    assert figures["win_rate_by_judge"]["mean"] == pytest.approx(np.mean(judged))
    best = results["best_of_k"]
    assert [point["k"] for point in best] == [1, 3]
    assert best[1]["mean"] == results["reference"]["sampled"]["best@3"]["mean"]
    assert best[1]["kl_at_most"] == best_of_n.kl_bound(3)
    # The judge's preference for the first is 0.1, and cancels.
    assert figures["judge_prefers_first"]["mean"] == pytest.approx(0.6)


def test_the_loss_on_texts_shows_forgetting(whole):
    out, _, results = whole
    texts = results["texts"]
    assert texts["forgetting"] == texts["policy_loss"] - texts["reference_loss"]
    assert 2 < texts["policy_loss"] < 4  # of untrained models, about log 24
    summary = json.loads((out / "summary.json").read_text())
    assert summary["frozen_verified"]
    assert {name: summary[name] for name in results} == results
    (row, *_) = metrics.read(out / "metrics.jsonl")
    assert {"objective/scores", "objective/kl_exact", "response/length"} <= row.keys()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit(whole, files, tmp_path):
    """The newest snapshot is removed; rows of the killed process remain."""
    out, options, _ = whole
    again = tmp_path / "run"
    shutil.copytree(out, again)
    newest = max(
        (p for p in (again / "snapshots" / "evaluate").iterdir() if p.name.isdigit()),
        key=lambda path: int(path.name),
    )
    assert newest.name == "3"
    shutil.rmtree(newest)
    (again / "results.json").unlink()
    recorded = json.loads((out / "config.json").read_text())["config"]
    assert recorded["out"] == str(out)
    play(files, again, *options, "--texts", files / "texts.txt", "--resume")
    for name in ("results.json", "samples.jsonl", "metrics.jsonl"):
        assert (again / name).read_bytes() == (out / name).read_bytes(), name


@slow
def test_a_stopped_run_goes_on_to_the_last_bit(files, tmp_path):
    stopped, once = tmp_path / "stopped", tmp_path / "once"
    with pytest.raises(SystemExit) as exit_:
        play(files, stopped, "--reward=measures:stopping")
    assert exit_.value.code == 128 + signal.SIGTERM
    assert not (stopped / "results.json").exists()
    assert 0 < len(samples_of(stopped)) < len(PROMPTS) * 10
    play(files, stopped, "--reward=measures:stopping", "--resume")
    play(files, once, "--reward=measures:stopping")
    for name in ("results.json", "samples.jsonl", "metrics.jsonl"):
        assert (stopped / name).read_bytes() == (once / name).read_bytes(), name


@slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_batch_stops_after_it(files, tmp_path, kind, capsys):
    stopped, once = tmp_path / "stopped", tmp_path / "once"
    name = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}[kind]
    measures = importlib.import_module("measures")
    measures.calls = 0
    with pytest.raises(SystemExit) as exit_:
        play(files, stopped, f"--reward=measures:{name}")
    assert exit_.value.code == 128 + kind
    assert "stopped and saved; go on with" in capsys.readouterr().err
    assert {row["row"] for row in samples_of(stopped)} == {0, 1}  # a batch of two
    play(files, stopped, f"--reward=measures:{name}", "--resume")
    assert measures.calls == 3 * 4  # of three batches: none is scored twice
    play(files, once, f"--reward=measures:{name}")
    for file in ("results.json", "samples.jsonl", "metrics.jsonl"):
        text = (stopped / file).read_text().replace(str(stopped), str(once))
        assert text == (once / file).read_text(), file


@pytest.mark.slow
def test_the_batch_size_does_not_change_samples(whole, files, tmp_path):
    out, options, _ = whole
    play(files, tmp_path / "run", *options, "--batch-size=5")
    texts = [
        sorted(
            (row["model"], row["decoding"], row["row"], row["sample"], row["response"])
            for row in samples_of(folder)
        )
        for folder in (out, tmp_path / "run")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_equal_models_have_no_kl_and_other_samples(files, tmp_path):
    out = tmp_path / "run"
    argv = ("--verifier=measures:parity", "--num-workers=1", "--ks", "2")
    results = play(files, out, *argv, reference="policy")
    rows = samples_of(out)
    for row in rows:
        if is_sampled(row, "policy"):
            assert row["kl"] == pytest.approx(0, abs=1e-6)
            assert row["k1"] == pytest.approx(0, abs=1e-5)
            # The forward pass of the reference reads what the sampler drew.
            assert row["ref_logprob"] == pytest.approx(row["logprob"], abs=1e-3)
    ours, theirs = (
        [row["response"] for row in rows if is_sampled(row, model)]
        for model in ("policy", "reference")
    )
    assert ours != theirs
    greedy = results["comparison"]["greedy"]["win_rate_by_score"]
    assert (greedy["mean"], greedy["low"], greedy["high"]) == (0.5, None, None)
    figures = results["policy"]["sampled"]
    assert 0 < figures["pass@1"]["mean"] < figures["pass@2"]["mean"] < 1

    def parity(row):
        words = row["response"].split()
        return ("even", "odd")[len(words[0]) % 2] if words else None

    for row in rows:
        right = parity(row) == ("even", "odd")[row["row"] % 2]
        assert row["score"] == (right and parity(row) is not None)
        assert row["failed"] == (parity(row) is None)
        assert row["answer"] == parity(row)
    for k in (1, 2):
        right = per_prompt(rows, lambda of: sum(row["score"] for row in of))
        passed = [success.pass_at_k(int(c), num_samples=4, k=k) for c in right]
        assert figures[f"pass@{k}"]["mean"] == pytest.approx(np.mean(passed))
        voted = per_prompt(
            rows,
            lambda of, k=k: success.majority_at_k(
                list(map(parity, of)),
                [row["score"] == 1 for row in of],
                k=k,
            ),
        )
        assert figures[f"majority@{k}"]["mean"] == pytest.approx(np.mean(voted))
    assert "left_out" not in results


@slow
def test_a_policy_alone_with_a_reward_model(files, tmp_path):
    toy_files.reward_model(tmp_path / "scorer")
    argv = ("--reward-model", tmp_path / "scorer", "--num-samples=2")
    results = play(files, tmp_path / "run", *argv, reference=None)
    figures = results["policy"]["sampled"]
    assert figures["best@2"]["mean"] > figures["best@1"]["mean"]
    assert "reference" not in results
    assert "kl" not in figures


@slow
def test_a_verifier_that_reads_no_answers_has_no_majority(files, tmp_path, capsys):
    results = play(files, tmp_path / "run", "--verifier=measures:has_a")
    figures = results["policy"]["sampled"]
    assert {"pass@1", "pass@2", "pass@4"} <= figures.keys()
    assert not any(name.startswith("majority") for name in figures)
    assert "measures:has_a" in results["left_out"]["majority"]
    assert "left out: majority@k, as measures:has_a has no" in capsys.readouterr().out


def test_without_a_reward_messages_name_none(tmp_path):
    start = options.Evaluated(model="m")
    data = options.AskedPrompts(prompts="p.jsonl")
    config = options.Config(start=start, data=data, out=tmp_path)
    assert config.score_called == ""


@slow
def test_nothing_that_scores(files, tmp_path):
    results = play(files, tmp_path / "run")
    assert results["scored_by"] is None
    assert "score" not in results["policy"]["sampled"]
    assert results["comparison"]["sampled"] == {}
    assert results["policy"]["sampled"]["kl"]["mean"] > 0


@slow
def test_one_device_and_eight_give_the_same_samples(files, tmp_path):
    runs = {}
    for name, argv in {
        "one": (),
        "eight": ("--placement.policy=data=2,fsdp=4",),
    }.items():
        play(files, tmp_path / name, *argv, "--batch-size=8")
        runs[name] = [row["response"] for row in samples_of(tmp_path / name)]
    assert runs["one"] == runs["eight"]


@slow
def test_prompts_that_are_dropped_keep_their_rows(files, tmp_path, capsys):
    """With room for 2 tokens, the second prompt, of 3 tokens, is dropped."""
    out, options = tmp_path / "run", ("--reward=measures:length", "--overlong=drop")
    results = play(files, out, *options, "--max-new-tokens=14", reference=None)
    assert (results["prompts"], results["dropped"]) == (4, 1)
    assert "1 of 5 prompts leave no room" in capsys.readouterr().out
    rows = samples_of(out)
    assert {row["row"]: row["prompt"] for row in rows} == {
        n: prompt for n, prompt in enumerate(PROMPTS) if n != 1
    }


@slow
def test_rows_that_are_lost_are_told(whole, files, tmp_path, capsys):
    out, options, _ = whole
    again = tmp_path / "run"
    shutil.copytree(out, again)
    lines = (again / "samples.jsonl").read_text().splitlines(keepends=True)
    (again / "samples.jsonl").write_text("".join(lines[1:]))
    argv = ("--texts", files / "texts.txt", "--resume", "--accept-lost-rows")
    with pytest.raises(SystemExit):
        play(files, again, *options, *argv)
    error = capsys.readouterr().err
    assert f"samples.jsonl: {sum(map(len, lines[1:]))} bytes, expected" in error


@slow
def test_a_verifier_that_fails_throughout_stops_the_run(files, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        play(files, tmp_path / "run", "--verifier=measures:broken")
    assert exit_.value.code == 1
    assert "measures:broken: expected a score for some resp" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@slow
def test_scores_between_are_told(files, tmp_path, capsys):
    results = play(
        files, tmp_path / "run", "--verifier=measures:graded", reference=None
    )
    assert results["graded"] == len(PROMPTS) * 5
    assert results["policy"]["sampled"]["pass@4"]["mean"] == 0
    assert "have a score other than 0 and 1" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["scores", "log-probs"])
def test_numbers_that_are_not_finite_stop_it(wrong):
    numbers = [np.zeros(3), np.array([0.0, np.nan, 0.0])]
    with pytest.raises(StopError, match=rf"it: expected finite {wrong}, got nan for"):
        Evaluation._check_finite(None, "it", numbers, what=wrong, rows=[4, 7, 9])


def refused(capsys, files, out, *argv, reference=None):
    with pytest.raises(SystemExit) as exit_:
        play(files, out, *argv, reference=reference)
    assert exit_.value.code == 2
    assert not out.exists()
    errors = capsys.readouterr().err
    return " ".join(errors.replace("│", " ").split())


@pytest.mark.cases(quick=8)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--reward=measures:length --verifier=exact",
            "expected one of --reward, --verifier, --reward-model and --environment, "
            "or none, got --reward measures:length and --verifier exact",
        ),
        ("--ks 1 5", "--ks: expected a number of at least 1 and of at most 4, got 5"),
        ("--ks 0", "--ks: expected a number of at least 1 and of at most 4, got 0"),
        ("--judge=measures:longer", "--judge measures:longer: expected --reference"),
        ("--num-workers=2", "--num-workers: expected --verifier or --env"),
        (
            "--timeout=3",
            "--timeout: expected --verifier or --environment with it, got none",
        ),
        ("--on-failure=stop", "--on-failure: expected --verifier or --env"),
        (
            "--num-texts=7",
            "--num-texts: expected --texts with it, got none",
        ),
        (
            "--text-max-length=7",
            "--text-max-length: expected --texts with it, got none",
        ),
        (
            "--answer-field=right",
            "expected an option of this command, got --answer-field; write --verifier "
            "NAME,answer_field=VALUE",
        ),
        (
            "--verifier=exact,unmarked=last_number",
            "unmarked=last_number cannot be combined with --verifier exact, because "
            "gsm8k alone",
        ),
        (
            "--placement.policy=data=4",
            "--batch-size: expected a multiple of 4, the devices that share the",
        ),
        (
            "--verifier=gsm9k",
            "--verifier: expected one of 'gsm8k', 'integer', 'exact', 'mod",
        ),
        ("--verifier=gsm8k", "prompts.jsonl:1: expected #### and a number at the end"),
        ("--reward=measures:none", "measures:none: expected a function none"),
        ("--max-new-tokens=14", "prompts.jsonl:2: expected at most 2 tokens, got 3"),
        ("--max-new-tokens=16", "--max-new-tokens: expected a number below 16"),
        ("--prompt-field=q", "prompts.jsonl:1: expected a field 'q'"),
        ("--temperature=0", "--temperature: expected a finite number above 0, got 0"),
        ("--texts=/nowhere.txt", "/nowhere.txt: expected a readable file"),
        ("--reference=/nowhere", "'/nowhere'; that looks like a path"),
        ("--reward-model=/nowhere", "'/nowhere'; that looks like a path"),
        ("--template=x", "--template: expected {prompt} where the prompt"),
    ],
)
def test_it_is_refused_before_a_model_is_loaded(
    argv, message, files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(trainer, "load_start", None)
    errors = refused(capsys, files, tmp_path / "run", *argv.split())
    assert message in errors


@slow
def test_a_reference_of_other_tokens_is_refused_before_a_model_is_loaded(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(trainer, "load_start", None)
    other = toy_files.checkpoint(tmp_path / "other", words=toy_files.WORDS[::-1])
    errors = refused(capsys, files, tmp_path / "run", reference=other)
    assert "expected the policy's tokenizer, got one that gives other ids" in errors
    short = dataclasses.replace(toy_files.MODEL, max_positions=8)
    toy_files.checkpoint(tmp_path / "short", model=short)
    errors = refused(capsys, files, tmp_path / "run", reference=tmp_path / "short")
    assert "short: expected a model that reads the policy's tokens, got " in errors
    assert "got max_positions 8 for 16; " in errors


@pytest.mark.slow
def test_a_reward_that_fails_leaves_no_run(files, tmp_path, capsys):
    errors = refused(capsys, files, tmp_path / "run", "--reward=measures:fails")
    assert "error: --reward measures:fails raised KeyError: 'no score'" in errors
