"""Printed and drawn reports show the numbers of the run."""

import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import tiny
from rich.console import Console

from rlhf_jax.models import decoder
from rlhf_jax.runs import loggers, metrics, plots, progress, report, run
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.progress import Progress
from rlhf_jax.runs.run_config import RunConfig


def plain(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_progress_off_a_terminal_is_a_line_now_and_then():
    console = plain()
    sink = Progress({"sft": 50, "ppo": 3}, console=console)
    sink.begin("sft", 0)
    for step in range(50):
        sink.write("sft", step, {"loss/language_model": 2.5 - step / 100, "x": 1.0})
    sink.begin("ppo", 1)
    sink.write("ppo", 1, {"objective/scores": None, "objective/kl": 1.23456})
    sink.write("ppo", 2, {"objective/scores": 0.5, "objective/kl": 2.0})
    sink.close()
    assert printed(console) == [
        "sft 1/50  language_model 2.5",
        "sft 50/50  language_model 2.01",
        "ppo 2/3  scores —  kl 1.235",
        "ppo 3/3  scores 0.5  kl 2",
    ]


def test_progress_lines_tell_the_time_left(monkeypatch):
    console = plain()
    clock = [0.0]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 30.0)
    sink = Progress({"ppo": 100}, console=console)
    monkeypatch.setattr(sink._bars, "get_time", lambda: clock[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    sink.begin("ppo", 0)
    clock[0] = 500.0  # the first step compiles
    for step in range(7):
        sink.write("ppo", step, {})
        clock[0] += 10.0
    assert [line.strip() for line in printed(console)] == [
        "ppo 1/100",
        "ppo 4/100  0:16:00 left",
        "ppo 7/100  0:15:30 left",
    ]


DRIFT = Alarm("weight_drift", 1, "drift [0.6] is over 0.5; " + "raise kl_coef " * 9)
KL = Alarm("kl", 2, "KL 9 is over 8; lower it")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_tells_an_alarm_once_and_its_name_while_it_lasts(
    terminal, monkeypatch
):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150, color_system=None)
    sink = Progress({"ppo": 9}, console=console)
    sink.begin("ppo", 0)
    for step, active in enumerate(([], [DRIFT], [DRIFT, KL], [KL], [])):
        sink.write("ppo", step, {}, active)
    sink.close()
    alarm_lines = [
        line.strip() for line in file.getvalue().splitlines() if "ALARM ppo" in line
    ]
    assert [line[line.index("ALARM") :] for line in alarm_lines] == [
        f"ALARM ppo step 1: weight_drift: {DRIFT.message}".strip(),
        f"ALARM ppo step 2: kl: {KL.message}",
    ]
    if not terminal:
        lines = [re.sub(r"  \S+ left", "", line) for line in printed(console)]
        assert [line.strip() for line in lines if line[:3] == "ppo"] == [
            "ppo 1/9",
            "ppo 2/9  ALARM weight_drift",
            "ppo 3/9  ALARM weight_drift kl",
            "ppo 4/9  ALARM kl",
            "ppo 5/9",
        ]


def test_progress_on_a_terminal_shows_the_latest_numbers():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    sink = Progress({"ppo": 8}, console=console)
    sink.begin("ppo", 5)
    sink.write("ppo", 5, {"objective/kl": 4.25, "loss/policy": 9.0})
    sink.close()
    last = file.getvalue().split("ppo")[-1]
    assert "6/8" in last
    assert "kl 4.25" in last
    assert "9.0" not in file.getvalue()


def test_a_run_gets_the_sinks_it_asks_for(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(loggers, "TensorBoard", lambda folder: made.append(folder))
    monkeypatch.setattr(
        loggers, "Wandb", lambda folder, config: made.append((folder, config["seed"]))
    )
    quiet = RunConfig(out=tmp_path, progress=False)
    assert run.sinks(quiet, num_steps={"ppo": 1}) == []
    (sink,) = run.sinks(RunConfig(out=tmp_path), num_steps={"ppo": 1})
    assert isinstance(sink, Progress)
    both = dataclasses.replace(quiet, seed=5, tensorboard=True, wandb=True)
    assert len(run.sinks(both, num_steps={})) == 2
    assert made == [tmp_path, (tmp_path, 5)]


def test_a_table_formats_its_cells(capsys):
    rows = [("score", 0.123456, True), ("[bold]count[/]", 12345, None)]
    report.table("Result [nats]", ("measure", "policy", "verified [x]"), rows)
    text = capsys.readouterr().out
    for cell in (
        "Result [nats]",
        "verified [x]",
        "measure",
        "0.1235",
        "12,345",
        "[bold]count[/]",
        "True",
        "—",
    ):
        assert cell in text


@pytest.mark.parametrize("columns", [66, 80])
def test_a_narrow_table_breaks_no_word(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    path = "layers/linear_attention/query_and_key/kernel"
    report.table("Drift", ("module", *"abcd"), [(path, *4 * [1.234e-5])])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    first = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    assert "".join(first) == path
    assert all(part.endswith(("/", "_")) for part in first[:-1])
    assert len(first) == {66: 4, 80: 2}[columns]


def test_a_row_of_wide_cells_has_no_empty_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    spread = "0.02242 (0.02205 - 0.02280)"
    report.table("Times", ("step", "start", "peak"), [3 * [spread]])
    *_, last = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert "0.02280)" in last


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("KL to the reference [nats]", "0"),
        ("objective/kl", "0"),
        ("objective/kl_k3", "0"),
        ("objective/kl_coef", "-1.5e-08"),  # β, which may be as small
        ("weekly", "-1.5e-08"),
    ],
)
def test_a_kl_of_equal_models_is_0(name, shown, capsys):
    """Reports show rounding as 0; 1e-6 nats and more are shown."""
    report.table("T", ("", "first", "last"), [(name, -1.5e-8, 2e-6)])
    (row,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("│"))
    assert [cell.strip() for cell in row.split("│")[2:4]] == [shown, "2e-06"]


def test_texts_before_and_after(capsys):
    before = {"eval/code_nll": 2.5, "step": 0}
    after = {"eval/code_nll": 3.25, "eval/a_nll_nll": 1.5}
    assert report.texts(before, after) == {
        "code_nll_before": 2.5,
        "code_nll_after": 3.25,
        "a_nll_nll_after": 1.5,
    }
    lines = capsys.readouterr().out.splitlines()
    cells = [re.findall(r"[\w.—]+", line) for line in lines if line.startswith("│")]
    assert cells == [["code", "2.5", "3.25"], ["a_nll", "—", "1.5"]]
    assert report.texts(before, {}) == {}
    assert not capsys.readouterr().out


def test_samples_stand_side_by_side_as_they_are(capsys):
    report.side_by_side([{"prompt": "a [red]film", "policy": "was\nfine"}] * 2)
    text = capsys.readouterr().out
    assert text.count("a [red]film") == 2
    assert text.index("prompt") < text.index("policy")


def test_models_are_counted(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    policy = {"w": jnp.zeros((1000, 3)), "b": jnp.zeros(5)}
    reference = {"w": jax.ShapeDtypeStruct((2**20, 3), jnp.int8), "s": jnp.zeros(4)}
    report.model_table(
        [
            report.Role("policy", policy, trained=True),
            report.Role("critic", policy, trained=True),
            report.Role("reference", reference),
            report.Role("reward", None),
        ]
    )
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "6,010 trainable, 3,145,732 frozen"
    row = next(line for line in text.splitlines() if "reference" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    size = ["3,145,732", "3", "float32, int8"]
    assert cells == ["reference", *size, "frozen", "cpu 0", "none"]


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_padding_are_no_parameters(tied, capsys, monkeypatch):
    """The model's shape decides whether some of 64 rows are padding."""
    monkeypatch.setenv("COLUMNS", "120")
    model = dataclasses.replace(
        tiny.GPT2, vocab_size=61, tied_head=tied, vocab_multiple=1
    )
    other = dataclasses.replace(model, vocab_size=64)
    padded = dataclasses.replace(model, vocab_multiple=64)
    counted, others = (
        sum(leaf.size for leaf in jax.tree.leaves(decoder.shapes(shape)))
        for shape in (model, other)
    )
    report.model_table(
        [
            report.Role("policy", decoder.shapes(padded), padded, trained=True),
            report.Role("reward", {"trunk": decoder.shapes(other)}, other),
        ]
    )
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"{counted:,} trainable, {others:,} frozen"
    held = sum(leaf.size * 4 for leaf in jax.tree.leaves(decoder.shapes(padded)))
    row = next(line for line in text.splitlines() if "policy" in line)
    assert f"{held / 2**20:.3g}" in row


def write_rows(folder: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


def ppo_row(step: int) -> dict:
    names = {
        name
        for panels in plots.PLOTS.values()
        for lines in panels.values()
        for name in lines
        if not name.endswith(("model", "pairwise", "accuracy"))
    }
    return {"stage": "ppo", "step": step} | dict.fromkeys(sorted(names), step / 10)


@pytest.mark.slow
def test_every_figure_of_a_pipeline_is_drawn(tmp_path, rendered):
    sft = {"stage": "sft", "step": 0, "loss/language_model": 1.0}
    reward = {
        "stage": "reward",
        "step": 0,
        "loss/pairwise": 1.0,
        "pairwise/accuracy": 0,
    }
    write_rows(tmp_path, [sft, reward, *map(ppo_row, range(60))])
    drawn = plots.draw(tmp_path)
    assert [path.stem for path in drawn] == list(plots.PLOTS)
    assert sorted(drawn) == sorted((tmp_path / "plots").iterdir())
    for path in drawn:
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 300
        assert len(np.unique(image)) > 10


def test_only_what_was_measured_is_drawn(tmp_path, rendered):
    write_rows(tmp_path, [{"stage": "ppo", "step": 0, "objective/entropy": 1.0}])
    assert [path.name for path in plots.draw(tmp_path)] == ["entropy.png"]


@pytest.mark.parametrize("count", [4, 60])
def test_a_line_follows_the_rows(count):
    values = [0.5 * step for step in range(count)]
    rows = [
        {"stage": "ppo", "step": 10 + step, "objective/kl": value}
        for step, value in enumerate(values)
    ]
    rows[2]["objective/kl"] = None
    rows[3]["objective/kl"] = "Infinity"
    figure = plots._figure(rows, {"KL": {"objective/kl": "k1"}})
    (axis,) = figure.axes
    bold = axis.lines[0]
    gap = [not np.isfinite(y) for y in bold.get_ydata()]
    assert gap == [step in (2, 3) for step in range(count)]
    assert bold.get_xdata()[0] == 10
    assert axis.get_ylabel() == "KL"
    # A running mean of a straight line is the line, away from gaps and ends.
    np.testing.assert_allclose(bold.get_ydata()[6:-3], values[6:-3])
    if count == 60:
        assert axis.get_xlabel() == "step of ppo (bold: mean of 3 steps)"
        np.testing.assert_allclose(axis.lines[1].get_ydata()[4:], values[4:])


def test_two_stages_are_two_lines():
    rows = [{"stage": s, "step": 0, "objective/kl": 1.0} for s in ("warm", "ppo")]
    figure = plots._figure(rows, {"KL": {"objective/kl": "k1"}})
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["warm: k1", "ppo: k1"]


def test_plots_read_what_a_recorder_writes(tmp_path, rendered):
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        record.write(0, {"loss/value": (jnp.float32(jnp.nan), jnp.float32(1))})
        record.write(1, {"loss/value": (jnp.float32(0), jnp.float32(0))})
    assert [path.name for path in plots.draw(tmp_path)] == ["losses.png"]
