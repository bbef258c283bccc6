"""`rlhf-jax dpo` at toy size: training, output and refused input."""

import functools
import json

import numpy as np
import pytest
import toy_files
import toys
from test_trainers import contents, refused
from tiers import one_in

from rlhf_jax import fingerprint, hf, policy
from rlhf_jax.data import batches, encoding, tokenization
from rlhf_jax.data.examples import Example
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.runs import command_line, metrics, run
from rlhf_jax.train.supervised import dpo

pytestmark = pytest.mark.usefixtures("quick_compilation")
PAIRS = [
    {"prompt": "the cat", "chosen": "sat very good .", "rejected": "ran bad ."},
    {"prompt": "a dog", "chosen": "is good", "rejected": "was so very bad"},
    {"prompt": "it was so", "chosen": "good", "rejected": "bad"},
]
SPLIT = ("--held-out=0.2", "--batch-size=4")
ADAPTERS = (
    *("--lora=2", "--precompute", "--micro-batch-size=2"),
    "--reference-storage.dtype=bfloat16",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.checkpoint(folder / "other", seed=1)
    toy_files.jsonl(folder / "pairs.jsonl", *PAIRS * 5)
    return folder


def play(out, files, *argv):
    """Runs the experiment as its command line does; returns its summary."""
    words = [
        *("--out", out, "--no-progress", "--model", files / "model"),
        *("--data", files / "pairs.jsonl", *SPLIT, *argv),
    ]
    command_line.main(
        dpo.main,
        dpo.Config,
        description="",
        presets=dpo.PRESETS,
        argv=[str(word) for word in words],
    )
    return json.loads((out / "summary.json").read_text())


def logprobs(folder, side):
    """log π(answer | prompt) of each of `PAIRS`, by the saved checkpoint."""
    model, params = hf.load(folder)
    reader = tokenization.load_tokenizer(folder)
    pairs = encoding.encode_preferences(TextContract(reader), PAIRS, limits=Limits(16))
    [texts] = batches.sequences_in_order(
        [Example(pair.prompt, getattr(pair, side)) for pair in pairs],
        batch_size=len(PAIRS),
        pad_id=0,
    )
    output = toys.jit(policy.logprobs, static_argnames="model")(
        params, model=model, tokens=texts.tokens, mask=texts.mask
    )
    return np.where(texts.response_mask, output, 0).sum(axis=1)


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """(folder, options, summary) of a finished run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    argv = ("--learning-rate=1e-2", "--num-steps=12", "--row-width=40")
    return out, argv, play(out, files, *argv)


@pytest.mark.slow
def test_it_learns_the_pairs(files, finished):
    out, _, summary = finished
    assert summary["pairs"] == 10  # of two prompts of the three
    assert summary["rows"] < 10
    before, after = summary["held_out_before"], summary["held_out"]
    assert before["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5)
    assert after["loss/dpo"] < 0.67  # of a prompt that it was not trained on
    assert after["dpo/accuracy"] == 1
    rows = metrics.read(out / "metrics.jsonl")
    assert rows[0]["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5)
    assert rows[-1]["loss/dpo"] < 0.6
    assert (out / "plots" / "dpo.png").exists()
    # What it says of itself is what the checkpoint says, without packing.
    lead = {
        name: logprobs(folder, "chosen") - logprobs(folder, "rejected")
        for name, folder in (("old", files / "model"), ("new", out / "model"))
    }
    assert (lead["new"] > lead["old"] + 1).all()
    moved = 0.1 * (lead["new"] - lead["old"])
    assert moved.min() - 1e-3 < after["dpo/margin"] < moved.max() + 1e-3
    start = fingerprint.fingerprint(hf.load(files / "model")[1])
    assert summary["reference_fingerprint"] == start.root


@pytest.mark.slow
def test_precomputed_log_probs_give_the_same_run_to_the_bit(files, finished, tmp_path):
    """A resume of the finished run computes nothing."""
    live, argv, summary = finished
    out = tmp_path / "run"
    again = play(out, files, *argv, "--precompute")
    assert again["held_out"] == summary["held_out"]
    weights = "model/model.safetensors"
    assert (out / weights).read_bytes() == (live / weights).read_bytes()
    beside = [  # the reference is freed, from which the drift is measured
        {name: value for name, value in row.items() if not name.startswith("drift/")}
        for row in metrics.read(live / "metrics.jsonl")
    ]
    assert metrics.read(out / "metrics.jsonl") == beside
    assert len(list((out / "reference").glob("*.npy"))) == 2
    before = contents(out)
    play(out, files, *argv, "--precompute", "--resume")
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), pytest.param(ADAPTERS, marks=pytest.mark.long)])
def test_a_run_that_stopped_goes_on_to_the_bit(files, tmp_path, monkeypatch, how):
    """Also with adapters over a rounded base, which is the reference."""
    argv = ("--learning-rate=3e-2", "--num-steps=8", "--snapshot-every=2", *how)
    whole = tmp_path / "whole"
    summary = play(whole, files, *argv)
    assert summary["held_out_before"]["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5)
    assert summary["held_out"]["loss/dpo"] < 0.68
    assert (whole / "adapter").exists() == bool(how)
    assert np.isfinite(logprobs(whole / "model", "chosen")).all()

    class Killed(BaseException):
        pass

    def stopping(stage, step, *rest, **more):
        ended(stage, step, *rest, **more)
        if step == 3:
            raise Killed

    ended = run.Stage.end_step
    with monkeypatch.context() as patch:
        patch.setattr(run.Stage, "end_step", stopping)
        with pytest.raises(Killed):
            play(tmp_path / "cut", files, *argv)
    play(tmp_path / "cut", files, *argv, "--resume")
    mine, expected = contents(tmp_path / "cut"), contents(whole)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert mine[name] == expected[name]
    # Of the reference too: it is read, or found to be there, and not another.
    cached = {name for name in expected if name.startswith("reference")}
    assert len(cached) == (4 if how else 0)
    assert {name: mine[name] for name in cached} == {
        name: expected[name] for name in cached
    }


@pytest.mark.long
@pytest.mark.slow
def test_another_reference_and_none(files, tmp_path):
    argv = ("--num-steps=2", "--learning-rate=1e-4")
    other = play(tmp_path / "other", files, *argv, "--reference", files / "other")
    assert other["held_out_before"]["dpo/margin"] != 0
    start = fingerprint.fingerprint(hf.load(files / "other")[1])
    assert other["reference_fingerprint"] == start.root
    free = play(tmp_path / "free", files, *argv, "--reference=none", "--held-out=0")
    assert free["reference_fingerprint"] is None
    assert free["held_out"] == {}


@pytest.mark.slow
def test_kto_of_labels_live_and_precomputed(files, tmp_path):
    """A file of pairs is read as labels; live and precomputed runs start alike."""
    argv = ("--kind=kto", "--num-steps=12", "--learning-rate=1e-2", "--held-out=0.4")
    argv += ("--beta=0.5", "--micro-batch-size=2")
    live = play(tmp_path / "live", files, *argv)
    assert live["texts"] + live["held_out_texts"] == 6 * 5
    assert live["held_out_texts"] == 10  # of one prompt of the three
    before, after = live["held_out_before"], live["held_out"]
    assert before["loss/dpo"] == pytest.approx(0.5, abs=1e-5)
    assert before["kto/kl"] == 0
    rows = metrics.read(tmp_path / "live" / "metrics.jsonl")
    assert rows[-1]["loss/dpo"] < 0.4
    assert rows[-1]["kto/desirable_reward"] > rows[-1]["kto/undesirable_reward"] + 0.5
    assert after["kto/desirable_logprob"] != before["kto/desirable_logprob"]
    again = play(tmp_path / "cached", files, *argv, "--precompute", "--row-width=60")
    assert again["rows"] < again["texts"]
    assert again["held_out_before"]["loss/dpo"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_losses_without_a_reference(files, tmp_path, kind):
    argv = ("--preset", kind, "--num-steps=12", "--learning-rate=1e-2")
    summary = play(tmp_path / "run", files, *argv)
    assert summary["reference_fingerprint"] is None
    before, after = summary["held_out_before"], summary["held_out"]
    assert after["loss/dpo"] < before["loss/dpo"] - 0.1
    assert after["dpo/accuracy"] == 1


@pytest.fixture(scope="module")
def real(shared_data, tmp_path_factory):
    """A new narrow GPT-2 with the real vocabulary."""
    reader = tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")
    model = toy_files.config.gpt2(
        vocab_size=1 + max(reader.get_vocab().values()),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        max_positions=48,
    )
    folder = tmp_path_factory.mktemp("real") / "model"
    hf.save(folder, model, toy_files.params(model), tokenizer=reader)
    return folder


@pytest.mark.long
def test_real_pairs(real, shared_data, tmp_path):
    """Pairs are learned, packed in rows wider than the model's context."""
    summary = play(
        *(tmp_path / "run", tmp_path, "--model", real, "--overlong=drop"),
        *("--data", shared_data / "hh-rlhf-harmless" / "pairs.jsonl", "--blank=drop"),
        *("--row-width=192", "--num-steps=4", "--learning-rate=3e-3"),
        *("--batch-size=8", "--beta=0.5"),
    )
    assert summary["pairs"] > 100
    assert summary["rows"] < summary["pairs"] / 1.8
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss/dpo"] == pytest.approx(np.log(2), abs=1e-4)
    assert rows[-1]["dpo/chosen_logprob"] != rows[0]["dpo/chosen_logprob"]
    assert 0 < summary["held_out"]["dpo/accuracy"] < 1


# --- what a user may get wrong ------------------------------------------------


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize(
    ("argv", "message"),
    one_in(
        2,
        [
            (("--beta=0",), "--beta: expected a finite number above 0, got 0.0"),
            (
                ("--label-smoothing=0.5",),
                "--label-smoothing: expected a number of at least",
            ),
            (("--kind=ipo", "--label-smoothing=0.1"), "expected 0 with kind 'ipo'"),
            (
                ("--kind=simpo", "--precompute"),
                "--precompute cannot be combined with --kind s",
            ),
            (
                ("--kind=kto", "--row-width=8"),
                "at most 8 tokens, the width of a row",
            ),
            (
                ("--kind=ipo", "--reference=none"),
                "sigmoid, robust or hinge without a reference",
            ),
            (
                ("--reference=none", "--precompute"),
                "--precompute cannot be combined with --re",
            ),
            (
                ("--kind=orpo", "--reference=x"),
                "--reference cannot be combined with --kind orpo",
            ),
            (
                ("--reference=none", "--reference-storage.dtype=int8"),
                "--reference-storage: expected --lora or a reference with it",
            ),
            (("--lora=none,alpha=4",), "--lora"),
            (
                ("--lora=2", "--placement.reference=cpu"),
                "--placement.reference cannot be combined with --lora,",
            ),
            (
                ("--schedule=cosine,warmup=1",),
                "--schedule: warmup: expected a number of at least 0 and below 1",
            ),
            (("--num-steps=0",), "--num-steps: expected a finite number above 0"),
            (
                ("--row-width=8",),
                ".jsonl:1: expected at most 8 tokens, the width of a row",
            ),
            (("--max-length=5",), "expected at most 5 tokens, got 7"),
            (("--micro-batch-size=3",), "micro-batch-size to divide the 4 rows"),
            (("--held-out=0.99",), "expected rows to train on beside 15 held out"),
        ],
    ),
)
def test_options_that_are_refused(files, tmp_path, capsys, argv, message):
    run = functools.partial(lambda out: play(out, files, *argv))
    assert message in refused(capsys, tmp_path, run)


TURN = "\n\nHuman: hi\n\nAssistant:"


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            PAIRS[0] | {"chosen": " "},
            "bad.jsonl:2: expected a response in 'chosen', got",
        ),
        (PAIRS[0] | {"rejected": PAIRS[0]["chosen"]}, "bad.jsonl:2: expected two diff"),
        (
            {"chosen": f"{TURN} a", "rejected": "\n\nHuman: ho\n\nAssistant: b"},
            "bad.jsonl:2: expected a field 'prompt', or dialogues that share a beginn",
        ),
        (
            {"chosen": f"{TURN} a{TURN} b", "rejected": f"{TURN} c"},
            "bad.jsonl:2: expected dialogues that differ in the last response alone",
        ),
        (PAIRS[0] | {"prompt": ""}, "bad.jsonl:2: expected a prompt in 'prompt'"),
        (
            PAIRS[0] | {"rejected": PAIRS[0]["chosen"] + " "},
            "bad.jsonl:2: expected responses that differ in a token",
        ),
        (
            PAIRS[0] | {"chosen": " ".join(["good"] * 20)},
            "bad.jsonl:2: expected at most 16 tokens, got 23 of 'the cat'; shorten",
        ),
    ],
)
def test_pairs_that_are_refused(files, tmp_path, capsys, row, message):
    bad = toy_files.jsonl(tmp_path / "bad.jsonl", PAIRS[1], row)
    argv = ("--data", bad, "--held-out=0")
    run = functools.partial(lambda out: play(out, files, *argv))
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.long
@pytest.mark.slow
def test_a_reference_of_another_shape(files, tmp_path):
    model = toy_files.config.gpt2(
        vocab_size=24, hidden_size=8, num_layers=1, num_heads=2, max_positions=16
    )
    toy_files.checkpoint(tmp_path / "small", model=model)
    argv = ("--num-steps=1", "--reference", tmp_path / "small")
    summary = play(tmp_path / "run", files, *argv)
    assert summary["held_out_before"]["dpo/margin"] != 0
    start = fingerprint.fingerprint(hf.load(tmp_path / "small")[1])
    assert summary["reference_fingerprint"] == start.root
