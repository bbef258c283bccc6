"""Each wrong argument is refused in one line of our own."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import pytest
import tyro

from rlhf_jax.functional.checks import InputError, positive
from rlhf_jax.functional.kl.control import Control
from rlhf_jax.runs import command_line
from rlhf_jax.runs.command_line import refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders."""
    model: str
    """Model."""
    out: Path
    """Folder."""
    num_steps: int = 3
    """Steps."""
    kl_coef: float | None = None
    """Coefficient, with more words than a row of a narrow box can show at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype."""
    buckets: tuple[int, ...] = (4,)
    """Widths."""
    texts: tuple[int, ...] | None = None
    """Widths, or none."""
    control: Control | None = None
    """Choice."""
    trackio: bool = False
    """Flag."""

    def __post_init__(self):
        positive(num_steps=self.num_steps)


NEEDED = ["--model=m", "--out=o"]


def refused(argv, **options):
    with pytest.raises(InputError) as error:
        command_line.cli(Config, prog="train", args=argv, **options)
    return str(error.value)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*NEEDED, "--kl-coef", "abc"],
            "--kl-coef: expected a number or None, got 'abc'; train --help explains it",
        ),
        (
            [*NEEDED, "--num_steps=1.5"],
            "--num-steps: expected a whole number, got '1.5'; train --help explains it",
        ),
        (
            [*NEEDED, "--buckets", "4", "x", "--num-steps", "3"],
            "--buckets: expected whole numbers, got '4 x'; train --help explains it",
        ),
        (
            [*NEEDED, "--texts", "x"],
            "--texts: expected whole numbers or None, got 'x'; train --help explains "
            "it",
        ),
        (
            [*NEEDED, "--dtype", "float8"],
            "--dtype: expected one of float32, bfloat16, got 'float8'; choose one",
        ),
        (
            [*NEEDED, "--kl-coef"],
            "--kl-coef: expected a value, got none; write it after the option",
        ),
        (
            [*NEEDED, "--num-steps=0"],
            "--num-steps: expected a finite number above 0, got 0; choose --num-steps "
            "> 0",
        ),
        (
            [*NEEDED, "--control=often"],
            "--control: expected one of fixed, linear, adaptive, pi, lagrangian, None, "
            "got 'often'; choose one",
        ),
        (
            [*NEEDED, "--track", "3"],
            "expected options of train, got '--track 3'; did you mean --trackio? "
            "train --help lists them",
        ),
        (
            [*NEEDED, "--num-step", "3"],
            "expected options of train, got '--num-step 3'; did you mean --num-steps? "
            "train --help lists them",
        ),
        (
            [*NEEDED, "--zzz"],
            "expected options of train, got '--zzz'; train --help lists them",
        ),
        (
            ["--num-steps=1"],
            "expected --model and --out, got none; train --help explains more",
        ),
        (
            ["--modle", "m", "--out=o"],
            "expected --model, got '--modle m', which is not an option; train --help "
            "explains more",
        ),
    ],
)
@pytest.mark.parametrize("encoding", ["capfd", "capsys"])  # UTF-8, and none
def test_each_refusal_is_a_line(argv, message, columns, encoding, monkeypatch, request):
    captured = request.getfixturevalue(encoding)
    monkeypatch.setenv("COLUMNS", columns)
    assert refused(argv) == message
    assert captured.readouterr() == ("", "")


def test_a_long_value_is_told_as_it_was_written(monkeypatch):
    """The box would break the value into two words."""
    monkeypatch.setenv("COLUMNS", "40")
    path = "a-path/" * 20
    assert f"got {path!r}; " in refused([*NEEDED, f"--num-steps={path}"])


def test_the_help_with_every_option_is_named():
    assert refused([*NEEDED, "--seed=1"], add_help=False).endswith(
        "train --help-all lists them"
    )


def test_a_function_is_called_outside_of_the_parser(capfd):
    """Its output is shown, and its own errors pass unchanged."""

    def check(run: tyro.conf.Positional[Path], *, seed: int = 0) -> None:
        """Check a run.

        Args:
          run: The folder.
          seed: Number.
        """
        print(run, seed, file=sys.stderr)
        raise ValueError("a defect")

    with pytest.raises(ValueError, match=r"^a defect$"):
        command_line.call(check, prog="check", args=["here", "--seed=2"])
    assert capfd.readouterr().err == "here 2\n"
    with pytest.raises(InputError, match=r"^expected PATH, got none; check --help ex"):
        command_line.call(check, prog="check", args=[])


def test_a_warning_while_options_are_read_is_seen(capfd):
    @dataclasses.dataclass(frozen=True)
    class Warns:
        seed: int = 0

        def __post_init__(self):
            print("warning: old", file=sys.stderr)

    command_line.cli(Warns, prog="warns", args=[])
    assert capfd.readouterr().err == "warning: old\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n"], "--n: expected a value, got none; train --help explains it"),
        (["--n=x"], "--n: expected a whole number, got 'x'; train --help explains it"),
        (["--n=1", "y"], "expected other options, got 'y'; train --help explains it"),
        ([], "expected --n, got none; train --help explains it"),
    ],
)
def test_argparse_refuses_in_our_words(argv, message):
    parser = command_line.Arguments(prog="train")
    parser.add_argument("--n", type=int, required=True)
    with pytest.raises(InputError) as error:
        parser.parse_args(argv)
    assert str(error.value) == message


def test_the_help_of_a_function_has_no_line_breaks_of_its_docstring(
    capsys, monkeypatch
):
    def count(*, rows: int = 1) -> None:
        """Counts rows,
        --all of them.

        Args:
          rows: how many, or
            gs://BUCKET/ROWS of them.
        """

    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        command_line.call(count, prog="count", args=["--help"])
    text = capsys.readouterr().out
    assert "Counts rows, --all of them." in text
    assert "how many, or gs://BUCKET/ROWS of them." in " ".join(text.split())


OPTIONS = {
    *("--batch-size", "--gamma", "--learning-rate", "--critic.learning-rate"),
    *("--scores.clip", "--penalty.clip", "--penalty.tail", "--penalty.top-k"),
    *("--top-k", "--kl-control", "--sampler-correction", "--sampler", "--packing"),
}


@pytest.mark.parametrize(
    ("message", "args", "named"),
    [
        (
            "batch_size: expected more, got 0; choose batch_size > 0",
            [],
            "--batch-size: expected more, got 0; choose --batch-size > 0",
        ),
        (
            "gamma: expected a gamma, got 2; choose 0 <= gamma <= 1",
            [],
            "--gamma: expected a gamma, got 2; choose 0 <= --gamma <= 1",
        ),
        ("clip: expected x", ["--penalty.clip=0"], "--penalty.clip: expected x"),
        ("clip: expected x", [], "--penalty.clip or --scores.clip: expected x"),
        (
            "critic: learning_rate: expected x",
            ["--learning-rate", "0"],
            "--critic.learning-rate: expected x",
        ),
        (
            "tail: expected none without top_k, got a",
            ["--top-k", "3"],
            "--penalty.tail: expected none without --penalty.top-k, got a",
        ),
        ("penalty.top_k: expected x", [], "--penalty.top-k: expected x"),
        (
            "target: expected x",
            ["--kl-control", "adaptive,target=-1", "--sampler", "process"],
            "--kl-control: target: expected x",
        ),
        (
            "sampler_correction: expected none, got Truncate(cap=3.0, level='token');"
            " leave it out",
            ["--sampler_correction", "truncate,cap=3"],
            "--sampler-correction: expected none, got truncate,cap=3; leave it out",
        ),
        (
            "expected batch_size to divide the rows, got 3\ngamma: expected x",
            [],
            "expected --batch-size to divide the rows, got 3\n--gamma: expected x",
        ),
        # Nothing but a field is renamed.
        ("gamma.jsonl:1: expected 'batch_size', got x", [], ...),
        ("--sampler: timeout: expected x; choose timeout > 0", [], ...),
        ("width of --packing: expected x", [], ...),
        ("expected a row, got batch_size", [], ...),
        ("seeds: expected x", [], ...),
    ],
)
def test_errors_name_the_options_of_their_fields(message, args, named):
    named = message if named is ... else named
    assert refusals.in_options(message, options=OPTIONS, args=args) == named
