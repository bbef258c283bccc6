"""`--profile` of the trainers: the table counts the tokens of their steps."""

import json

import pytest
import toy_files

from rlhf_jax.runs import metrics
from rlhf_jax.train.methods import grpo, ppo
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
PAIR = {"prompt": "the cat", "chosen": "sat very good .", "rejected": "ran bad ."}
ANSWER = {"prompt": "the cat", "response": "sat on a dog ."}
COMMON = ("--batch-size=4", "--num-steps=3", "--profile=1:3", "--no-progress")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.reward_model(folder / "scorer")
    toy_files.jsonl(folder / "answers.jsonl", *[ANSWER] * 12)
    toy_files.jsonl(folder / "pairs.jsonl", *[PAIR, PAIR | {"prompt": "a dog"}] * 6)
    toy_files.jsonl(folder / "prompts.jsonl", {"prompt": "the cat"})
    questions = [{"question": "the cat", "answer": "#### 1"}] * 8
    toy_files.jsonl(folder / "questions.jsonl", *questions)
    return folder


def profile(experiment, files, out, *argv):
    words = ["--out", str(out), "--model", str(files / "model"), *map(str, argv)]
    experiment.command([*words, *COMMON])
    return json.loads((out / "summary.json").read_text())["profile"]


def rows(out):
    return metrics.read(out / "metrics.jsonl")


def test_sft(files, tmp_path):
    profiled = profile(
        sft, files, tmp_path / "run", "--data", files / "answers.jsonl", "--held-out=0"
    )
    # 2 tokens of the prompt, 5 of the response and EOS, in each of 4 rows.
    seconds = profiled["seconds_per_step"]
    assert profiled["tokens_per_second"] == pytest.approx(4 * 8 / seconds)
    assert {"loss", "optimizer"} <= profiled["seconds"].keys()
    assert profiled["reference_share"] is None
    assert profiled["model_flops_per_step"] > 0


def test_a_reward_model_and_dpo_read_both_texts_of_a_pair(files, tmp_path):
    data = ("--data", files / "pairs.jsonl", "--held-out=0.2")
    for experiment, name in ((reward_model, "reward"), (dpo, "dpo")):
        sampled = ("--normalise=samples,num_samples=4,max_new_tokens=4",)
        more = sampled if name == "reward" else ()
        profiled = profile(experiment, files, tmp_path / name, *data, *more)
        assert profiled["source"] == "trace"
        assert (profiled["reference_share"] is None) == (name == "reward")
        # 2 + 5 and 2 + 4 tokens with EOS, of each of 4 pairs; a row of DPO holds one.
        tokens = profiled["tokens_per_second"] * profiled["seconds_per_step"]
        assert tokens == pytest.approx(4 * (7 + 6))


def test_ppo_has_every_scope_and_counts_its_responses(files, tmp_path):
    out = tmp_path / "run"
    argv = (
        *("--prompts", files / "prompts.jsonl", "--reward-model", files / "scorer"),
        *("--max-new-tokens=4", "--num-minibatches=1"),
    )
    profiled = profile(ppo, files, out, *argv)
    scopes = ("rollout", "reference", "reward", "values", "loss", "optimizer")
    assert list(profiled["seconds"])[:6] == list(scopes)
    assert all(profiled["seconds"][scope] > 0 for scope in scopes)
    read = [4 * (2 + row["response/length"]) for row in rows(out)[1:]]
    tokens = profiled["tokens_per_second"] * profiled["seconds_per_step"]
    assert tokens == pytest.approx(sum(read) / 2)
    assert 0 < profiled["reference_share"] < 1
    # Without a profile the rows are the same to the bit.
    plain = tmp_path / "plain"
    words = ["--out", str(plain), "--model", str(files / "model"), *map(str, argv)]
    rest = [option for option in COMMON if not option.startswith("--profile")]
    ppo.command([*words, *rest])
    assert (plain / "metrics.jsonl").read_bytes() == (
        out / "metrics.jsonl"
    ).read_bytes()
    assert "profile" not in json.loads((plain / "summary.json").read_text())


def test_grpo_counts_its_verifier_s_wait(files, tmp_path):
    out = tmp_path / "run"
    argv = (
        *("--prompts", files / "questions.jsonl", "--prompt-field=question"),
        *("--held-out", files / "questions.jsonl", "--verifier=gsm8k"),
        *("--group-size=2", "--max-new-tokens=4", "--num-workers=1"),
    )
    profiled = profile(grpo, files, out, *argv)
    assert {"rollout", "reference", "loss"} <= profiled["seconds"].keys()
    assert "values" not in profiled["seconds"]
    assert profiled["seconds"]["waiting for the reward"] > 0


def test_steps_beyond_the_run_stop_it_before_a_file_is_read(tmp_path, capsys):
    words = ["--out", str(tmp_path / "run"), "--model=/nowhere", "--prompts=/nowhere"]
    words += ["--reward=no:such", "--num-steps=3", "--profile=2:5"]
    with pytest.raises(SystemExit) as stopped:
        ppo.command(words)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "error: --profile 2:5: expected steps 0 to 2, which the run has"
    )
