"""Prompts of two tasks with a verifiable answer, for SmolLM2-135M-Instruct.

    python experiments pretrained.smollm2 --out runs/smollm2
    python experiments studies.smollm2.preparation --out runs/verified

`sums` has pairs of numbers from 1 to 29; a pair is held out in both orders.
`gsm8k_easy` has the questions of GSM8K with one step, by the <<...>> of the worked
answer: 404 of the training set and 64 of the test set, which is held out. Questions
with long prompts are dropped. GSM8K (MIT, github.com/openai/grade-school-math) is read
from --questions and is not part of this repository.

Prompts are messages with one solved example in the required form. The program writes
OUT/TASK/train.jsonl and OUT/TASK/held_out.jsonl within seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tyro

from rlhf_jax.data import json_lines
from rlhf_jax.data.tokenization import load_tokenizer
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.verifiers import number
from studies.smollm2.rewards import NUMBER

Row = dict[str, Any]
LARGEST = 29  # numbers are 1 to LARGEST; 0 + b would contain its answer
MARKED = rf".*#### ({NUMBER})"  # the form of a response to GSM8K
SUM_SYSTEM = "Write the sum and nothing else."
SUM_EXAMPLE = ("12 + 19 =", "12 + 19 = 31")
GSM8K_SYSTEM = "Solve the problem in one step. End with #### and the number."
GSM8K_EXAMPLE = (
    "Tom has 3 bags with 4 apples in each. How many apples has Tom?",
    "3 * 4 = 12\n#### 12",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    """Folder of the prompts; existing files are overwritten."""
    model: str = "runs/smollm2"
    """Checkpoint whose tokenizer counts the tokens of prompts."""
    questions: Path = Path("../shared/data/gsm8k")
    """Folder of GSM8K's train.jsonl and test.jsonl."""
    held_out_sums: int = 64
    """Pairs of `sums` that are held out."""
    max_prompt: int = 130
    """Longest prompt of `gsm8k_easy`, tokens, chat template included."""
    seed: int = 0
    """Seed of the order of the pairs."""
    smallest: bool = False
    """Write only `sums`, with 8 held-out pairs, for smallest.toml."""


def messages(system: str, example: tuple[str, str], question: str) -> list[Row]:
    """A conversation up to the question."""
    asked, solved = example
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": solved},
        {"role": "user", "content": question},
    ]


def sums(*, num_held_out: int, seed: int) -> dict[str, list[Row]]:
    """Every pair except the example's, in one order each, as train and held_out."""
    pairs = [
        pair
        for pair in itertools.combinations_with_replacement(range(1, LARGEST + 1), 2)
        if pair != (12, 19)
    ]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    rows = []
    for pair in pairs:
        a, b = rng.sample(pair, 2)
        rows.append(
            {
                "prompt": messages(SUM_SYSTEM, SUM_EXAMPLE, f"{a} + {b} ="),
                "answer": str(a + b),
                "form": rf"{a} \+ {b} = ({NUMBER})",
            }
        )
    return {"held_out": rows[:num_held_out], "train": rows[num_held_out:]}


def one_step(rows: Iterable[Row]) -> list[Row]:
    """The rows of GSM8K whose worked answer has one calculation, as prompts."""
    kept = []
    for row in rows:
        answer = row["answer"].rpartition("####")[2].strip()
        value = number(answer)
        if row["answer"].count("<<") == 1 and value is not None and value >= 0:
            prompt = messages(GSM8K_SYSTEM, GSM8K_EXAMPLE, row["question"])
            kept.append({"prompt": prompt, "answer": answer, "form": MARKED})
    return kept


def short(rows: Iterable[Row], *, model: str, longest: int) -> list[Row]:
    """The rows whose prompts have at most `longest` tokens."""
    tokenizer = load_tokenizer(model)

    def num_tokens(row: Row) -> int:
        text = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)  # as it is not tokenized
        return len(tokenizer.encode(text, add_special_tokens=False))

    return [row for row in rows if num_tokens(row) <= longest]


def write(folder: Path, sides: dict[str, list[Row]]) -> None:
    """Writes FOLDER/train.jsonl and FOLDER/held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, rows in sides.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{side}.jsonl").write_text(lines, encoding="utf-8")
    counts = ", ".join(f"{len(rows)} {side}" for side, rows in sides.items())
    print(f"{folder}: {counts}")


def main(options: Options) -> None:
    """Writes the prompts of both tasks."""
    num_held_out = 8 if options.smallest else options.held_out_sums
    write(
        options.out / "sums",
        sums(num_held_out=num_held_out, seed=options.seed),
    )
    if options.smallest:
        return
    sides = {}
    for side, name in {"train": "train", "held_out": "test"}.items():
        file = options.questions / f"{name}.jsonl"
        if not file.exists():
            raise InputError(
                f"--questions: expected a folder with {file.name}, got "
                f"{options.questions}; give the folder of GSM8K, or --smallest for "
                f"sums alone"
            )
        easy = one_step(json_lines.read_jsonl(file))
        sides[side] = short(easy, model=options.model, longest=options.max_prompt)
        print(f"{file}: {len(easy)} questions of one step")
    write(options.out / "gsm8k_easy", sides)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
