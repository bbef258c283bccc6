"""`rlhf-jax quickstart`: its files, its printed commands and their results."""

import json
import math
import random
import re
import shlex
import sys

import numpy as np
import pytest

from rlhf_jax import hf
from rlhf_jax.data import files, tokenization
from rlhf_jax.runs import command_line, folder
from rlhf_jax.train import main
from rlhf_jax.train.quickstart import command, language


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "a folder"
    command.prepare(out)
    return out


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_prompts_are_in_no_other_file(out):
    held_out = {row["prompt"] for row in rows(out / "held_out.jsonl")}
    assert len(held_out) == language.NUM_HELD_OUT
    for name in ("demonstrations", "pairs", "prompts"):
        assert not held_out & {row["prompt"] for row in rows(out / f"{name}.jsonl")}


def test_steps_are_checked_before_files_are_written(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main.main(["quickstart", "--out", str(tmp_path / "new"), "--num-steps", "0"])
    assert "--num-steps: expected a whole number, 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_pairs_are_what_bradley_and_terry_expect(out):
    """The share of pairs whose better side is chosen equals its mean probability."""
    worths = np.array(
        [
            (language.worth(row["chosen"]), language.worth(row["rejected"]))
            for row in rows(out / "pairs.jsonl")
        ]
    )
    told_apart = np.abs(worths[:, 0] - worths[:, 1])
    share = (worths[:, 0] > worths[:, 1])[told_apart > 0].mean()
    expected = np.mean([1 / (1 + math.exp(-d)) for d in told_apart if d > 0])
    assert share == pytest.approx(expected, abs=0.03)
    assert 0.75 < share < 0.95  # people are neither random nor of one mind


def test_worth_is_that_of_the_words():
    response = " The lid is sturdy. The price is awful. The box is lovely."
    assert language.worth(response) == 1 - 2 + 2
    assert language.worth(" The lovelyness is unsturdy.") == 0


def test_a_review_is_of_the_language():
    sentence = (
        rf" The (?:{'|'.join(language.PARTS)}) is (?:{'|'.join(language.WORTH)})\."
    )
    rng = random.Random(3)
    reviews = [language.review(rng) for _ in range(200)]
    assert all(re.fullmatch(f"(?:{sentence}){{1,3}}", review) for review in reviews)
    assert len(set(reviews)) > 100


def test_the_tokenizer_keeps_every_text_and_leaves_room(out):
    tokenizer = tokenization.load_tokenizer(out / "tokenizer")
    longest = 0
    for row in files.read_demonstrations(str(out / "demonstrations.jsonl")):
        texts = [row["prompt"] + row["response"], "Any other tèxt, too."]
        for text, ids in zip(texts, tokenizer(texts).input_ids, strict=True):
            assert tokenizer.decode(ids) == text
        longest = max(longest, len(tokenizer(texts[0]).input_ids))
    assert longest < 64  # --fresh-max-positions, with a stop token
    assert tokenizer.eos_token != tokenizer.pad_token


def test_the_same_files_every_time(out, tmp_path):
    command.prepare(tmp_path)
    for path in tmp_path.rglob("*.json*"):
        assert path.read_bytes() == (out / path.relative_to(tmp_path)).read_bytes()


def test_every_command_is_one(out):
    """Its options parse, and its inputs exist or are made by an earlier command."""
    made = {path.relative_to(out).as_posix() for path in out.iterdir()}
    for name, *options in command.commands(out):
        config_class = main.COMMANDS[name].load().Config
        config = command_line.parse(config_class, description=None, argv=options)
        assert config.out.parent == out
        for word in options:
            if word.startswith(str(out)) and word != str(config.out):
                assert word.removeprefix(f"{out}/") in made
        made.add(f"{config.out.name}/model")


def test_commands_are_printed_as_they_are_run(tmp_path, monkeypatch, capsys):
    """Commands run in order; a run that stops says how to resume."""
    ran = []

    class Ran:
        def __init__(self, name):
            self.name = name

        def load(self):
            return self

        def command(self, options):
            ran.append([self.name, *options])
            assert sys.argv[1:] == ran[-1]

    monkeypatch.setattr(main, "COMMANDS", {name: Ran(name) for name in main.TRAINERS})
    monkeypatch.setattr(sys, "argv", ["rlhf-jax", "quickstart"])
    out = tmp_path / "a folder"
    command.command(["--out", str(out)])
    printed = re.findall(r"^\$ rlhf-jax (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [shlex.split(line) for line in printed] == ran == command.commands(out)
    assert [name for name, *_ in ran] == ["sft", "reward-model", "ppo"]
    ran.clear()
    command.command(["--out", str(tmp_path / "short"), "--num-steps", "2"])
    steps = [words[words.index("--num-steps") + 1] for words in ran]
    assert steps == ["2", "2", "2"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: (out / "a").mkdir(parents=True), "got one with a; give another"),
        (lambda out: out.touch(), "that can be written, got File exists; give another"),
    ],
)
def test_a_folder_in_use_is_refused(tmp_path, capsys, make, message):
    make(tmp_path / "out")
    with pytest.raises(SystemExit) as exit_:
        main.main(["quickstart", "--out", str(tmp_path / "out")])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf-jax", "quickstart"])
    out = tmp_path / "quickstart"
    main.main(["quickstart", "--out", str(out)])
    sft, reward, ppo = (folder.read_summary(out / n) for n in ("sft", "reward", "ppo"))
    assert sft["held_out_loss"] < 0.8 < 3 < sft["held_out_loss_before"]
    assert reward["held_out_accuracy"] > 0.75
    assert ppo["held_out_score_after"] > ppo["held_out_score_before"] + 0.5
    assert ppo["reference_verified"]
    model, _ = hf.load(out / "ppo" / "model", dtype="float32")
    assert model.num_layers == 2
    responses = [
        (row["step"], row["response"]) for row in rows(out / "ppo" / "samples.jsonl")
    ]
    last = max(step for step, _ in responses)
    assert np.mean([language.worth(text) for at, text in responses if at == last]) > 1
    assert "The lines with $ are all that ran" in capsys.readouterr().out
