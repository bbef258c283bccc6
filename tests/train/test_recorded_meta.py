"""The record of a run in its snapshots, which prevents resuming a different run."""

import dataclasses
import shutil

import pytest
import toy_files

from rlhf_jax import hf
from rlhf_jax.runs import run
from rlhf_jax.train import evaluate
from rlhf_jax.train.methods import distill, grpo, ppo
from rlhf_jax.train.reading import prompts_given
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = pytest.mark.usefixtures("quick_compilation")
slow = pytest.mark.slow
TOKENS = toy_files.MODEL.vocab_size
SMALL = ("--max-new-tokens=4", "--batch-size=4")
COMMANDS = {
    "sft": (sft, "--data=rows.jsonl", "--batch-size=2"),
    "dpo": (dpo, "--data=rows.jsonl", "--batch-size=2"),
    "reward_model": (
        *(reward_model, "--data=rows.jsonl", "--batch-size=4"),
        "--normalise=samples,max_new_tokens=4",
    ),
    "ppo": (ppo, "--prompts=rows.jsonl", "--reward=lengths_of:score", *SMALL),
    "distill": (distill, "--prompts=rows.jsonl", "--reference=model", *SMALL),
    "evaluate": (evaluate, "--prompts=rows.jsonl", "--max-new-tokens=4"),
    "grpo": (
        *(grpo, "--prompts=rows.jsonl", "--held-out=rows.jsonl", "--num-workers=1"),
        *("--prompt-field=prompt", "--verifier=exact", "--group-size=2", *SMALL),
    ),
}


class Began(Exception):
    """Raised where a stage would begin."""


@pytest.mark.slow
@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    "name",
    [
        command if command in ("sft", "dpo") else pytest.param(command, marks=slow)
        for command in COMMANDS
    ],
)
def test_every_command_records_them(name, tmp_path, monkeypatch):
    model = dataclasses.replace(toy_files.MODEL, vocab_size=TOKENS + 16)
    params = toy_files.params(model)
    hf.save(tmp_path / "model", model, params, tokenizer=toy_files.tokenizer())
    rows = [
        {"prompt": word, "response": ".", "chosen": ".", "rejected": "?", "answer": "."}
        for word in toy_files.WORDS[:8]
    ]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "lengths_of.py").write_text(
        "def score(prompts, responses, rows):\n    return [1.0] * len(prompts)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def began(self, name, state, *, meta, **others):
        raise Began(meta)

    monkeypatch.setattr(run.Run, "stage", began)
    command, *argv = COMMANDS[name]

    def meta(out):
        with pytest.raises(Began) as raised:
            command.command([*argv, "--model=model", f"--out={out}", "--no-progress"])
        return raised.value.args[0]

    first = meta("run")
    assert first["unused_ids"] == [[TOKENS, TOKENS + 16]]
    if command not in (sft, dpo, reward_model):
        return  # a policy gradient and an evaluation have frozen copies of the weights
    shutil.rmtree("model")
    params = toy_files.params(model, seed=1)
    hf.save(tmp_path / "model", model, params, tokenizer=toy_files.tokenizer())
    differing = {key for key, value in meta("again").items() if value != first[key]}
    assert differing == {"start_weights", *({"reference"} & first.keys())}


def test_messages_that_are_scored_are_recorded():
    assert prompts_given(["a", [{"role": "user", "content": "b"}]]) == {
        "prompts_given": "messages"
    }
    assert prompts_given(["a", "b"]) == {}
