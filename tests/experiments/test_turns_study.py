"""The rows and models of the study of several turns, and that its sweeps read them."""

import json

import places
import pytest
from studies.turns import preparation

from rlhf_jax.data import tokenization
from rlhf_jax.sweeps import declaration, planned


def test_every_character_of_the_environments_is_a_token():
    tokenizer = preparation.characters()
    text = "calc: 12*(3+4)-5\n= 7. higher\nGuess"
    [ids] = tokenization.encode(tokenizer, [text], special=False)
    assert len(ids) == len(text)
    assert tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_the_sweeps_are_of_options_that_there_are(name, tmp_path):
    file = places.EXPERIMENTS / "studies" / "turns" / f"{name}.toml"
    runs = planned.runs_of(declaration.read(file), out=tmp_path)
    assert len(runs) == 6
    for run in runs:
        model = f"--model=runs/turns/sft/{name}/seed_{run.seed}/model"
        assert {model, f"--environment={name}"} < set(run.arguments())


@pytest.mark.slow
def test_the_preparation_at_toy_size(tmp_path):
    preparation.main(
        preparation.Options(
            out=tmp_path, seeds=(4,), calculator_steps=2, guessing_steps=2
        )
    )
    for name in ("calculator", "guessing"):
        data = tmp_path / "data" / name
        lines = (data / "demonstrations.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert all(len(row["turns"]) % 2 for row in rows)
        assert (tmp_path / "sft" / name / "seed_4" / "model" / "config.json").exists()
    calculated = (data.parent / "calculator" / "demonstrations.jsonl").read_text()
    assert '"answer: ' in calculated
