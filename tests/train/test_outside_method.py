"""A method of another package, as train/README.md shows it, is a command."""

import re
import sys
import tomllib

import pytest
import toy_files
from places import ROOT

from rlhf_jax.runs import metrics
from rlhf_jax.train import main

README = (ROOT / "rlhf_jax" / "train" / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## How does a method of mine become a command?")[2]
pytestmark = pytest.mark.usefixtures("quick_compilation")


def block(info):
    """The section's first block of code of a language."""
    (text, *_) = re.findall(rf"^```{info}\n(.*?)^```", SECTION, re.M | re.S)
    return text


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package of the README on sys.path, with what pip writes beside it."""
    project = tomllib.loads(block("toml"))["project"]
    site = tmp_path / "site"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (site / "my_methods.py").write_text(block("python"))
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\n"
        f"Version: {project['version']}\n"
    )
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("my_methods", None)


@pytest.mark.usefixtures("installed")
def test_the_command_is_listed_and_has_help(capsys):
    main.main([])
    assert "  signs         my_methods:command" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main.main(["signs", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: rlhf-jax signs --model" in shown
    assert "REINFORCE++ on the signs of its advantages." in shown


def test_an_unknown_command_is_not_found():
    assert "signs" not in main.usage()


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_the_command_trains(tmp_path):
    toy_files.checkpoint(tmp_path / "model")
    toy_files.jsonl(tmp_path / "prompts.jsonl", {"prompt": "the cat"})
    out = tmp_path / "run"
    words = (
        *("signs", "--model", tmp_path / "model", "--prompts"),
        *(tmp_path / "prompts.jsonl", "--rewards", "short=length,weight=-1"),
        *("--batch-size=4", "--max-new-tokens=4", "--num-steps=2", "--no-progress"),
        *("--out", out),
    )
    main.main([str(word) for word in words])
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["objective/scores"] == pytest.approx(-row["response/length"])
    assert (out / "model" / "model.safetensors").is_file()
