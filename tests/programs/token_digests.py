"""Digests of the tokens of recorded experiments and of real inputs.

    PYTHONPATH=tests:experiments python tests/programs/token_digests.py [FOLDER]

prints a JSON object {record: SHA-256 of its token lists}. Without FOLDER it has what
`experiments/recorded` was made of: every record whose text went through a tokenizer.
With the folder of real inputs it also has GPT-2's tokens of each kind of file, and the
blocks of bytes of the record that reads a text without a tokenizer.

`tests/fixtures/token_digests.json` was written on commit 9f03a06. A digest that differs
means that the same rows are now trained on as other tokens, so that the recorded runs
would not repeat.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from studies import outside_sampler
from studies.storage import models
from studies.storage.options import Preparation
from studies.turns.preparation import characters

from rlhf_jax.data import encoding, files, json_lines, tokenization, turns, unpaired
from rlhf_jax.data.examples import Pair, Text
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.environments import calculator, guessing
from rlhf_jax.environments.demonstrations import demonstrations

LONGEST = 4096  # tokens, so that nothing is left out
CONTEXT = 1024  # of GPT-2


def of(lists: Iterable[Any]) -> str:
    """SHA-256 of lists of numbers."""
    text = json.dumps([*lists], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def texts(examples: Sequence[Text]) -> str:
    """The digest of demonstrations and of their trained tokens."""
    return of(
        [[*example.prompt], [*example.response], [*map(int, example.trained)]]
        for example in examples
    )


def pairs(encoded: Sequence[Pair]) -> str:
    return of([[*pair.prompt], [*pair.chosen], [*pair.rejected]] for pair in encoded)


def of_episodes(name: str, rows: Sequence[Any], shown: Sequence[Any]) -> dict[str, str]:
    """Digests of a sweep of `turns`: demonstrations, prompts and observations.

    Args:
      rows: to train on and held out, the prompt included.
      shown: demonstrations.
    """
    tokenizer = characters()
    stops = (tokenization.eos_token_id(tokenizer),)
    encoder = turns.TurnEncoder(tokenizer, stop_ids=stops, chat=False)
    episodes = encoding.encode_episodes(
        TextContract(tokenizer, stop_ids=stops), shown, limits=Limits(LONGEST)
    )
    observed = [turn for episode in shown for turn in episode["turns"][1::2]]
    return {
        f"{name}/demonstrations": texts(episodes),
        f"{name}/prompts": of(encoder.prompt(row, where="a row") for row in rows),
        f"{name}/observations": of(map(encoder.observation, observed)),
    }


def recorded() -> dict[str, str]:
    """Digests of every record whose text went through a tokenizer."""
    digests = {}
    sums, numbers = calculator.rows(1200, seed=0), guessing.rows(700, seed=0)
    environments = {
        "calculator": (calculator.Calculator(), sums, calculator.expert, 400),
        "guessing": (guessing.Guessing(), numbers, guessing.Bisection(), 200),
    }
    for name, (environment, rows, expert, shown) in environments.items():
        digests |= of_episodes(
            f"turns/{name}",
            [environment.reset(row)[0] for row in rows],
            demonstrations(environment, rows[:shown], expert=expert),
        )
    rows = [
        {"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a, b in outside_sampler.SUMS
    ]
    examples = encoding.encode_demonstrations(
        TextContract(characters()), rows, limits=Limits(LONGEST)
    )
    _, prompts = encoding.encode_prompts(
        TextContract(characters()), rows, limits=Limits(LONGEST)
    )
    digests["outside_sampler/demonstrations"] = texts(examples)
    digests["outside_sampler/prompts"] = of(prompts)
    return digests


def real_inputs(folder: Path) -> dict[str, str]:
    """Digests of GPT-2's tokens of each kind of file, and of a text in bytes."""
    gpt2 = tokenization.load_tokenizer(folder / "gpt2-tokenizer")
    book = folder / "tinyshakespeare.txt"
    digests = {}
    blocks = encoding.encode_text(
        TextContract(gpt2), json_lines.read_text(book), block_size=128
    )
    digests["gpt2/tinyshakespeare/blocks"] = texts(blocks)
    for split in ("train", "test"):
        path = folder / "gsm8k" / f"{split}.jsonl"
        _, prompts = encoding.encode_prompts(
            TextContract(gpt2),
            files.read_prompts(path, field="question"),
            limits=Limits(LONGEST),
            field="question",
        )
        fields = {"prompt": "question", "response": "answer"}
        rows = files.read_demonstrations(path, **fields)
        shown = encoding.encode_demonstrations(
            TextContract(gpt2), rows, limits=Limits(LONGEST), **fields
        )
        digests[f"gpt2/gsm8k/{split}/prompts"] = of(prompts)
        digests[f"gpt2/gsm8k/{split}/demonstrations"] = texts(shown)
    harmless = folder / "hh-rlhf-harmless" / "pairs.jsonl"
    preferences = encoding.encode_preferences(
        TextContract(gpt2), files.read_preferences(harmless), limits=Limits(LONGEST)
    )
    labelled = unpaired.encode_labelled(
        TextContract(gpt2),
        unpaired.read_labelled(harmless),
        limits=Limits(CONTEXT, overlong="drop"),
        seed=0,
    )
    digests["gpt2/hh-rlhf-harmless/preferences"] = pairs(preferences)
    digests["gpt2/hh-rlhf-harmless/labelled"] = of(
        [[*text.prompt], [*text.completion], [*text.mismatched], int(text.desirable)]
        for text in labelled
    )
    with tempfile.TemporaryDirectory() as out:
        small = Preparation(
            text=str(book), hidden_size=4, num_layers=1, num_heads=1, out=Path(out)
        )
        _, _, in_bytes = models.blocks(small)
    digests["ablate_reference_storage/blocks"] = texts(in_bytes)
    return digests


def main(arguments: Sequence[str]) -> None:
    digests = recorded()
    if arguments:
        digests |= real_inputs(Path(arguments[0]))
    print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
