"""A run's proof of its frozen models, while it runs and from disk."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from tiers import one_in

from rlhf_jax import drift, frozen
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.models import leaves
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.frozen import ReferenceMovedError
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Mix, Reset
from rlhf_jax.runs import run
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots import files, proof
from rlhf_jax.runs.snapshots.snapshots import Snapshots, _flat
from rlhf_jax.train import main


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_steps: int = 8
    snapshot_every: int = 2
    keep_snapshots: int = 9
    progress: bool = False


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"a": (2, 4, 4), "b": (2, 4, 4)}
    layers = {
        name: toys.array(rng.normal(size=shape)) for name, shape in shapes.items()
    }
    return {"embed": {"tokens": toys.array(np.ones((4, 4)))}, "layers": layers}


@functools.cache
def stored():
    return frozen.freeze(weights(), dtype="int8", memory="pinned_host")


JUDGE = toys.freeze({"score": toys.array(range(3))})
REFERENCE = toys.freeze(weights())
MIXED = Lifecycle(Mix(3, 0.25))
LIVES = {
    "frozen": lifecycle.FROZEN,
    "reset": Lifecycle(Reset(3)),
    "mixed": MIXED,
}


drift_of = jax.jit(drift.weight_drift)


@jax.jit
def train(policy, reference, key):
    """Moves the policy towards the reference, with noise, like a penalised update."""
    keys = iter(jax.random.split(key, 8))
    return jax.tree.map(
        lambda w, r: w + 0.1 * (r - w) + 0.1 * jax.random.normal(next(keys), w.shape),
        policy,
        leaves.read(frozen.read(reference)),
    )


def play(
    out,
    *,
    life=lifecycle.FROZEN,
    reference=REFERENCE,
    judge=JUDGE,
    stop=None,
    meddle=lambda step, reference: reference,
    **config,
):
    """A run without a model: a moving policy and a reference with a lifecycle."""
    key = jax.random.key(3)
    policy = jax.tree.map(jnp.copy, weights())
    state = {"policy": policy, "reference": reference, "root_key": key}
    config = Config(out=out, **config)
    with (
        run.Run(config, num_steps={"ppo": config.num_steps}) as job,
        job.stage(
            "ppo",
            state,
            meta={},
            beside={"judge": judge},
            moving=("reference",) if life.moves else (),
        ) as stage,
    ):
        for step in stage.steps():
            if step == stop:
                break
            policy, reference = stage.state["policy"], stage.state["reference"]
            policy = train(policy, reference, jax.random.fold_in(key, step))
            moved = drift_of(policy, reference.stored)["absolute"]
            reference = lifecycle.after_step(
                reference, policy, step=step, lifecycle=life
            )
            stage.state |= {"policy": policy, "reference": meddle(step, reference)}
            stage.end_step(step, {"drift": (moved, jnp.ones(()))})
    return stage.state


def rooted(out):
    """{step: (fingerprint, verdict)} of the reference, by verify."""
    rows = proof.check_run(out)
    assert {row.stage for row in rows} == {"ppo"}
    assert all(row.moved is None for row in rows)
    return {
        row.step: (row.fingerprint, row.verdict)
        for row in rows
        if row.model == "reference"
    }


def bits(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state) if x.ndim]


@pytest.mark.cases(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"dtype": "int8", "memory": "pinned_host"}])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(tmp_path, life, how):
    reference = frozen.freeze(weights(), **how)
    whole = play(tmp_path / "whole", life=life, reference=reference)
    play(tmp_path / "parts", life=life, reference=reference, stop=5)
    # What is given on resume is the initial reference again, not what it has become.
    again = play(tmp_path / "parts", life=life, reference=reference, resume=True)
    assert bits(again["policy"]) == bits(whole["policy"])
    assert bits(again["reference"]) == bits(whole["reference"])
    metrics = [
        (tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")
    ]
    assert metrics[0] == metrics[1]
    assert (bits(whole["reference"]) != bits(reference)) is life.moves
    assert rooted(tmp_path / "whole") == rooted(tmp_path / "parts")


@pytest.mark.slow
def test_what_verify_says_of_each_life(finished, tmp_path):
    start = frozen.fingerprint_of(stored()).root
    still = (start, "as it began")
    assert rooted(finished) == dict.fromkeys((2, 4, 6, 8), still)
    start = frozen.fingerprint_of(REFERENCE).root
    for name in ("reset", "mixed"):
        play(tmp_path / name, life=LIVES[name])
        roots = rooted(tmp_path / name)
        assert roots[2] == (start, "as it began")  # the first move ends step 2
        assert roots[4][0] != start
        assert len({root for root, _ in roots.values()}) == 3  # after 3 and 6 steps
        assert {roots[step][1] for step in (4, 6, 8)} == {"moved by its lifecycle"}
    judged = [
        row for row in proof.check_run(tmp_path / "mixed") if row.model == "judge"
    ]
    assert len(judged) == 4
    for row in judged:
        assert row.fingerprint == frozen.fingerprint_of(JUDGE).root
        assert row.verdict == "as it began, held outside"


@pytest.mark.slow
def test_the_meta_of_a_snapshot_holds_every_leaf(tmp_path):
    end = play(tmp_path, life=MIXED)["reference"]
    meta = json.loads((tmp_path / "snapshots/ppo/8/meta/metadata").read_text())
    record = meta["frozen"]["reference"]
    names = ["embed/tokens", "layers/a", "layers/b"]
    for form, words in (("source", end.source_digests), ("stored", end.stored_digests)):
        digests = record["now"][form]["leaves"]
        assert list(digests) == names
        expected = ["".join(f"{word:08x}" for word in row) for row in np.asarray(words)]
        assert list(digests.values()) == expected
    start = dataclasses.asdict(frozen.fingerprint_of(REFERENCE))
    assert record["initial"] == {"source": start, "stored": start}
    assert record["moves"] is True
    assert meta["frozen"]["judge"]["moves"] is False


@pytest.mark.slow
def test_a_model_frozen_of_a_stored_one_is_on_record_too(tmp_path):
    """Leaves of an int8 source have no float32 path, so they are numbered."""
    source = frozen.freeze(weights(), dtype="int8").stored
    reference = frozen.freeze(source, dtype="float32")
    play(tmp_path, reference=reference, num_steps=2)
    (row,) = [row for row in proof.check_run(tmp_path) if row.model == "reference"]
    assert (row.moved, row.leaves) == (None, 3)
    records = files.read_meta(tmp_path / "snapshots" / "ppo", 2)["frozen"]
    names = list(records["reference"]["now"]["source"]["leaves"])
    assert names == ["0", "1", "2", "3", "4", "5"]


# While it runs.


@pytest.mark.slow
def test_mixing_when_no_lifecycle_asks_for_it_stops_the_run(tmp_path):
    """The new digests are right; only the initial digest can detect it."""

    def meddle(step, reference):
        return (
            lifecycle.mix(reference, weights(1), rate=0.5) if step == 4 else reference
        )

    with pytest.raises(
        ReferenceMovedError,
        match=r"reference: .* others in layers/a, layers/b, and no lifecycle moves it",
    ):
        play(tmp_path, meddle=meddle)
    assert sorted(rooted(tmp_path)) == [2, 4]  # the good ones stay


@pytest.mark.parametrize("life", one_in(3, LIVES.values()), ids=LIVES.keys())
def test_a_write_into_the_reference_stops_the_run_under_every_life(tmp_path, life):
    def meddle(step, reference):
        if step < 5:
            return reference
        layers = {**reference.stored["layers"]}
        layers["b"] = layers["b"].at[1, 2, 3].add(1e-6)
        return reference.replace(stored={**reference.stored, "layers": layers})

    with pytest.raises(ReferenceMovedError, match=r"others in layers/b\. Something"):
        play(tmp_path, life=life, meddle=meddle)
    assert sorted(rooted(tmp_path)) == [2, 4]


def test_a_reward_model_that_moves_stops_the_run(tmp_path):
    writable = np.arange(3, dtype=np.float32)
    judge = frozen.freeze({"score": writable}).replace(stored={"score": writable})

    def meddle(step, reference):
        writable[1] += step == 3
        return reference

    with pytest.raises(ReferenceMovedError, match="got others in score"):
        play(tmp_path, judge=judge, meddle=meddle)


def test_a_model_that_moved_before_its_stage_stops_it_at_once(tmp_path):
    reference, judge = (
        reference.replace(stored=jax.tree.map(lambda x: x + 1, reference.stored))
        for reference in (REFERENCE, JUDGE)
    )
    for moved in ({"reference": reference}, {"judge": judge}):
        with pytest.raises(ReferenceMovedError, match="the parameters that were froz"):
            play(tmp_path / next(iter(moved)), **moved)
        assert not (tmp_path / next(iter(moved)) / "metrics.jsonl").read_bytes()


# On resume.


@pytest.mark.slow
def test_a_resume_with_other_models_is_refused(tmp_path):
    play(tmp_path, life=MIXED, stop=5)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def refusal(**changes):
        with pytest.raises(InputError) as error:
            play(tmp_path, resume=True, **{"life": MIXED, **changes})
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        return str(error.value)

    other = frozen.freeze({**weights(), "layers": weights(1)["layers"]})
    assert "snapshot 4 of ppo: reference, as source: " in refusal(reference=other)
    assert "others in layers/a, layers/b; resume with what" in refusal(reference=other)
    judge = frozen.freeze({"score": jnp.arange(3.0) + 1})
    assert "others in score; resume" in refusal(judge=judge)
    message = "expected reference to be frozen for the run, as this run has it"
    assert message in refusal(life=lifecycle.FROZEN)
    with pytest.raises(InputError, match="only a snapshot's own can move"):
        proof.Proof({}, beside={"judge": JUDGE}, moving=("judge",))


@pytest.mark.slow
def test_the_source_is_checked_where_the_stored_form_cannot_tell(tmp_path):
    """A last bit of float32 that bfloat16 rounds away means another checkpoint."""
    start = weights()
    nudged = jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), start)
    one, two = (frozen.freeze(tree, dtype="bfloat16") for tree in (start, nudged))
    np.testing.assert_array_equal(one.stored_digests, two.stored_digests)
    play(tmp_path, reference=one, stop=5)
    with pytest.raises(InputError, match="reference, as source: expected fingerprint"):
        play(tmp_path, reference=two, resume=True)


# From disk.


def tampered(source, out, change, *, step=8):
    """A copy of a run whose newest snapshot is saved again with other arrays."""
    shutil.copytree(source, out)
    folder = out / "snapshots" / "ppo"
    arrays = files.read_arrays(folder, step, matches=lambda path: True)
    meta = files.read_meta(folder, step)
    shutil.rmtree(folder / str(step))
    arrays = {path: np.array(array) for path, array in arrays.items()}
    change(arrays, meta)
    with Snapshots(folder, keep=9) as snapshots:
        snapshots.save(step, arrays=jax.tree.map(jnp.asarray, arrays), meta=meta)
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    play(out, reference=stored())
    return out


def flip(path):
    def change(arrays, meta):
        arrays[path].view(np.uint8).reshape(-1)[5] ^= 1

    return change


def swap_digests(arrays, meta):
    arrays["reference/stored_digests"] = arrays["reference/stored_digests"][::-1]


def consistent_replacement(arrays, meta):
    """Arrays, digests and meta agree, but on a model that the run never had."""
    model = frozen.freeze(weights(1), dtype="int8", memory="pinned_host")
    saved = {"reference": model}
    arrays.update({path: np.asarray(leaf) for path, leaf in _flat(saved).items()})
    record = proof.Proof(saved, beside={}).check(saved)["reference"]
    meta["frozen"]["reference"]["now"] = record["now"]


def another_model(arrays, meta):
    """Other arrays with matching digests; only the meta disagrees."""
    saved = {"reference": frozen.freeze(weights(1))}
    arrays.update({path: np.asarray(leaf) for path, leaf in _flat(saved).items()})


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (
            another_model,
            "snapshot 8 of ppo: reference: .* others in embed/tokens, layers/a",
        ),
        (flip("reference/stored/layers/b"), "got others in layers/b. Something wrote"),
    ],
)
def test_a_tampered_snapshot_is_not_resumed(tmp_path, change, moved):
    """Also under a lifecycle, where the initial digest cannot detect it."""
    play(tmp_path / "run", life=MIXED)
    out = tampered(tmp_path / "run", tmp_path / "tampered", change)
    with pytest.raises(ReferenceMovedError, match=moved):
        play(out, life=MIXED, resume=True)


def another_beginning(arrays, meta):
    consistent_replacement(arrays, meta)
    record = meta["frozen"]["reference"]
    record["initial"] = record["now"]


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("change", "moved"),
    one_in(
        3,
        [
            (
                flip("reference/stored/layers/a/held/values"),
                "others in layers/a/values",
            ),
            (
                flip("reference/stored/layers/b/held/scales"),
                "others in layers/b/scales",
            ),
            (flip("reference/source_digests"), "expected the source digests"),
            (swap_digests, "expected the stored digests"),
            (
                consistent_replacement,
                "others in layers/a/values, layers/a/scales, layers/b",
            ),
            (another_beginning, "others in layers/a/values, layers/a/scales, layers/b"),
        ],
    ),
)
def test_verify_names_what_was_tampered_with(finished, tmp_path, change, moved):
    out = tampered(finished, tmp_path / "run", change)
    rows = proof.check_run(out)
    assert [row.step for row in rows if row.moved is not None] == [8]
    (row,) = [row for row in rows if row.moved is not None]
    assert row.model == "reference"
    assert moved in row.moved
    assert row.verdict == "MOVED"


@pytest.mark.slow
def test_verify_sees_nothing_amiss_where_nothing_is(finished, tmp_path):
    out = tampered(finished, tmp_path / "run", lambda arrays, meta: None)
    assert rooted(out) == rooted(finished)
    # The policy is no business of its.
    out = tampered(finished, tmp_path / "other", flip("policy/layers/a"))
    assert rooted(out) == rooted(finished)


def test_verify_writes_nothing(finished):
    def contents():
        return {path: path.stat().st_mtime_ns for path in sorted(finished.rglob("*"))}

    before = contents()
    proof.check_run(finished)
    assert contents() == before


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("file", one_in(2, ["meta/metadata", "arrays/_METADATA"]))
def test_a_damaged_snapshot_is_told(finished, tmp_path, file, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    damaged = out / "snapshots/ppo/4" / file
    size = damaged.stat().st_size
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(StopError, match="ppo/4 is damaged: expected what was saved"):
        proof.check_run(out)
    printed, error = verified(capsys, out, 1)
    assert printed.count("DAMAGED") == 1
    assert f"ppo/4 is damaged: expected what was saved, got\n  {file}: " in error
    assert f"{size - 9} bytes, expected {size}\n" in error
    # The frozen models of the others are verified all the same.
    assert printed.count("as it began") == 6


# The command.


def verified(capsys, out, status):
    """(stdout, stderr) of `rlhf-jax verify OUT`, which must exit with this status."""
    if status == 0:
        main.main(["verify", str(out)])
    else:
        with pytest.raises(SystemExit) as exit_:
            main.main(["verify", str(out)])
        assert exit_.value.code == status
    return capsys.readouterr()


@pytest.mark.slow
def test_verify_exits_with_0_1_or_2(finished, tmp_path, capsys):
    printed, _ = verified(capsys, finished, 0)
    root = rooted(finished)[8][0]
    assert printed.count(root[:12]) == 4
    assert "8 verified, none moved" in printed
    path = "reference/stored/layers/a/held/values"
    out = tampered(finished, tmp_path / "run", flip(path))
    printed, error = verified(capsys, out, 1)
    assert printed.count("MOVED") == 1
    expected = f"ppo, snapshot 8, reference: expected fingerprint {root}, got "
    assert error.startswith(f"stopped: {expected}")
    assert error.endswith(", others in layers/a/values\n")
    _, error = verified(capsys, tmp_path / "none", 2)
    assert "expected a run folder" in error


@pytest.mark.slow
def test_the_console_script_tells_of_damaged_arrays(finished, tmp_path):
    """Runs in its own process, as orbax leaves threads that end in errors."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for file in (out / "snapshots/ppo/4/arrays").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:-9])
    command = "import sys; from rlhf_jax.train.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", command, "verify", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ppo/4 is damaged: expected what was saved, got" in done.stderr


def test_folders_that_cannot_be_verified(tmp_path):
    with pytest.raises(InputError, match="snapshots/STAGE/, got no such folder"):
        proof.check_run(tmp_path / "none")
    with pytest.raises(InputError, match="snapshots/STAGE/, got none; give the --out"):
        proof.check_run(tmp_path)
    folder = tmp_path / "snapshots" / "sft"
    with Snapshots(folder) as snapshots:
        snapshots.save(1, arrays={"x": jnp.ones(1)}, meta={})
    assert proof.check_run(tmp_path) == []  # no frozen model, but arrays to check
