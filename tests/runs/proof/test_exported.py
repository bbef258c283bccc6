"""The manifest beside an exported model."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest
import toy_files

from rlhf_jax import hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.proof import exported


@pytest.fixture
def model(tmp_path):
    folder = toy_files.checkpoint(tmp_path / "model")
    exported.write(folder, anew=True)
    return folder


def test_the_manifest_is_that_of_sha256sum(model):
    lines = (model.parent / "model.sha256").read_text().splitlines()
    digests = dict(reversed(line.split("  ")) for line in lines)
    assert sorted(digests) == sorted(f"model/{path.name}" for path in model.iterdir())
    for name, digest in digests.items():
        content = (model.parent / name).read_bytes()
        assert digest == hashlib.sha256(content).hexdigest()
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "model.sha256"],
        cwd=model.parent,
        check=True,
    )


def test_a_model_that_differs_is_not_loaded(model):
    hf.load(model)
    path = model / "config.json"
    whole = path.read_text()
    path.write_text(whole + " ")
    (model / "more.txt").write_text("")
    (model / "tokenizer.json").rename(model.parent / "tokenizer.json")
    message = (
        r"got\n  model/config.json: another SHA-256\n  model/tokenizer.json: missing\n"
        r"export it again"
    )
    with pytest.raises(InputError, match=message):
        hf.load(model)
    exported.write(model, anew=False)  # a manifest that is there stays
    assert len(exported.check(model).faults) == 2
    exported.write(model, anew=True)
    hf.load(model)


def test_files_added_to_a_model_are_told_and_do_no_harm(model, capsys):
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("")
    number = len((model.parent / "model.sha256").read_text().splitlines())
    assert exported.check(model) == (number, [], [], [], ["model/notes/mine.txt"])
    hf.load(model)
    note = "model.sha256 does not list:\n  model/notes/mine.txt\n"
    assert note in capsys.readouterr().err


def test_a_manifest_that_was_damaged_is_told_and_none_is_no_fault(model):
    manifest = model.parent / "model.sha256"
    text = manifest.read_text()
    for wrong in (text[:-1], text.replace("  ", " ", 1), text + text, "\xff"):
        manifest.write_bytes(wrong.encode("latin-1"))
        assert exported.check(model).faults, wrong
    manifest.write_text(re.sub("^.", lambda m: "1" if m[0] == "0" else "0", text))
    (fault,) = exported.check(model).faults
    assert fault.endswith("another SHA-256")
    manifest.unlink()
    assert exported.check(model) == (0, [], [], [], [])
    hf.load(model)
    for none in ("/", "x" * 250):  # a name that the system takes, not its manifest's
        assert exported.check(Path(none)) == (0, [], [], [], [])
