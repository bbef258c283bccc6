"""data.json in the run folder, and its printed form."""

import copy
import dataclasses
import io
import json

import pytest
from rich.console import Console

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import receipt, run, run_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    progress: bool = False


DATA = {
    "sources": [
        {
            "name": "--data",
            "source": "d.jsonl",
            "called": "rows",
            "read": 4000,
            "used": 10,
            "left_out": {"longer than 9 tokens": {"count": 3990, "first": "d.jsonl:2"}},
            "fields": {
                "read": ["prompt", "response"],
                "whole_rows_given_to": [],
                "unread": {
                    f"extra {number}": {"count": 2, "first": "d.jsonl:1"}
                    for number in range(14)
                },
            },
            "cut": {"cut to fit": {"count": 5, "first": None}},
            "notes": {"\x1b[31mBOS by hand": {"count": 1, "first": "d.jsonl:3"}},
            "uses": {
                "training": {
                    "rows": 10,
                    "texts": {"text": 10},
                    "turns_learned": 10,
                    "tokens_learned": 1234,
                    "tokens": 5678,
                    "lengths": {
                        "prompt": {"median": 7.5, "longest": 9},
                        "response": {"median": 0.0, "longest": 0},
                    },
                }
            },
            "example": [
                {
                    "title": "text",
                    "tokens": 3000,
                    "not_shown": {"before": 1000, "after": 1500},
                    "pieces": [
                        {"text": "a\x1b]0;title\x07[red]\t", "learned": False},
                        {"text": "b\nc", "learned": True},
                    ],
                }
            ],
        }
    ],
    "prompts_shared_with_training": {"--held-out, held out": {"shared": 1, "rows": 2}},
}


def shown(data, monkeypatch, **options):
    """The output on a console with these options."""
    file = io.StringIO()
    console = Console(file=file, width=100, **options)
    monkeypatch.setattr(receipt, "Console", lambda: console)
    receipt.tell(data)
    return file.getvalue()


def test_all_of_it_is_printed(monkeypatch, capsys):
    text = shown(DATA, monkeypatch)
    table = capsys.readouterr().out
    for cells in (
        ("rows", "10"),
        ("tokens learned", "1,234"),
        ("prompt, median / longest", "7.5 / 9"),
        ("response, median / longest", "—"),
    ):
        assert any(all(cell in line for cell in cells) for line in table.split("\n"))
    lines = text.split("\n")
    assert lines[0] == "--data d.jsonl: 4,000 rows read, 10 used, 3,990 left out"
    assert lines[1] == "  left out: 3,990 × longer than 9 tokens, first d.jsonl:2"
    assert lines[2] == "  cut: 5 × cut to fit"
    assert lines[3] == "  notes: 1 × \\x1b[31mBOS by hand, first d.jsonl:3"
    assert lines[4] == "  fields read: prompt, response"
    assert "extra 11 (2 rows, first d.jsonl:1), and 2 more" in lines[5]
    assert "extra 12" not in text
    assert (
        lines[6] == "--held-out, held out: 1 of 2 rows have a prompt that is trained on"
    )
    assert lines[7] == "A row of --data, text; what is learned is in ⟪ ⟫"
    assert lines[8] == "[1,000 tokens before] a\\x1b]0;title\\x07[red]⇥⟪b⏎"
    assert lines[9] == "c⟫ [1,500 tokens after]"


def test_nothing_that_is_read_controls_the_terminal(monkeypatch):
    text = shown(DATA, monkeypatch, force_terminal=True, color_system="standard")
    assert "\x1b]0" not in text
    assert "\x07" not in text
    assert "⟪" not in text  # a colour says it
    assert "\x1b[1;32mb⏎\x1b[0m\n\x1b[1;32mc\x1b[0m" in text


def test_rows_of_which_nothing_is_learned(monkeypatch):
    data = copy.deepcopy(DATA)
    source = data["sources"][0]
    source["example"][0]["pieces"] = [{"text": "the cat", "learned": False}]
    readers = ["--rewards short=function:lengths:shortness", "--judge judges:one"]
    source["fields"]["whole_rows_given_to"] = readers
    text = shown(data, monkeypatch)
    assert "A row of --data, text; nothing of it is learned" in text
    assert f"  every field is given to {', '.join(readers)}\n" in text


def test_only_the_first_source_and_those_trained_on_show_an_example(monkeypatch):
    data = copy.deepcopy(DATA)
    for name, use in (("--held-out", "held out"), ("--ptx", "training")):
        other = copy.deepcopy(DATA["sources"][0]) | {"name": name}
        other["uses"] = {use: other["uses"]["training"]}
        data["sources"].append(other)
    text = shown(data, monkeypatch)
    assert "A row of --data," in text
    assert "A row of --ptx," in text
    assert "A row of --held-out" not in text


def opened(config, data):
    with run.Run(config, num_steps={"only": 10}, data=data) as job:
        return job.folder / "data.json"


def test_a_run_folder_has_it_and_a_resume_leaves_it(tmp_path, capsys):
    config = Config(out=tmp_path / "run")
    path = opened(config, DATA)
    before = path.read_bytes()
    assert json.loads(before) == DATA
    assert before == opened(Config(out=tmp_path / "other"), DATA).read_bytes()
    again = Config(out=tmp_path / "run", resume=True)
    capsys.readouterr()
    assert opened(again, DATA).read_bytes() == before
    out = capsys.readouterr()
    assert "4,000 rows read" in out.out
    assert out.err == ""
    changed = copy.deepcopy(DATA)
    changed["sources"][0]["read"] = 5000
    assert opened(again, changed).read_bytes() == before
    err = capsys.readouterr().err
    assert f"{path} records how this run began" in err
    assert "began, and --data is now read differently" in err


def test_a_run_from_before_gets_one_at_its_resume(tmp_path):
    with run.Run(Config(out=tmp_path / "run"), num_steps={"only": 10}) as job:
        assert not (job.folder / "data.json").exists()
    again = Config(out=tmp_path / "run", resume=True)
    assert json.loads(opened(again, DATA).read_text()) == DATA


def test_a_file_that_is_not_a_receipt_is_left(tmp_path, capsys):
    opened(Config(out=tmp_path / "run"), DATA).write_text("[")
    again = Config(out=tmp_path / "run", resume=True)
    assert opened(again, DATA).read_text() == "["
    assert "--data is now read differently" in capsys.readouterr().err


def test_a_folder_that_is_refused_gets_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"already holds notes\.txt"):
        opened(Config(out=tmp_path), DATA)
    assert not (tmp_path / "data.json").exists()
