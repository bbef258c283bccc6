"""Every command refuses wrong input before it reads a weight."""

import json
import os
import re
import shutil
import signal
import time

import pytest
import toy_files
from places import FIXTURES

from rlhf_jax.checkpoints.hf import reading
from rlhf_jax.train import main

ASKED = "--prompts prompts.jsonl --num-steps 1 --batch-size 4 --max-new-tokens 4"
BEGUN = {  # by command: a run that is in order
    "ppo": f"ppo {ASKED} --num-minibatches 1 --reward toy_pairs:score",
    "grpo": f"grpo {ASKED} --group-size 2 --reward toy_pairs:score",
    "reinforce": f"reinforce {ASKED} --reward toy_pairs:score",
    "online-dpo": f"online-dpo {ASKED} --group-size 2 --reward toy_pairs:score",
    "nash-md": f"nash-md {ASKED} --reward toy_pairs:score",
    "distill": f"distill {ASKED} --reference teacher",
    "evaluate": "evaluate --prompts prompts.jsonl --max-new-tokens 4 --batch-size 4",
    "sft": "sft --data demonstrations.jsonl --batch-size 4",
    "reward-model": "reward-model --data pairs.jsonl --batch-size 4 --normalise None",
    "dpo": "dpo --data pairs.jsonl --batch-size 4",
}
RL = ("ppo", "grpo", "reinforce", "online-dpo", "nash-md", "distill")
SUPERVISED = ("sft", "reward-model", "dpo")
PLAYING = ("ppo", "grpo", "reinforce", "online-dpo", "distill", "evaluate")
OWN = ("ppo", "grpo", "reinforce", "online-dpo", "nash-md", "evaluate")  # a reward
EVERY = (*RL, "evaluate", *SUPERVISED)
ARGUMENTS = r"expected a function of \({}\), got \(.*give it these arguments"
OF_TEXTS = ARGUMENTS.format("prompts, responses, rows")
OF_ONE = ARGUMENTS.format("prompt, response, row")
PAIRS = ARGUMENTS.format("prompts, responses, others, rows")
# (commands, options that are wrong, message); DATA is the option of the data.
MISTAKES = {
    "no data": (
        EVERY,
        "DATA none.jsonl",
        "--(prompts|data): .*none.jsonl: expected a readable",
    ),
    "a row cut": (EVERY, "DATA cut.jsonl", "cut.jsonl:2: expected one JSON object"),
    "no field": (EVERY, "DATA other.jsonl", "other.jsonl:1: expected"),
    "no chat template": (EVERY, "DATA chat.jsonl", "chat template"),
    "too long": (RL, "--max-new-tokens 16", "--max-new-tokens: expected a number"),
    "too long to learn": (SUPERVISED, "--max-length 17", "--max-length: expected"),
    "no room": ((*RL, "evaluate"), "--prompts long.jsonl", "long.jsonl:1: expected"),
    "more tokens than there are": (
        ("ppo", "grpo", "reinforce"),
        "--penalty.value-estimator exact --penalty.top-k 25",
        r"--penalty\.top-k: expected a number of at most 24, got 25",
    ),
    "more of a teacher": (
        ("distill",),
        "--divergence reverse --top-k 25",
        "--top-k: expected a number of at most 24, got 25",
    ),
    "no held-out": (
        RL,
        "--held-out none.jsonl",
        "--held-out: .*none.jsonl: expected a",
    ),
    "held-out cut": (RL, "--held-out cut.jsonl", "cut.jsonl:2: expected one JSON"),
    "held-out share": (SUPERVISED, "--held-out 0.99", "rows to train on|share"),
    "no PTX": (
        RL,
        "--ptx none.txt --ptx-coef 0.1",
        "--ptx: .*none.txt: expected a readable file, got No such file or directory",
    ),
    "PTX cut": (
        RL,
        "--ptx cut.jsonl --ptx-coef 0.1",
        "cut.jsonl:2: expected one JSON object",
    ),
    "no texts": (
        (*RL, "sft", "dpo"),
        "--texts a=none.txt",
        "--texts a: .*none.txt: exp",
    ),
    "texts cut": (("evaluate",), "--texts cut.jsonl", "cut.jsonl:2: expected one"),
    "no answers": (OWN, "VERIFIER gsm8k", "expected #### and a number|'answer'"),
    "no module": (OWN, "REWARD no_such:f", "expected a module no_such"),
    "no field of a teacher": (
        ("distill",),
        "--teacher-field shown",
        "prompts.jsonl:1: expected a field 'shown', got 'prompt'; add it",
    ),
    "a reward of two": (OWN, "REWARD toy_mistakes:two", OF_TEXTS),
    "a reward of one": (OWN, "REWARD json:dumps", OF_TEXTS),
    "a reward by keyword": (OWN, "REWARD toy_mistakes:by_keyword", OF_TEXTS),
    "a verifier of four": (OWN, "VERIFIER toy_mistakes:four", OF_ONE),
    "a verifier of two": (OWN, "VERIFIER toy_mistakes:two", OF_ONE),
    "a judge of two": (RL, "--judge toy_mistakes:two", OF_TEXTS),
    "a judge of pairs": (
        ("evaluate",),
        "--judge toy_pairs:judge --reference teacher",
        PAIRS,
    ),
    "an environment without rows": (
        PLAYING,
        "--environment toy_mistakes:Rowless",
        "reset: " + ARGUMENTS.format("row"),
    ),
    "an environment without state": (
        PLAYING,
        "--environment toy_mistakes:Stateless",
        "step: " + ARGUMENTS.format("state, response"),
    ),
    "no folder for weights": (
        ("ppo", "grpo", "reinforce", "online-dpo", "distill"),
        "--sampler process,weights=none",
        "--sampler: expected an existing folder weights= .*, got none: No such file",
    ),
    "no task": (
        PLAYING,
        "--environment programming --num-workers 1",
        "prompts.jsonl:1: expected",
    ),
}
CASES = [
    pytest.param(command, wrong, message, id=f"{command}: {name}")
    for name, (commands, wrong, message) in MISTAKES.items()
    for command in commands
]


class Weights(Exception):
    """Raised if a weight is read."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    toy_files.checkpoint(folder / "model")
    toy_files.checkpoint(folder / "teacher", seed=1)
    pair = {"prompt": "the cat", "chosen": "sat .", "rejected": "ran ."}
    other = pair | {"prompt": "the dog"}
    said = [{"role": "user", "content": "the cat"}]
    answer = {"response": "sat ."}
    rows = {
        "prompts": [{"prompt": "the cat"}, {"prompt": "a dog"}],
        "demonstrations": [{"prompt": "the cat"} | answer] * 4,
        "pairs": [pair, other] * 4,
        "other": [{"x": 1}],
        "chat": [pair | answer | {"prompt": said}, other | answer | {"prompt": said}],
        "long": [{"prompt": "the " * 40}],
    }
    for name, of_name in rows.items():
        toy_files.jsonl(folder / f"{name}.jsonl", *of_name)
    toy_files.tokenizer().save_pretrained(folder / "gpt_oss")
    shutil.copy(FIXTURES / "gpt_oss/config.json", folder / "gpt_oss")
    whole = json.dumps(pair | answer)
    (folder / "cut.jsonl").write_text(f"{whole}\n{whole[:20]}\n")
    return folder


def words_of(command, wrong):
    """A command line with a mistake; a wrong reward replaces the right one."""
    right = f"{BEGUN[command]} --model model --out out --no-progress"
    data = "--data" if command in SUPERVISED else "--prompts"
    if wrong.startswith(("REWARD", "VERIFIER", "--environment")):
        right = right.replace(" --reward toy_pairs:score", "")
    wrong = wrong.replace("DATA", data).replace("REWARD", "--reward")
    return [*right.split(), *wrong.replace("VERIFIER", "--verifier").split()]


@pytest.fixture
def no_weights(files, monkeypatch):
    def read(*args, **options):
        raise Weights

    monkeypatch.setattr(reading, "_read", read)
    monkeypatch.chdir(files)


@pytest.mark.cases(quick=10)
@pytest.mark.parametrize(("command", "wrong", "message"), CASES)
def test_a_mistake_is_told_before_weights(
    no_weights, files, capsys, command, wrong, message
):
    with pytest.raises(SystemExit) as exit_:
        main.main(words_of(command, wrong))
    errors = capsys.readouterr().err
    assert exit_.value.code == 2, errors
    assert "error: " in errors
    assert re.search(message, errors), errors
    assert not (files / "out").exists()


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("command", ["grpo", "sft"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--model gpt_oss --lora 2", r"--lora: .* experts/down, .*=attention/\*"),
        (
            "--placement.policy expert=8 --batch-size 8",
            "y: expected a mixture of experts with expert=8, got a dense gpt2; share",
        ),
    ],
)
def test_a_mistake_about_experts(no_weights, files, capsys, command, wrong, message):
    test_a_mistake_is_told_before_weights(
        no_weights, files, capsys, command, wrong, message
    )


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("command", EVERY)
def test_a_run_in_order_reads_them(no_weights, files, command):
    with pytest.raises(Weights):
        main.main(words_of(command, ""))
    assert not (files / "out").exists()


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("command", EVERY)
def test_a_signal_while_weights_are_read(files, monkeypatch, capsys, command):
    signum = signal.SIGTERM

    def read(*args, **options):
        os.kill(os.getpid(), signum)
        time.sleep(10)

    monkeypatch.setattr(reading, "_read", read)
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit) as exit_:
        main.main(words_of(command, ""))
    assert exit_.value.code == 128 + signum
    expected = "stopped without saving; start again, as nothing was written yet\n"
    assert capsys.readouterr().err.endswith(expected)
    assert not (files / "out").exists()
    assert signal.getsignal(signum) is signal.SIG_DFL
