"""160 damages anywhere in a run, its evaluation and a sweep are all detected.

Bits flip, tails are cut, rows are lost, swapped or doubled, numbers are edited, files
are another run's or gone. Each time `rlhf-jax verify` ends with status 1 or 2, and what
reads the file refuses it or, on the page of a report, marks it. A file that is new is
named and no damage.
"""

import json
import random
import re
import shutil

import pytest
import toy_files
import toy_runs

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.reports import reading
from rlhf_jax.runs import metrics
from rlhf_jax.sweeps import declaration, planned, results
from rlhf_jax.train import main, report, sweep
from rlhf_jax.train.queries import paper

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

NUM_DAMAGES = 40  # from each of four seeds
TRAINED = (
    *("--batch-size=4", "--group-size=2", "--max-new-tokens=3", "--num-steps=4"),
    *("--snapshot-every=2", "--sample-every=1", "--lora=2", "--no-progress"),
    *("--prompt-field=question", "--verifier=gsm8k,unmarked=last_number"),
    "--num-workers=1",
)
EVALUATED = (
    *("--num-samples=2", "--max-new-tokens=3", "--batch-size=2", "--no-progress"),
    *("--prompt-field=question", "--snapshot-every=1"),
)
SWEEP = """
trainer = "ppo"
seeds = [0, 1]
options = { model = "m", prompts = "p.jsonl", verifier = "exact" }
grid = { kl_coef = [0.0, 0.2] }
measures = { score = "objective/scores", told = { summary = "told" } }
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run, a run of another seed, an evaluation and a sweep."""
    place = tmp_path_factory.mktemp("whole")
    toy_files.checkpoint(place / "start")
    rows = [
        {"question": f"the cat {word}", "answer": "#### 4"} for word in ("sat", ".")
    ]
    data = toy_files.jsonl(place / "prompts.jsonl", *rows * 4)
    asked = f"--prompts={data}"
    for name, seed in (("run", 0), ("other", 1)):
        out = (f"--out={place / name}", f"--seed={seed}")
        main.main(["grpo", f"--model={place / 'start'}", asked, *out, *TRAINED])
    model = f"--model={place / 'run' / 'model'}"
    main.main(["evaluate", model, asked, f"--out={place / 'evaluation'}", *EVALUATED])
    file = place / "sweep.toml"
    file.write_text(SWEEP)
    out = place / "sweep"
    declared = declaration.read(file)
    planned.begin(declared, out=out)
    for run in planned.runs_of(declared, out=out):
        toy_runs.run(run.folder, seed=run.seed, steps=12, told=1.0)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.log.write_text("done\n")
    runs = planned.runs_of(declared, out=out)
    document = results.as_json(declared, results.collected(declared, runs))
    folder_json = json.dumps(results.seal(out, document), indent=2) + "\n"
    (out / results.NAME).write_text(folder_json)
    return place


def status(*argv):
    """The exit status of a command."""
    try:
        main.main([*map(str, argv)])
    except SystemExit as end:
        return end.code
    return 0


def test_what_is_whole_is_proven(whole, capsys):
    for name in ("run", "other", "evaluation", "sweep", "run/model", "run/adapter"):
        assert status("verify", whole / name) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    for word in ("not proven", "since", "added", "has no summary.json"):
        assert word not in printed
    files = len([*(whole / "run" / "model").iterdir()])
    assert files > 3
    assert f"{files} files and 0 snapshots checked, none damaged" in printed


def test_what_users_add_is_named_and_is_no_damage(whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole / "run", out)
    shutil.copytree(whole / "evaluation", out / "eval")
    names = ("notes.txt", "model/notes.txt", "snapshots/grpo/4/notes.txt")
    for name in (*names, "notes.sha256"):  # not a model's manifest
        (out / name).write_text("mine")
    (out / "empty.sha256").mkdir()
    report.main(report.Config(runs=(out,), html=out / "report.html"))
    capsys.readouterr()
    assert status("verify", out) == 0
    count = sum(path.is_file() for path in (out / "eval").rglob("*"))
    added = (
        *(f"eval/ ({count} files)", "notes.sha256", "notes.txt", "report.html"),
        *("model/notes.txt", "snapshots/grpo/4/notes.txt"),
    )
    printed = capsys.readouterr().out
    header = f"added after {out} ended, not part of the proof:\n"
    assert printed.partition(header)[2].startswith("".join(f"  {n}\n" for n in added))
    (out / "summary.json").unlink()  # a run under way has not ended
    assert status("verify", out) == 0
    printed = capsys.readouterr().out
    assert "eval/" not in printed
    assert f"{out} has no summary.json: it has not ended, or that file is" in printed


# Each damages one file; False where the file does not allow it.


def flip(path, rng, other):
    content = bytearray(path.read_bytes())
    if not content:
        return False
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return True


def cut(path, rng, other):
    content = path.read_bytes()
    if not content:
        return False
    path.write_bytes(content[: -rng.randrange(1, len(content) + 1)])
    return True


def of_rows(change):
    def damage(path, rng, other):
        rows = path.read_bytes().splitlines(keepends=True)
        if len(set(rows)) < 2:
            return False
        changed = change(rows, rng)
        path.write_bytes(b"".join(changed))
        return changed != rows

    damage.__name__ = change.__name__
    return damage


@of_rows
def remove_row(rows, rng):
    at = rng.randrange(len(rows))
    return rows[:at] + rows[at + 1 :]


@of_rows
def swap_rows(rows, rng):
    one, two = rng.sample(range(len(rows)), 2)
    changed = list(rows)
    changed[one], changed[two] = rows[two], rows[one]
    return changed


@of_rows
def double_row(rows, rng):
    at = rng.randrange(len(rows))
    return rows[: at + 1] + rows[at:]


def edit_number(path, rng, other):
    text = path.read_bytes()
    numbers = list(re.finditer(rb"\d+", text))
    if not numbers:
        return False
    at = rng.choice(numbers)
    digit = str((int(at[0][-1:]) + rng.randrange(1, 10)) % 10).encode()
    path.write_bytes(text[: at.end() - 1] + digit + text[at.end() :])
    return True


def of_another_run(path, rng, other):
    if not other.is_file() or other.read_bytes() == path.read_bytes():
        return False
    shutil.copyfile(other, path)
    return True


def remove(path, rng, other):
    path.unlink()
    return True


def add(path, rng, other):
    path.with_name(f"{path.name}.{rng.randrange(99)}").write_bytes(path.read_bytes())
    return True


KINDS = (
    *(flip, cut, remove_row, swap_rows, double_row),
    *(edit_number, of_another_run, remove, add),
)


def damaged(whole, at, name, kind, rng):
    """Copies a folder and damages one file; returns its name."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(whole / name, at / name)
    files = sorted(path for path in (at / name).rglob("*") if path.is_file())
    rows = [path for path in files if path.suffix == ".jsonl"]
    while True:
        path = rng.choice(rows if rng.random() < 0.3 else files)
        inside = path.relative_to(at / name)
        other = whole / "other" / inside  # an evaluation has some of its names
        if name == "sweep":
            parts = [part.replace("seed_0", "seed_1") for part in inside.parts]
            other = (whole / name).joinpath(*parts)  # of others the same, and refused
        if kind(path, rng, other):
            return inside


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_is_silent(whole, tmp_path, capsys, seed):
    silent, marked, refused, rng = [], 0, 0, random.Random(seed)
    names = ("run", "run", "evaluation", "sweep")
    for number in range(NUM_DAMAGES):
        name, kind = names[number % 4], KINDS[number % len(KINDS)]
        inside = damaged(whole, tmp_path / "at", name, kind, rng)
        folder = tmp_path / "at" / name
        what = f"{kind.__name__} of {name}/{inside}"
        code, printed = status("verify", folder), capsys.readouterr().out
        if kind is add:
            if code != 0 or f"{inside.name}." not in printed.partition("added")[2]:
                silent.append(f"verify, {code}: {what}")
        elif code == 0 and kind is remove and inside.name == "summary.json":
            assert "has no summary.json" in printed  # as of a run under way
        elif code not in (1, 2):
            silent.append(f"verify: {what}")
        if name == "sweep" and inside.name in results.READ:
            try:
                paper.main(paper.Config(sweep=folder, out=tmp_path / "paper"))
                silent += [] if kind is add else [f"paper: {what}"]
            except (InputError, StopError):
                refused += 1
                silent += [f"paper, refused: {what}"] if kind is add else []
        if name == "run" and str(inside) in reading.READ:
            try:
                notes = report.load(report.Config(runs=(folder,), watch=True))["notes"]
                found = any("IS DAMAGED" in note for note in notes)
                marked += found
                silent += [] if found != (kind is add) else [f"report: {what}"]
            except InputError:
                refused += 1
                silent += [f"report, refused: {what}"] if kind is add else []
        capsys.readouterr()
    assert not silent
    assert marked > 1
    assert refused > 1


def test_evaluate_reads_no_damaged_model_or_sample(whole, tmp_path, capsys):
    rng = random.Random(1)
    asked = f"--prompts={whole / 'prompts.jsonl'}"
    shutil.copytree(whole / "run", tmp_path / "run")
    edit_number(tmp_path / "run" / "model" / "config.json", rng, None)
    model = f"--model={tmp_path / 'run' / 'model'}"
    out = f"--out={tmp_path / 'evaluation'}"
    assert status("evaluate", model, asked, out, *EVALUATED) == 2
    assert "model.sha256" in capsys.readouterr().err
    shutil.copytree(whole / "evaluation", tmp_path / "evaluation")
    swap_rows(tmp_path / "evaluation" / "samples.jsonl", rng, None)
    model = f"--model={whole / 'run' / 'model'}"
    assert status("evaluate", model, asked, out, *EVALUATED, "--resume") == 2
    assert "expected the" in capsys.readouterr().err


def test_a_run_under_way_says_what_no_snapshot_vouches_for(whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole / "run", out)
    for name in ("summary.json", "snapshots/grpo/4"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert status("verify", out) == 0
    assert "metrics.jsonl: " in capsys.readouterr().out  # bytes after snapshot 2
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    text = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(text.replace('"step": 1', '"step": 0', 1))
    assert status("verify", out) == 1
    error = capsys.readouterr().err
    assert "metrics.jsonl, rows up to snapshot 2 of grpo: SHA-256" in error


def test_a_sweep_does_not_count_a_damaged_run(whole, tmp_path):
    toml = tmp_path / "sweep.toml"
    toml.write_text(SWEEP)
    shutil.copytree(whole / "sweep", tmp_path / "sweep")
    cut(tmp_path / "sweep/runs/kl_coef=0/seed_0/metrics.jsonl", random.Random(0), None)
    with pytest.raises(InputError, match="expected the files that the run wrote"):
        sweep.main(sweep.Config(file=toml, out=tmp_path / "sweep"))


def test_a_paper_is_not_written_without_a_run_that_was_done(whole, tmp_path):
    """Without this check the paper would silently omit the run."""
    shutil.copytree(whole / "sweep", tmp_path / "sweep")
    summary = "runs/kl_coef=0/seed_0/summary.json"
    (tmp_path / "sweep" / summary).unlink()
    with pytest.raises(InputError, match=f"that the sweep wrote, got\n.*{summary}"):
        paper.main(paper.Config(sweep=tmp_path / "sweep", out=tmp_path / "paper"))
    assert not (tmp_path / "paper").exists()
