"""--routing-replay with every sampler: the record reaches the updates from each."""

import dataclasses

import jax
import numpy as np
import pytest
import toy_episodes
import toy_files
import toy_server

from rlhf_jax import hf
from rlhf_jax.runs import metrics
from rlhf_jax.train.methods.grpo import command

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
WORDS = ["go", "left", "right", "key", "door", "hall"]
MODEL = dataclasses.replace(toy_files.MIXTURE, vocab_size=len(WORDS) + 2)
R3, R2 = "--routing-replay=sampler", "--routing-replay=old"
REWARD = "--rewards=short=length,weight=-1"
HALL = (
    "--environment=halls:LongHall,max_turn_tokens=4,max_turns=3,observation_chunk=3",
    *("--max-new-tokens=14", "--continuous-batching=4", "--num-workers=2"),
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    toy_files.checkpoint(tmp_path / "model", model=MODEL, words=WORDS)
    rows = [{"start": word, "prompt": word} for word in ("left", "right", "go", "hall")]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    return tmp_path


def train(files, out, *options):
    command(
        [
            *(f"--model={files}/model", f"--prompts={files}/rows.jsonl"),
            *("--batch-size=8", "--group-size=4", "--max-new-tokens=6"),
            *("--num-steps=2", "--num-epochs=3", "--num-minibatches=2"),
            *("--learning-rate=3e-2", "--kl-coef=0.01", "--sample-every=1"),
            *("--no-progress", f"--out={files / out}", *options),
        ]
    )
    return files / out


def distance(run, other):
    """The largest distance of a weight of two runs."""
    one, two = (hf.load(path / "model")[1] for path in (run, other))
    distances = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, two)
    return max(jax.tree.leaves(distances))


def test_outside_and_with_continuous_batching_it_is_that_of_a_plain_batch(files):
    here = train(files, "here", REWARD, R3)
    process = train(files, "process", REWARD, R3, "--sampler=process")
    assert distance(process, here) == 0
    assert len(metrics.read(here / "metrics.jsonl")) == 2
    few = train(files, "few", REWARD, R3, "--continuous-batching=4")
    toy_episodes.assert_same_run(few, here)
    assert distance(few, here) < 1e-4
    # In float32 sampler and trainer choose alike; without replay updates choose anew.
    old = train(files, "old", REWARD, R2, "--sampler=process")
    assert distance(old, here) < 1e-4
    assert distance(train(files, "free", REWARD), here) > 1e-2


def test_episodes_of_several_turns_replay_it(files):
    played = train(files, "played", *HALL, R3)
    assert distance(train(files, "old", *HALL, R2), played) < 1e-4
    rows = metrics.read(played / "metrics.jsonl")
    assert max(row["response/observed"] for row in rows) > 0
    assert distance(train(files, "free", *HALL), played) > 1e-2


def test_behind_a_server_it_is_recorded_by_either(files):
    toy = toy_server.Toy()
    toy.context, toy.records = 32, True
    toy.model, toy.params = MODEL, toy_files.params(MODEL)
    # Of one to three tokens, as the reward is the length.
    toy.drawn = lambda body: [5, 6, 1][-1 - body["seed"] % 3 :]
    runs = []
    with toy_server.serving(toy) as url:
        for out, more in {"old": (R2,), "free": (), "sampler": (R3,)}.items():
            options = (f"--sampler={url}", "--max-new-tokens=3", REWARD, *more)
            runs.append(train(files, out, *options))
    old, free, sampler = runs
    for run in runs:
        rows = metrics.read(run / "metrics.jsonl")
        assert all(row["policy/sampler_check"] < 1e-5 for row in rows)
    assert distance(old, free) > 1e-2
    # In float32 server and trainer choose alike.
    assert distance(sampler, old) < 1e-4


@pytest.mark.parametrize("source", [R3, R2], ids=["sampler", "old"])
def test_the_reference_replays_in_its_own_program(files, source):
    """With the KL in the loss, its log-probs come from that program alone."""
    strong = (REWARD, "--kl-coef=1")
    alone = train(files, "alone", *strong, source)
    both = train(files, "both", *strong, f"{source},reference=true")
    # Policy and reference are equal in the first step, and apart in the second.
    kl = [
        metrics.read(run / "metrics.jsonl")[1]["objective/kl"] for run in (alone, both)
    ]
    assert abs(kl[0] - kl[1]) > 1e-5  # 0 where the option does not act
    assert distance(both, alone) > 1e-5
