"""A damaged snapshot is refused and named, and the run resumes from an older one.

A run is damaged as disks and people do it: bits flip, files end early or are gone.
"""

import dataclasses
import gc
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import metrics, run
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots import integrity, resume
from rlhf_jax.runs.snapshots.files import check, read_arrays
from rlhf_jax.runs.snapshots.integrity import LIST, DamagedError
from rlhf_jax.runs.snapshots.snapshots import Snapshots, _flat, _raw
from rlhf_jax.train import main

ADAM = optax.adam(1e-2)
REFERENCE = toys.freeze({"w": toys.array(np.arange(12).reshape(3, 4))})
STAGES = {"first": 4, "second": 6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    snapshot_every: int = 2
    progress: bool = False


@jax.jit
def update(state, key):
    """Adam on noise: parameters, moments and a count, as in a trainer."""
    noise = jax.random.normal(key, state["w"].shape)
    change, moments = ADAM.update({"w": noise}, state["adam"])
    moved = optax.apply_updates({"w": state["w"]}, change)
    return {**state, "w": jax.tree.leaves(moved)[0], "adam": moments}, noise.sum()


def initial():
    w = jnp.linspace(-1, 1, 300).reshape(3, 100)
    return {
        "w": w,
        "adam": ADAM.init({"w": w}),
        "reference": REFERENCE,
        "key": jax.random.key(7),
        "kl_coef": jnp.float32(0.2),
    }


def play(out, **options):
    """Two stages; the second begins with the first one's result."""
    state = initial()
    with run.Run(Config(out=out, **options), num_steps=STAGES) as job:
        for name in STAGES:
            with job.stage(name, state, meta={"data": "a"}) as stage:
                for step in stage.steps():
                    key = jax.random.fold_in(state["key"], step)
                    stage.state, total = update(stage.state, key)
                    stage.end_step(step, {"total": (total, None)}, [{"text": name}])
            state = stage.state
    return bits(state)


def bits(state):
    raw = {path: _raw(leaf) for path, leaf in _flat(state).items()}
    return {path: np.asarray(leaf).tobytes() for path, leaf in raw.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, play(out)


@pytest.fixture
def out(finished, tmp_path):
    """A copy of a finished run to damage."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def rows(out):
    return {
        name: (out / f"{name}.jsonl").read_bytes() for name in ("metrics", "samples")
    }


def flip(path, *, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path, *, size):
    path.write_bytes(path.read_bytes()[:size])


def damages(folder, *, count, seed=0):
    """Bit flips, truncations and losses at random places, as (file, change)."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    rng = np.random.default_rng(seed)
    for number in range(count):
        # Every second flip anywhere in the folder, every other in any file of it.
        shares = np.array(sizes) / sum(sizes) if number % 2 else None
        chosen = int(rng.choice(len(files), p=shares))
        name, size = files[chosen].relative_to(folder), sizes[chosen]
        kind = ("flip", "cut", "flip", "flip", "missing", "flip")[number % 6]
        place = int(rng.integers(size * 8))
        yield (
            f"{kind} {name} {place}",
            {
                "flip": lambda path, at=place: flip(path, bit=at),
                "cut": lambda path, at=place: cut(path, size=at // 8),
                "missing": Path.unlink,
            }[kind],
            name,
        )


def restored_with_errors(folder, step, capsys):
    """(error, None) of a restore that fails; otherwise (its note, the arrays' bits)."""
    capsys.readouterr()
    try:
        with Snapshots(folder) as snapshots:
            restored, _ = snapshots.restore(step, like=initial())
    except DamagedError as damage:
        return str(damage), None
    return capsys.readouterr().err, bits(restored)


def verified(out, capsys):
    capsys.readouterr()
    try:
        main.main(["verify", str(out)])
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err
    return 0, capsys.readouterr().out


def sweep(out, capsys, *, count, seed):
    """Damages a snapshot in one place at a time; every damage must be reported."""
    folder = out / "snapshots" / "second"
    whole = folder.parent.parent / "whole"
    shutil.copytree(folder / "6", whole)
    kinds = set()
    for what, change, name in damages(whole, count=count, seed=seed):
        change(folder / "6" / name)
        error, restored = restored_with_errors(folder, 6, capsys)
        status, verdict = verified(out, capsys)
        if what.startswith(f"missing {LIST}"):
            # As after a kill; what the arrays are is known by their digests.
            assert restored is not None, what
            assert f"{LIST} is missing" in error, what
            assert (status, f"{LIST} is" in verdict) == (0, True), what
        else:
            assert restored is None, f"silent at restore: {what}"
            assert f"{folder / '6'} is damaged" in error, what
            assert status == 1, f"silent in verify: {what}"
            assert f"{folder / '6'} is damaged" in verdict, what
        kinds.add(what.split()[0])
        shutil.rmtree(folder / "6")
        shutil.copytree(whole, folder / "6")
    assert kinds == {"flip", "cut", "missing"}
    assert verified(out, capsys)[0] == 0


@pytest.mark.slow
def test_damages_are_told_at_restore_and_by_verify(out, capsys):
    sweep(out, capsys, count=12, seed=1)


@pytest.mark.long
def test_none_of_160_damages_is_silent(out, capsys):
    sweep(out, capsys, count=160, seed=0)


@pytest.mark.slow
def test_every_file_is_missed(out, capsys):
    folder = out / "snapshots" / "second"
    files = [path for path in (folder / "6").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        path.unlink()
        errors, _ = restored_with_errors(folder, 6, capsys)
        name = path.relative_to(folder / "6").as_posix()
        expected = f"{LIST} is missing" if name == LIST else f"\n  {name}: missing"
        assert expected in errors
        path.write_bytes(content)


@pytest.mark.long
@pytest.mark.slow
def test_digests_alone_let_no_changed_array_pass(out, capsys, monkeypatch):
    """This protects files so large that the list has only their sizes."""
    monkeypatch.setattr(integrity, "MAX_READ", -1)
    # Of an array that orbax cannot read it drops the readers of the others.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    folder = out / "snapshots" / "second"
    integrity.write_list(folder / "6")
    data = max((folder / "6").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = data.read_bytes()
    _, saved = restored_with_errors(folder, 6, capsys)
    rng = np.random.default_rng(0)
    changed = 0
    for bit in rng.choice(len(content) * 8, 60, replace=False):
        flip(data, bit=int(bit))
        errors, restored = restored_with_errors(folder, 6, capsys)
        assert restored in (None, saved), f"bit {bit}"
        changed += restored is None
        assert restored is not None or "is damaged" in errors
        data.write_bytes(content)
    assert changed > 30
    gc.collect()


# What the digests are.


def test_the_meta_has_the_digest_of_every_array(out):
    folder = out / "snapshots" / "second"
    meta = json.loads((folder / "6" / "meta" / "metadata").read_text())
    arrays = read_arrays(folder, 6, matches=lambda path: True)
    assert {"w", "adam/0/mu/w", "adam/0/nu/w", "adam/0/count", "key"} < arrays.keys()
    assert meta["digests"]["arrays"] == {
        path: "{:08x}{:08x}".format(*oracles.digest(array, path))
        for path, array in arrays.items()
    }


def saved_again(folder, step, change):
    """The snapshot as if orbax had written the file with `change`."""
    arrays = read_arrays(folder, step, matches=lambda path: True)
    arrays = {path: np.array(array) for path, array in arrays.items()}
    change(arrays)
    digests = json.loads((folder / str(step) / "meta" / "metadata").read_text())
    shutil.rmtree(folder / str(step))
    with Snapshots(folder) as snapshots:
        snapshots.save(step, arrays=jax.tree.map(jnp.asarray, arrays), meta={})
    (folder / str(step) / "meta" / "metadata").write_text(json.dumps(digests))
    (folder / str(step) / LIST).unlink()


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    "path",
    [
        *("w", "key"),
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in ("adam/0/mu/w", "adam/0/nu/w", "adam/0/count", "kl_coef")
        ),
    ],
)
def test_one_bit_of_one_array_is_named(out, path, capsys):
    """Every file is sound; only the digests of trained arrays can detect it."""
    folder = out / "snapshots" / "second"

    def change(arrays):
        arrays[path].reshape(-1).view(np.uint8)[1] ^= 4

    saved_again(folder, 6, change)
    errors, restored = restored_with_errors(folder, 6, capsys)
    assert restored is None
    (line,) = errors.splitlines()[1:]
    assert line.startswith(f"  {path}: digest ")
    status, errors = verified(out, capsys)
    assert status == 1
    assert f"\n  {path}: digest " in errors


def test_a_changed_meta_is_told(out, capsys):
    file = out / "snapshots" / "second" / "6" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(meta | {"data": "b"}))
    (file.parents[1] / LIST).unlink()
    errors, _ = restored_with_errors(file.parents[2], 6, capsys)
    assert "\n  meta: digest " in errors
    status, errors = verified(out, capsys)
    assert (status, "\n  meta: digest " in errors) == (1, True)


@pytest.mark.slow
def test_a_snapshot_of_before_digests_is_read_with_a_note(out, finished, capsys):
    folder = out / "snapshots" / "second"
    for step in (4, 6):
        (folder / str(step) / LIST).unlink()
        (folder / str(step) / "commit_success.txt").unlink()  # of orbax since 0.12.3
        file = folder / str(step) / "meta" / "metadata"
        meta = json.loads(file.read_text())
        del meta["digests"]
        file.write_text(json.dumps(meta))
    assert play(out, resume=True) == finished[1]
    note = f"note: {folder / '6'}: has no digests, being of an older version"
    assert note in capsys.readouterr().err
    status, errors = verified(out, capsys)
    assert (status, errors.count("has no digests")) == (0, 2)


# Going on from an older snapshot.


def damage(out, stage, step):
    flip(max((out / "snapshots" / stage / str(step)).rglob("d/*")), bit=77)


def refusal(out, **options):
    before = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}
    with pytest.raises(DamagedError) as error:
        play(out, resume=True, **options)
    after = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}
    assert after == before
    return str(error.value)


@pytest.mark.slow
def test_a_damaged_newest_snapshot_is_gone_back_from(out, finished, capsys):
    folder = out / "snapshots" / "second"
    damage(out, "second", 6)
    message = refusal(out)
    assert message.startswith(f"{folder / '6'} is damaged: expected what was saved")
    assert "\nsnapshot 4 of second is whole: go on from it with --resume-from 4" in (
        message
    )
    with pytest.raises(
        InputError, match=r"--resume-from, .* expected one of 0, 4, 6, got"
    ):
        play(out, resume_from=3)
    assert play(out, resume_from=4) == finished[1]
    assert rows(out) == rows(finished[0])
    aside = folder / "6.set-aside"
    assert f"goes on from snapshot 4; a newer one is set aside as {aside}" in (
        capsys.readouterr().err
    )
    # What was computed again stands in its place, and is what the next resume takes.
    assert resume.steps(folder) == [4, 6]
    assert check(folder, 6).verdict == "whole"
    assert play(out, resume=True) == finished[1]
    damage(out, "second", 6)
    assert play(out, resume_from=4) == finished[1]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("4", "6", "6.set-aside", "6.set-aside-2")
    ]


@pytest.mark.slow
def test_a_run_killed_after_it_went_back_goes_on(out, finished, monkeypatch):
    damage(out, "second", 6)
    monkeypatch.setattr(run.Stage, "end_step", None)
    with pytest.raises(TypeError):
        play(out, resume_from=4)
    monkeypatch.undo()
    assert [row["step"] for row in metrics.read(out / "metrics.jsonl")][-1] == 3
    assert play(out, resume=True) == finished[1]
    assert rows(out) == rows(finished[0])


@pytest.mark.slow
def test_nothing_whole_is_begun_again(out, finished):
    for step in (4, 6):
        damage(out, "second", step)
    message = refusal(out)
    assert "no older snapshot of second is whole: start the stage again with" in message
    assert "--resume-from 0" in message
    with pytest.raises(DamagedError, match="second/4 is damaged"):
        play(out, resume_from=4)
    assert play(out, resume_from=0) == finished[1]
    assert rows(out) == rows(finished[0])


@pytest.mark.slow
def test_the_number_is_of_the_stage_that_is_damaged(out, finished):
    """An earlier stage goes back to its older snapshot; later stages stay."""
    damage(out, "first", 4)
    assert "snapshot 2 of first is whole" in refusal(out)
    modified = (out / "snapshots" / "second" / "6" / LIST).stat().st_mtime_ns
    assert play(out, resume_from=2) == finished[1]
    assert rows(out) == rows(finished[0])
    assert (out / "snapshots" / "second" / "6" / LIST).stat().st_mtime_ns == modified


def test_going_back_from_a_whole_snapshot(out, finished):
    assert play(out, resume_from=4) == finished[1]
    assert rows(out) == rows(finished[0])
    with pytest.raises(
        InputError, match="resume_from: expected a number of at least 0"
    ):
        Config(out=out, resume_from=-1)
