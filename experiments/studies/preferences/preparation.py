"""Prepares the study: pairs in three parts, a proxy reward model and a judge.

    python experiments pretrained.smollm2 --out runs/smollm2
    python experiments studies.preferences.preparation --out runs/preferences \
        --model runs/smollm2

The 1,800 pairs of hh-rlhf (harmless) are converted to messages and split into three
parts that share no prompt. `rlhf-jax reward-model` trains the proxy on the first part
and the judge on the second, with another seed. accuracy.json has the accuracies of both
on the third part and their agreement.

PPO and DPO start from --model without SFT: the model was trained to chat, while the
chosen responses of a few hundred short pairs would mostly teach it to be brief.

The same command continues an interrupted preparation. Both reward models took 75 s side
by side on an H200; on two CPU cores expect more than an hour.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files
from rlhf_jax.data.examples import Pair
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Limits
from rlhf_jax.devices import precision
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.train.supervised import reward_model
from studies.preferences import accuracy, dialogues, texts

ANY_LENGTH = 2**20  # tokens, more than any pair has
DATA = Path("..") / "shared" / "data"
SEEDS = {"proxy": 0, "judge": 1}  # {part: seed of its reward model}
SMALLEST: dict[str, int] = {  # sizes for smallest.toml
    "max_prompt": 128,
    "max_pair": 192,
    "max_pairs": 16,
    "max_steps": 2,
    "max_evaluated": 4,
    "num_texts": 4,
    "num_normalised": 16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    """Folder of the data and the reward models."""
    model: str = "runs/smollm2"
    """Checkpoint that the reward models, PPO and DPO start from."""
    pairs: Path = DATA / "hh-rlhf-harmless" / "pairs.jsonl"
    """Pairs of hh-rlhf: two dialogues that differ in the last response."""
    shakespeare: Path = DATA / "tinyshakespeare.txt"
    """Text on which forgetting is measured."""
    gsm8k: Path = DATA / "gsm8k" / "test.jsonl"
    """Questions with worked answers on which forgetting is measured."""
    max_prompt: int = 256
    """Longest prompt of a pair, tokens; longer pairs are dropped and counted."""
    max_pair: int = 320
    """Longest prompt with its response, tokens; longer pairs are dropped too."""
    max_asked: int = 64
    """Longest prompt of PPO and of the evaluation, tokens."""
    max_evaluated: int = 64
    """Largest number of held-out prompts of the evaluation."""
    num_texts: int = 16
    """Rows of Shakespeare and of GSM8K."""
    max_pairs: int | None = None
    """Largest number of pairs of a part; None takes all."""
    max_steps: int | None = None
    """Updates of a reward model; None is one pass over its pairs."""
    num_normalised: int = 64
    """Samples of --model on which scores get mean 0 and standard deviation 1."""
    learning_rate: float = 2e-5
    """Peak learning rate of the reward models."""
    smallest: bool = False
    """Use the sizes of smallest.toml, which override other options."""


def read(path: Path) -> list[Any]:
    """Reads the rows of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[Any]) -> int:
    """Writes JSON lines and returns their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def encoded(start: Pretrained, rows: Sequence[Row]) -> list[Pair]:
    """Encodes pairs of any length, in order."""
    return encoding.encode_preferences(
        start.contract(),
        rows,
        limits=Limits(ANY_LENGTH),
    )


def write_data(options: Options, data: Path) -> None:
    """Writes the parts, the prompts, the texts, and the counts of kept rows."""
    start = pretrained.described(options.model)
    rows = read(options.pairs)
    kept, left_out = dialogues.pairs(rows)
    write(data / "messages.jsonl", kept)
    tokens = encoded(start, files.read_preferences(data / "messages.jsonl"))
    prompt_lengths = [len(pair.prompt) for pair in tokens]
    fits = [
        one
        for one, pair in zip(kept, tokens, strict=True)
        if len(pair.prompt) <= options.max_prompt and pair.length <= options.max_pair
    ]
    asked = {
        repr(one["prompt"])
        for one, length in zip(kept, prompt_lengths, strict=True)
        if length <= options.max_asked
    }
    left_out["longer than the limits"] = len(kept) - len(fits)
    parts = {
        name: part[: options.max_pairs] for name, part in dialogues.split(fits).items()
    }
    counts: dict[str, Any] = {"rows": len(rows), "left_out": dict(left_out)}
    for name, part in parts.items():
        prompts = [
            row for row in dialogues.prompts(part) if repr(row["prompt"]) in asked
        ]
        if name == "held_out":
            prompts = prompts[: options.max_evaluated]
        counts[name] = {
            "pairs": write(data / f"{name}.jsonl", part),
            "prompts": write(data / f"{name}_prompts.jsonl", prompts),
        }
    play = options.shakespeare.read_text(encoding="utf-8")
    questions = read(options.gsm8k)
    write(
        data / "shakespeare.jsonl",
        texts.shakespeare(play, rows=options.num_texts),
    )
    write(data / "gsm8k.jsonl", texts.gsm8k(questions, rows=options.num_texts))
    folder.write_json(data / "counts.json", counts)  # last, when all others exist


def learn(options: Options, *, name: str, data: Path) -> None:
    """Runs or resumes `rlhf-jax reward-model` on one part."""
    out = options.out / name
    if (out / "summary.json").exists():
        print(f"{name}: done already")
        return
    steps = [] if options.max_steps is None else [f"--num-steps={options.max_steps}"]
    reward_model.command(
        [
            f"--model={options.model}",
            f"--data={data / name}.jsonl",
            f"--max-length={options.max_pair}",
            *("--buckets", *(str(options.max_pair * n // 4) for n in range(1, 5))),
            f"--normalise=samples,num_samples={options.num_normalised},"
            "max_new_tokens=48,temperature=0.7",
            f"--learning-rate={options.learning_rate}",
            "--schedule=linear,warmup=0.1",
            *("--batch-size=16", "--micro-batch-size=4", "--held-out=0"),
            *steps,
            f"--seed={SEEDS[name]}",
            *("--snapshot-every=10", "--keep-snapshots=1", "--no-progress"),
            f"--out={out}",
            *(["--resume"] if (out / folder.CONFIG).exists() else []),
        ]
    )


def refuse_others(options: Options) -> None:
    """Raises InputError if OUT was started with other options."""
    file = options.out / "options.json"
    current = {
        name: str(value) for name, value in vars(options).items() if name != "out"
    }
    if not file.exists():
        folder.write_json(file, current)
    begun = json.loads(file.read_text(encoding="utf-8"))
    for name, value in current.items():
        if begun.get(name) != value:
            raise InputError(
                f"{file}: expected --{name.replace('_', '-')} {begun.get(name)}, with "
                f"which it was begun, got {value}; give it that, or another --out"
            )


def main(options: Options) -> None:
    """Writes OUT/data, OUT/proxy, OUT/judge and OUT/accuracy.json."""
    if options.smallest:
        options = dataclasses.replace(options, **SMALLEST)
    data = options.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    refuse_others(options)
    if not (data / "counts.json").exists():
        write_data(options, data)
    print((data / "counts.json").read_text(encoding="utf-8"))
    for name in SEEDS:
        learn(options, name=name, data=data)
    measured_file = options.out / "accuracy.json"
    if not measured_file.exists():
        start = pretrained.described(options.model)
        pairs = encoded(start, files.read_preferences(data / "held_out.jsonl"))
        with precision.of("float32"):
            leads = {
                name: accuracy.leads(
                    options.out / name / "model", pairs, pad_id=start.pad_id
                )
                for name in SEEDS
            }
        folder.write_json(measured_file, accuracy.summarise(leads))
    accuracy.tell(json.loads(measured_file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
