"""The README's example rows are trained on as drawn there."""

import json
import re
from pathlib import Path

import pytest
import tokenizer_zoo

import rlhf_jax.data
from rlhf_jax.data import encoding, files, tokenization, unpaired
from rlhf_jax.data.examples import Example
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract

README = Path(rlhf_jax.data.__file__).parent / "README.md"
BLOCKS = re.findall(r"```text drawn\n(.*?)\n((?:.*\n)+?)```", README.read_text())
TRAIT = tokenizer_zoo.zoo()["chat"]
EOS = "<|eos|>"


def drawn(example):
    runs, tokens = [], [*example.prompt, *example.response]
    for token, learned in zip(tokens, example.trained, strict=True):
        if not runs or runs[-1][0] != learned:
            runs.append((learned, []))
        runs[-1][1].append(token)
    texts = [(on, tokenization.decode(TRAIT.tokenizer, ids)) for on, ids in runs]
    return "".join(f"⟪{text}⟫" if on else text for on, text in texts).replace("\n", "⏎")


def learned_of(row, file):
    """The trained texts of a row, by the reader and encoder of its layout."""
    file.write_text(json.dumps(row) + "\n")
    tokenizer = TRAIT.tokenizer
    chat = isinstance(row.get("prompt", row.get("messages")), list)
    ends = TRAIT.stop_ids if chat else tokenizer.convert_tokens_to_ids([EOS])
    of, limits = TextContract(tokenizer, stop_ids=ends), Limits(999)
    if "turns" in row:
        rows = files.read_demonstrations(file, turns=True)
        return encoding.encode_episodes(of, rows, limits=limits)
    if "chosen" in row:
        rows = files.read_preferences(file)
        [pair] = encoding.encode_preferences(of, rows, limits=limits)
        return [Example(pair.prompt, side) for side in (pair.chosen, pair.rejected)]
    if "completion" in row:
        other = {"prompt": "?", "completion": "!", "label": False}
        file.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
        rows = unpaired.read_labelled(file)
        labelled = unpaired.encode_labelled(of, rows, seed=0, limits=limits)
        return [Example(labelled[0].prompt, labelled[0].completion)]
    if row.keys() & {"response", "messages"}:
        rows = files.read_demonstrations(file)
        return encoding.encode_demonstrations(of, rows, limits=limits)
    rows = files.read_prompts(file)
    return [Example(p, ()) for p in encoding.encode_prompts(of, rows, limits=limits)[1]]


def test_every_layout_is_drawn():
    fields = [set(json.loads(row)) for row, _ in BLOCKS]
    for layout in (
        *({"prompt", "response"}, {"messages"}, {"prompt", "turns"}, {"prompt"}),
        *({"prompt", "chosen", "rejected"}, {"prompt", "completion", "label"}),
    ):
        assert layout in fields


@pytest.mark.parametrize(("row", "expected"), BLOCKS, ids=range(len(BLOCKS)))
def test_a_row_is_learned_as_it_is_drawn(row, expected, tmp_path):
    examples = learned_of(json.loads(row), tmp_path / "rows.jsonl")
    assert [drawn(learned) for learned in examples] == expected.splitlines()
