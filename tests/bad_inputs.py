"""Bad inputs to the trainers: command lines that must be refused in one message.

A case is what is wrong, as arguments after those of a run that is in order. `refused`
runs it as the command line does and checks what every refusal has in common.
"""

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import toy_files

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.train.methods import grpo, ppo
from rlhf_jax.train.supervised import dpo, reward_model, sft

TRAINERS = {
    "sft": sft,
    "reward_model": reward_model,
    "ppo": ppo,
    "grpo": grpo,
    "dpo": dpo,
}
DATA = {name: "--prompts" if name in ("ppo", "grpo") else "--data" for name in TRAINERS}
ROWS = {
    "sft": {"prompt": "the cat", "response": "sat on a dog ."},
    "reward_model": {"prompt": "the cat", "chosen": "sat .", "rejected": "ran ."},
    "ppo": {"prompt": "the cat"},
    "grpo": {"question": "is it good ?", "answer": "#### 2"},
    "dpo": {"prompt": "the cat", "chosen": "sat .", "rejected": "ran ."},
}
OPTIONS = {
    "sft": ("--batch-size=4",),
    "reward_model": (
        "--batch-size=4",
        "--normalise=samples,num_samples=4,max_new_tokens=4",
    ),
    "ppo": (
        *("--reward=operator:setitem", "--batch-size=4", "--max-new-tokens=4"),
        *("--num-minibatches=1", "--num-steps=1"),
    ),
    "grpo": (
        *("--prompt-field=question", "--verifier=gsm8k"),
        *("--batch-size=4", "--group-size=2", "--max-new-tokens=4", "--num-workers=1"),
        *("--num-minibatches=1", "--num-steps=1"),
    ),
    "dpo": ("--batch-size=4",),
}

MESSAGE = re.compile(r"^error: ", re.MULTILINE)


class Case(NamedTuple):
    """Arguments of a trainer; {} stands for the folder of valid files."""

    trainer: str
    argv: tuple[str, ...]
    message: str  # a regular expression that matches the refusal


def case(trainer: str, argv: str, message: str) -> Case:
    """Makes a case from arguments without blanks."""
    return Case(trainer, tuple(argv.split()), message)


def by_one_each(cases: list) -> list:
    """Test parameters for cases that every trainer refuses, trainer by trainer.

    Trainers share the code, so the quick tests try each case on one trainer in turn.
    """
    every = len(cases) // len(TRAINERS)
    return [
        pytest.param(
            *(of if type(of) is tuple else (of,)),
            marks=[pytest.mark.slow] * (i % every % len(TRAINERS) != i // every),
        )
        for i, of in enumerate(cases)
    ]


def name(of) -> str | None:
    """The test id of a case."""
    return f"{of.trainer}:{' '.join(of.argv)}"[:60] if isinstance(of, Case) else None


def make_files(folder: Path) -> Path:
    """Writes a valid checkpoint, reward model and data of each trainer."""
    toy_files.checkpoint(folder / "model")
    toy_files.reward_model(folder / "scorer")
    for trainer, row in ROWS.items():
        other = {"prompt": "the dog"} if "prompt" in row else {}
        toy_files.jsonl(folder / f"{trainer}.jsonl", *[row, row | other] * 6)
    toy_files.jsonl(folder / "one_prompt.jsonl", *[ROWS["dpo"]] * 6)
    (folder / "text.txt").write_text("the cat sat on a dog .\n")
    (folder / "empty").mkdir()
    return folder


@contextlib.contextmanager
def loading_once():
    """Caches checkpoints by the arguments of `pretrained.load`."""
    load, loaded = pretrained.load, {}

    def load_once(*args, sharding, **options):
        call = str((args, options))
        if call not in loaded:
            loaded[call] = load(*args, sharding=sharding, **options)
        return loaded[call]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "load", load_once)
        yield


def in_order(trainer: str, files: Path) -> list[str]:
    """The arguments of a valid run, without --out."""
    words = ["--model", str(files / "model"), DATA[trainer]]
    words += [str(files / f"{trainer}.jsonl"), *OPTIONS[trainer]]
    if trainer == "grpo":
        words += ["--held-out", str(files / "grpo.jsonl")]
    return words


def refused(capsys, trainer: str, argv, *, files: Path, out: Path, message: str) -> str:
    """Checks status 2, one message that matches `message`, and that `out` is unchanged.

    A message is a line or paragraph that begins with "error:".
    """
    before = contents(out)
    words = ["--out", str(out), "--no-progress", *in_order(trainer, files), *argv]
    experiment = TRAINERS[trainer]
    with pytest.raises(SystemExit) as exit_:
        experiment.command(words)
    errors = capsys.readouterr().err
    assert exit_.value.code == 2, errors
    assert "Traceback" not in errors
    assert len(MESSAGE.findall(errors)) == 1, errors
    assert MESSAGE.match(errors), errors
    assert len(errors) < 3000, errors[:3000]
    message_shown = " ".join(errors.split())
    assert re.search(message, message_shown), message_shown
    assert contents(out) == before
    return message_shown


def contents(folder: Path) -> dict[str, bytes] | None:
    """{path: bytes} of a file or folder; None if it does not exist."""
    with contextlib.suppress(OSError, ValueError):
        if folder.is_file():
            return {"": folder.read_bytes()}
        if folder.exists():
            return {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
    return None
