"""The study of regularisers: its cells, their penalties, and a sweep's figures."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from studies import finished
from studies.policies.options import Config
from studies.policies.regularisers import Regulariser
from studies.policies.sums import training
from studies.regularisers import figures, held

from rlhf_jax.algorithms.policy_gradient.options import DPPO, GradientPenalty
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference import frozen
from rlhf_jax.sweeps import declaration

WORLDS = ("language", "arithmetic")


@pytest.mark.parametrize("world", WORLDS)
def test_the_sweep_has_every_cell_and_five_seeds(world):
    sweep = declaration.read(Path(figures.__file__).with_name(f"{world}.py"))
    labels = [dict(cell.values)["held"] for cell in sweep.cells]
    assert labels == [held.NONE, *held.HELD] == [*held.NAMES]
    assert len(sweep.seeds) == 5
    for cell in sweep.cells:
        options = dict(cell.options)
        own = {
            name.removeprefix("penalty."): value
            for name, value in options.items()
            if name.startswith("penalty.")
        }
        penalty = Penalty(**own)
        assert (penalty.placement == "loss") == (cell.name == "held=ema")
        assert options["kl_coef"] >= 0


def test_what_holds_a_policy_reaches_its_recipe():
    held = Regulariser(surrogate=DPPO(), gradient_penalty=GradientPenalty(0.1))
    recipe = training.programs_of(
        training.Config(out=Path(), regulariser=held).of_programs()
    ).algorithm
    assert recipe.surrogate == DPPO()
    assert recipe.gradient_penalty == GradientPenalty(0.1)
    fields = {field.name for field in dataclasses.fields(Regulariser)}
    assert {*held.of_recipe} == fields - {"reference_rate"}
    for config in (Config, training.Config):
        with pytest.raises(InputError, match="--regulariser: expected none with"):
            config(out=Path(), algorithm="ppo", regulariser=held)


def test_a_moving_average_of_the_policy():
    reference = frozen.freeze({"kernel": jnp.zeros(3)})
    policy = {"kernel": jnp.arange(3.0)}
    held = Regulariser(reference_rate=0.25)
    assert (held.moving, Regulariser().moving) == (("reference",), ())
    moved = held.moved(held.moved(reference, policy), policy)
    kernel = jax.tree.leaves(frozen.read(moved))[0]
    np.testing.assert_allclose(kernel, np.arange(3) * (1 - 0.75**2))
    assert Regulariser().moved(reference, policy) is reference


def run_of(folder, *, score, gold):
    """Eight evaluations, with the metrics of their steps."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {}, "versions": {}}))
    (folder / "summary.json").write_text("{}")
    samples = [
        {"stage": "rloo", "step": 2 * k, "score": score[k], "gold": gold[k]}
        | {"kl": k / 2}
        for k in range(8)
    ]
    rows = [
        {
            "stage": "rloo",
            "step": step,
            "objective/scores": -1.0,  # those of the look come before it
            "objective/entropy": 1 - step / 20,
            "response/distinct_fraction": 0.5,
        }
        for step in range(16)
    ]
    for name, lines in (("samples", samples), ("metrics", rows)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def swept(tmp_path):
    labels = (held.NONE, held.KL)
    cells = {f"held={label}": None for label in labels}
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": cells}))
    for seed in range(3):
        folders = [tmp_path / "runs" / cell / f"seed_{seed}" for cell in cells]
        run_of(folders[0], score=range(8), gold=[-k - seed / 10 for k in range(8)])
        slow = [k / 2 for k in range(8)]
        run_of(folders[1], score=slow, gold=[k / 10 for k in range(8)])
    return tmp_path


def test_figures_by_hand(swept, capsys):
    figures.main(finished.Options(swept))
    told = json.loads((swept / "figures.json").read_text())
    # Means of three looks: from 1 to 6 without a KL, from 0.5 with one.
    assert told["reference"] == pytest.approx((1 + 0.5) / 2)
    assert told["target"] == pytest.approx((0.75 + 6) / 2)
    free, held = told["cells"].values()
    at = told["target"]  # which the other never comes to
    assert held["target"] == {}
    assert free["target"]["gold"]["mean"] == pytest.approx(-at - 0.1)
    assert free["target"]["kl"]["mean"] == pytest.approx(at / 2)
    assert free["target"]["step"]["mean"] == pytest.approx(2 * at)
    assert free["target"]["entropy"]["mean"] == pytest.approx(1 - at / 10)
    assert held["end"]["score"]["mean"] == pytest.approx(3)
    assert held["end"]["gold"]["by_seed"] == pytest.approx(dict.fromkeys("012", 0.6))
    low, high = free["end"]["gold"]["interval"]
    assert low < -6.1 < high
    assert (swept / "plots" / "frontier.png").stat().st_size > 1000
    assert "published claims" in capsys.readouterr().out


def test_claims_are_answered_at_the_target_and_at_the_end():
    def cell(**numbers):
        by_seed = {
            name: {str(seed): x + seed / 100 for seed in range(5)}
            for name, x in numbers.items()
        }
        return {"target": by_seed, "end": {k: dict(v) for k, v in by_seed.items()}}

    cells = {name: cell(gold=0.0, kl=2.0, entropy=1.0) for name in held.NAMES}
    cells[held.EMA] = cell(gold=1.0, kl=2.0, entropy=1.0)
    cells[held.TO_GO] = cell(gold=0.0, kl=1.0, entropy=0.5)
    answers = {row["says"]: row["answer"] for row in figures.answered(cells)}
    assert answers["a moving average: more is learned"] == "yes"
    assert answers["credit to later tokens: lower drift"] == "yes"
    assert answers["and higher entropy"] == "no"


def test_a_score_that_is_never_reached():
    rows = [
        {"score": k, "gold": 1.0, "kl": 0.0, "entropy": 1.0, "distinct": 1.0, "step": k}
        for k in (1.0, 0.5, 2.0)
    ]
    assert figures.passage(rows, target=3.0) is None
    assert figures.passage(rows, target=0.5)["step"] == 1.0  # from the first look on
    assert figures.passage(rows, target=1.25)["step"] == pytest.approx(1.25)
