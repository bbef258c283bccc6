"""Measures how the time to read, encode and pair rows grows with their number.

    python experiments benchmarks.reading --out runs/reading

Rows of random words with 4 to 60 tokens are written to a file and processed as a
trainer does, up to its batches. Half of the labelled rows are responses to one prompt.
Packed rows contain about two texts, for which first fit has the most open rows.

Measured are the CPU seconds of this process for each stage and size, and the time per
row of the largest size over that of the previous size. The ratio of a stage with linear
time is near 1. Chat templates run in a separate process, so their stages have wall
seconds. Beside other work expect ratios of 0.5 to 2 for stages of at least a tenth of a
second.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
import tyro

from rlhf_jax.data import batches, digests, encoding, files, packing, splits, unpaired
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import report

WORDS = [f"w{number}" for number in range(1000)]
LONGEST = 1024  # tokens, more than any row has
WIDTH = 64  # of a packed row, tokens
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
Seconds = dict[str, float]  # by stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """Folder of the input files and of figures.json."""
    sizes: tuple[int, ...] = (2_000, 20_000, 200_000)
    """Numbers of rows of the files, ascending."""
    chat_sizes: tuple[int, ...] = (200, 2_000, 20_000)
    """Numbers of rows of the files of conversations, ascending."""
    seed: int = 0
    """Seed of the rows."""

    def __post_init__(self) -> None:
        for sizes in (self.sizes, self.chat_sizes):
            checks.positive(
                **{f"size_{place}": size for place, size in enumerate(sizes)}
            )
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise InputError(
                    f"expected at least 2 sizes, ascending, got {sizes}; the last two "
                    f"are compared"
                )


def words(*, template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words."""
    names = ["<pad>", "<eos>", "<user>", "<assistant>", *WORDS]
    model = tokenizers.models.WordLevel(
        {name: number for number, name in enumerate(names)}, unk_token="<pad>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )
    if template is not None:
        fast.chat_template = template
    return fast


def write(path: Path, *, rows: int, chat: bool, seed: int) -> None:
    """Writes rows with the fields of every layout; half of them share a prompt.

    Args:
      chat: whether prompts are messages.
    """
    rng = np.random.default_rng(seed)

    def text(longest: int) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(2, longest + 1))))

    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            prompt: Any = text(20)
            same: Any = "w0 w1" if number % 2 else prompt
            if chat:
                prompt = [{"role": "user", "content": prompt}]
                same = [{"role": "user", "content": same}]
            chosen, rejected = f" {text(30)} w1", f" {text(30)} w2"
            row = {"prompt": prompt, "response": chosen}
            row |= {"chosen": chosen, "rejected": rejected}
            row |= {"same": same, "label": number % 3 == 0}
            file.write(json.dumps(row) + "\n")


def measured(path: Path, *, chat: bool) -> tuple[Seconds, Seconds]:
    """CPU seconds of this process and wall seconds, for every stage."""
    tokenizer = words(template=TEMPLATE if chat else None)
    cpu: Seconds = {}
    wall: Seconds = {}

    def run(stage: str, work: Callable[[], Any]) -> Any:
        began = time.process_time(), time.perf_counter()
        result = work()
        cpu[stage] = time.process_time() - began[0]
        wall[stage] = time.perf_counter() - began[1]
        return result

    contract, limits = TextContract(tokenizer), Limits(LONGEST)
    shuffled: Any = {"batch_size": 16, "seed": 0, "pad_id": 0}
    rows = run("read prompts", lambda: files.read_prompts(path))
    _, prompts = run(
        "encode prompts", lambda: encoding.encode_prompts(contract, rows, limits=limits)
    )
    run("batches of prompts", lambda: batches.prompt_batches(prompts, **shuffled)[0])
    rows = run("read demonstrations", lambda: files.read_demonstrations(path))
    examples = run(
        "encode demonstrations",
        lambda: encoding.encode_demonstrations(contract, rows, limits=limits),
    )
    run("digest", lambda: digests.of_tokens(examples))
    run("hold out", lambda: splits.hold_out(examples, share=0.05, seed=0))
    run(
        "batches of demonstrations",
        lambda: batches.sequence_batches(examples, **shuffled)[0],
    )
    run("pack", lambda: packing.pack_examples(examples, width=WIDTH))
    rows = run("read preferences", lambda: files.read_preferences(path))
    pairs = run(
        "encode preferences",
        lambda: encoding.encode_preferences(contract, rows, limits=limits),
    )
    run("pack preferences", lambda: packing.pack(pairs, width=4 * WIDTH))
    labelled = [
        {"prompt": row["same"], "completion": row["chosen"], "label": row["label"]}
        for row in rows
    ]
    texts = run(
        "encode and pair labelled",
        lambda: unpaired.encode_labelled(contract, labelled, limits=limits, seed=0),
    )
    run("group labelled by prompt", lambda: splits.by_prompt(texts))
    return cpu, wall


def figures(options: Config) -> list[dict[str, Any]]:
    """Seconds by stage, for plain texts and conversations."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for chat, sizes in ((False, options.sizes), (True, options.chat_sizes)):
        every: list[Seconds] = []
        for size in sizes:
            path = options.out / f"{'chat' if chat else 'plain'}_{size}.jsonl"
            write(path, rows=size, chat=chat, seed=options.seed)
            cpu, wall = measured(path, chat=chat)
            # Another process applies the chat template.
            every.append(wall if chat else cpu)
            path.unlink()
        for stage in every[-1]:
            if chat and not stage.startswith("encode"):
                continue
            seconds = [of_size[stage] for of_size in every]
            ratio = seconds[-1] / sizes[-1] * sizes[-2] / max(seconds[-2], 1e-9)
            rows.append(
                {
                    "stage": f"{stage}, chat" if chat else stage,
                    "sizes": [*sizes],
                    "seconds": seconds,
                    "ratio_per_row": ratio,
                }
            )
    return rows


def main(options: Config) -> None:
    """Prints the table and writes OUT/figures.json."""
    rows = figures(options)
    report.table(
        "Seconds, and time per row of the largest size over that of the one before",
        ("stage", "rows", "seconds", "ratio"),
        [
            (
                row["stage"],
                " ".join(f"{size}" for size in row["sizes"]),
                " ".join(f"{seconds:.3g}" for seconds in row["seconds"]),
                row["ratio_per_row"],
            )
            for row in rows
        ],
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak:.0f} MiB at most")
    path = options.out / "figures.json"
    path.write_text(json.dumps({"rows": rows, "peak_mib": peak}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
