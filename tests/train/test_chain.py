"""The three stages chained through folders on real text, also after kills."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import new_algorithm
import numpy as np
import orbax.checkpoint as ocp
import places
import pytest
import toy_files
from places import FIXTURES
from test_trainers import ANSWERS, PAIR, contents, play

from rlhf_jax import hf, policy, rewards
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches, encoding, files
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train.methods import ppo
from rlhf_jax.train.supervised import reward_model, sft

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]


ADAPTIVE = ("--kl-control=adaptive,target=1,unit=response",)


@pytest.fixture(scope="module")
def rewards_folder(tmp_path_factory):
    """The working directory, which contains a Python reward."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "lengths.py").write_text(
        "def shortness(prompts, responses, rows):\n"
        "    return [-len(response) / 10 for response in responses]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        yield folder


@pytest.fixture(scope="module")
def tuned(shared_data, tmp_path_factory):
    """A small GPT-2 with the real vocabulary, trained on some Shakespeare."""
    out = tmp_path_factory.mktemp("chain") / "sft"
    summary = play(
        *(sft, out, "--tokenizer", shared_data / "gpt2-tokenizer"),
        *("--data", shared_data / "tinyshakespeare.txt", "--num-steps=30"),
        *("--fresh-hidden-size=32", "--fresh-num-layers=2", "--fresh-num-heads=2"),
        *("--fresh-max-positions=64", "--batch-size=8", "--held-out=0.005"),
        *("--learning-rate=5e-3",),
    )
    return out, summary


@pytest.fixture(scope="module")
def scorer(tuned, shared_data, tmp_path_factory):
    """A reward model of human preferences, trained from it."""
    out = tmp_path_factory.mktemp("chain") / "reward"
    summary = play(
        *(reward_model, out, "--model", tuned[0] / "model", "--overlong=drop"),
        *("--data", shared_data / "hh-rlhf-harmless" / "pairs.jsonl"),
        *("--batch-size=8", "--learning-rate=3e-3"),
        "--normalise=samples,num_samples=128,max_new_tokens=8",
    )
    return out, summary


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("chain") / "prompts.txt"
    file.write_text("First Citizen:\nWhat say you to\nGood night, good\nO Romeo\n")
    return file


def test_sft_learns_shakespeare(tuned):
    _, summary = tuned
    assert summary["held_out_loss_before"] == pytest.approx(np.log(50257), abs=0.1)
    assert summary["held_out_loss"] < summary["held_out_loss_before"] - 2


def test_the_reward_is_standard_on_samples_of_the_reference(tuned, scorer, shared_data):
    """Checked on samples other than those of the normalisation."""
    start = pretrained.load(str(tuned[0] / "model"))
    model, params = hf.load_reward(scorer[0] / "model")
    scores = sampled_scores(start, model, params, shared_data)
    error = 1 / np.sqrt(len(scores))  # of the mean, on either side
    assert scores.mean() == pytest.approx(0, abs=6 * error)
    assert scores.std() == pytest.approx(1, abs=6 * error)
    assert scorer[1]["held_out_pairs"] > 10
    assert 0 <= scorer[1]["held_out_accuracy"] <= 1


def sampled_scores(start, model, params, shared_data):
    rows = files.read_preferences(shared_data / "hh-rlhf-harmless" / "pairs.jsonl")
    pairs = encoding.encode_preferences(
        TextContract(start.tokenizer), rows, limits=Limits(64, overlong="drop")
    )
    prompts = [pair.prompt for pair in pairs if len(pair.prompt) <= 56]
    batch = batches.prompt_batches(prompts, batch_size=128, seed=9, pad_id=0)[0]
    sample = jax.jit(
        functools.partial(
            rollout.rollout,
            model=start.model,
            max_new_tokens=8,
            stop_ids=start.stop_ids,
            temperature=0.7,
        )
    )
    answered = sample(start.params, prompts=batch, key=jax.random.key(77))
    score = jax.jit(rewards.sequence_scores, static_argnames=("model",))
    return np.asarray(
        score(params, model=model, tokens=answered.tokens, mask=answered.mask)
    )


@pytest.fixture(scope="module")
def finished(tuned, scorer, prompts, tmp_path_factory):
    """PPO from `tuned` against `scorer`."""
    out = tmp_path_factory.mktemp("chain") / "ppo"
    summary = play(
        *(ppo, out, "--model", tuned[0] / "model"),
        *("--prompts", prompts, "--reward-model", scorer[0] / "model"),
        *("--critic.start=reward_model", *ADAPTIVE, "--buckets", 4, 8),
        *("--max-new-tokens=6", "--batch-size=8", "--num-minibatches=2"),
        *("--micro-batch-size=2", "--num-steps=3", "--learning-rate=1e-3"),
        *("--scores.missing-stop-score=-1", "--scores.normalise", "--num-epochs=2"),
    )
    return out, summary


def test_ppo_with_a_reward_model(finished):
    out, summary = finished
    rows = metrics.read(out / "metrics.jsonl")
    # Adaptive: at first the KL is 0, below the target, so the coefficient falls.
    expected = 0.05 * (1 - 0.2 * 8 / 10_000)
    assert rows[1]["objective/kl_coef"] == pytest.approx(expected, rel=1e-5)
    assert rows[0]["policy/sampler_mismatch"] < 1e-4
    assert summary["kl_first"] == pytest.approx(0, abs=1e-4)
    saved_is_the_last_snapshot(out, step=3)


def test_ppo_with_a_python_reward(tuned, prompts, rewards_folder, tmp_path):
    out = tmp_path / "run"
    play(
        *(ppo, out, "--model", tuned[0] / "model"),
        *("--prompts", prompts, "--reward=lengths:shortness", "--num-steps=2"),
        *("--max-new-tokens=6", "--batch-size=8", "--num-minibatches=1"),
        *("--learning-rate=1e-3", "--sampler-correction=recompute", "--dtype=bfloat16"),
        *("--reference-storage.dtype=bfloat16", "--num-epochs=1"),
    )
    for row in metrics.read(out / "samples.jsonl"):
        expected = -len(row["response"]) / 10
        assert row["score"] == pytest.approx(expected, abs=1e-6)
    saved_is_the_last_snapshot(out, step=2)


@pytest.fixture(
    scope="module",
    params=["gpt2", "llama_sharded"],
)
def theirs(request, prompts, rewards_folder, tmp_path_factory):
    """PPO from a checkpoint that transformers wrote, with a separate tokenizer folder.

    Checkpoints are tied and untied, of one shard and several.
    """
    folder = tmp_path_factory.mktemp("theirs")
    toy_files.tokenizer().save_pretrained(folder / "tokenizer")
    reward = ("--reward=lengths:shortness",)
    if request.param == "gpt2":
        reward = ("--reward-model", FIXTURES / "gpt2_reward")
    play(
        *(ppo, folder / "run", "--model", FIXTURES / request.param),
        *("--tokenizer", folder / "tokenizer", "--prompts", prompts, *reward),
        *("--max-new-tokens=6", "--batch-size=4", "--num-minibatches=1"),
        *("--num-steps=2", "--learning-rate=1e-3", "--num-epochs=1"),
    )
    return folder / "run"


def test_ppo_from_a_checkpoint_of_transformers(theirs):
    assert hf.stop_ids(theirs / "model") == (1, 95)
    saved_is_the_last_snapshot(theirs, step=2)


def test_transformers_reads_what_became_of_its_checkpoint(theirs):
    agrees_with_transformers(theirs / "model")


def test_transformers_reads_the_end_of_the_chain(finished):
    agrees_with_transformers(finished[0] / "model")


def saved_is_the_last_snapshot(out, *, step):
    """Checks that OUT/model equals the last snapshot to the bit."""
    _, params = hf.load(out / "model")
    arrays = ocp.StandardCheckpointer().restore(
        (out / "snapshots" / "ppo" / str(step) / "arrays").absolute()
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(leaf, arrays[f"train/policy/{name}"])
    assert len(leaves) == sum(path.startswith("train/policy/") for path in arrays)


def agrees_with_transformers(folder):
    torch = pytest.importorskip("torch")
    import transformers

    model, params = hf.load(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 12))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    got = policy.logits(
        params,
        model=model,
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.ones(tokens.shape, bool),
    )
    np.testing.assert_allclose(got, expected, atol=1e-4)


# --- to the last bit ----------------------------------------------------------


@pytest.fixture(scope="module")
def killable(tmp_path_factory, rewards_folder):
    """Options of a tiny PPO run."""
    folder = tmp_path_factory.mktemp("killable")
    toy_files.checkpoint(folder / "model")
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is", "so")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    return [
        *("--model", str(folder / "model"), "--reward=lengths:shortness"),
        *("--prompts", str(folder / "prompts.jsonl"), "--batch-size=4"),
        *("--max-new-tokens=4", "--num-minibatches=2", "--num-steps=8"),
        *("--snapshot-every=2", "--sample-every=1", "--learning-rate=1e-2"),
        *("--scores.normalise", *ADAPTIVE),
    ]


@pytest.fixture(scope="module")
def whole(killable, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    play(ppo, out, *killable)
    return outcome(out)


def outcome(out):
    """The outputs that equal runs must share to the bit."""
    names = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")
    return {name: (out / name).read_bytes() for name in names}


def test_other_seeds_differ(killable, whole, tmp_path):
    play(ppo, tmp_path / "other", *killable, "--seed=1")
    other = outcome(tmp_path / "other")
    assert all(other[name] != whole[name] for name in whole)


def test_killed_at_a_random_step_it_goes_on_to_the_last_bit(
    killable, whole, rewards_folder, tmp_path
):
    """Uses SIGKILL; also repeats the same seed in another process."""
    out = tmp_path / "run"
    module = "rlhf_jax.train.main"
    command = [
        sys.executable,
        "-m",
        module,
        "ppo",
        "--out",
        str(out),
        "--resume",
        *killable,
    ]
    environment = os.environ | {"PYTHONPATH": places.PYTHONPATH}
    step = int(np.random.default_rng().integers(1, 7))
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None and number_of_rows(out) < step:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "model").exists()
    subprocess.run(command, env=environment, check=True)
    assert outcome(out) == whole, f"killed after {step} rows"


def number_of_rows(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


EXPERIMENT = types.SimpleNamespace(
    command=lambda words: command_line.main(
        new_algorithm.main, new_algorithm.Config, description=None, argv=words
    )
)


@pytest.mark.parametrize(
    "experiment",
    [sft, reward_model, EXPERIMENT],
    ids=["sft", "reward_model", "new_algorithm"],
)
def test_a_run_that_lost_its_end_makes_it_again(experiment, tmp_path):
    """Removes the newest snapshot and all later rows, as after a kill."""
    model = toy_files.checkpoint(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    toy_files.jsonl(data, *[PAIR | row for row in ANSWERS] * 4)
    argv = ["--num-steps=4", "--snapshot-every=2", "--batch-size=4"]
    if experiment is not EXPERIMENT:
        argv += ["--model", model, "--data", data]
    if experiment is reward_model:
        argv += ["--normalise=samples,num_samples=8,max_new_tokens=4"]
    out = tmp_path / "run"
    summary = play(experiment, out, *argv)
    before = contents(out)
    (stage,) = (out / "snapshots").iterdir()
    assert sorted(path.name for path in stage.iterdir()) == ["2", "4"]
    shutil.rmtree(stage / "4")
    shutil.rmtree(out / "model", ignore_errors=True)
    (out / "summary.json").unlink(missing_ok=True)
    again = play(experiment, out, *argv, "--resume")
    after = contents(out)
    for name, content in before.items():
        if not name.startswith("snapshots"):
            assert after[name] == content, name
    summary["seconds"] = again["seconds"] = None
    assert again == summary
