"""The choices of the KL, the published claims about them, and a sweep's figures."""

import json
from pathlib import Path

import pytest
from studies import finished
from studies.kl_in_practice import choices, figures, study

from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.sweeps import claims, declaration


@pytest.fixture(scope="module", params=study.WORLDS)
def sweep(request):
    return declaration.read(Path(study.__file__).with_name(f"{request.param}.py"))


def test_every_gradient_is_swept_once(sweep):
    """Covers all estimators, placements and directions, per token."""
    every = {
        Penalty(
            value_estimator=estimator,
            placement=placement,
            direction=direction,
            importance_weights=weights,
        ).gradient
        for estimator in ("k1", "k2", "k3", "exact")
        for placement in ("reward", "loss", "both")
        for direction, weights in (
            ("reverse", None),
            ("forward", None if estimator == "exact" else "token"),
        )
    }
    swept, weighted = [], []
    for cell in sweep.cells:
        options = dict(cell.options)
        own = {
            name.removeprefix("penalty."): value
            for name, value in options.items()
            if name.startswith("penalty.")
        }
        algorithm = dict(cell.values)["algorithm"]
        penalty = Penalty(**own)
        row = (algorithm, options["kl_coef"], penalty.gradient)
        (swept if penalty.per == "token" else weighted).append(row)
        if penalty.per != "token":
            assert penalty == choices.WEIGHTED_K2
    assert {gradient for *_, gradient in weighted} == {"full reverse"}
    assert len(weighted) == len(set(weighted)) == 2 * 3
    assert len(swept) == len(set(swept)) == 2 * (1 + 3 * len(every))
    for algorithm in ("ppo", "grpo"):
        kl_coefs = {coef for name, coef, _ in swept if name == algorithm}
        assert len(kl_coefs) == 4
        assert 0 in kl_coefs
        for kl_coef in kl_coefs - {0}:
            at = {gradient for *key, gradient in swept if key == [algorithm, kl_coef]}
            assert at == every
    assert len(sweep.seeds) >= 5


def test_published_claims_name_cells_of_the_sweep(sweep):
    nothing = {name: {cell: {} for cell in sweep.cells} for name in sweep.measures}
    lookup = claims.lookup_in(sweep.cells, nothing)
    assert len(sweep.claims) == 9 * 2 * 3
    for claim in sweep.claims.values():
        assert claims.answer(claim, lookup=lookup).answer == "not enough seeds"


@pytest.mark.parametrize(
    ("says", "measure", "numbers", "answer"),
    [
        # What each paper says, where it is so and where it is not.
        ("does better than k3", "gold", {"k1_reward": 1.0, "k3_loss": 0.0}, "yes"),
        ("does better than k3", "gold", {"k1_reward": 0.0, "k3_loss": 1.0}, "no"),
        ("is worse than k1", "gold", {"k1_reward": 1.0, "k3_reward": 0.0}, "yes"),
        ("does not hold", "kl", {"k1_loss": 9.0, "k1_reward": 1.0}, "yes"),
        ("quarter higher", "kl", {"k2_loss": 2.0, "k1_reward": 1.0}, "no"),
        ("quarter higher", "kl", {"k2_loss": 1.2, "k1_reward": 1.0}, "yes"),
        ("quarter lower", "kl", {"k2_loss": 0.5, "k1_reward": 1.0}, "no"),
        ("quarter lower", "kl", {"k2_loss": 0.9, "k1_reward": 1.0}, "yes"),
        ("less than k2", "kl", {"k3_loss": 2.0, "k2_loss": 1.0}, "yes"),
        ("k3 in the loss holds", "kl", {"none": 9.0, "k3_loss": 1.0}, "yes"),
        ("is not needed", "gold", {"none": 0.50, "k3_loss": 0.51}, "yes"),
        ("is not needed", "gold", {"none": 0.50, "k3_loss": 0.60}, "no"),
        ("from exploiting", "gold", {"k1_reward": 1.0, "none": -2.0}, "yes"),
        ("more entropy", "entropy", {"k3_loss": 1.0, "k2_loss": 0.5}, "yes"),
    ],
)
def test_published_claims_say_what_is_published(says, measure, numbers, answer):
    sweeps = [
        declaration.read(Path(study.__file__).with_name(f"{world}.py"))
        for world in study.WORLDS
    ]
    num_rows = 0
    for sweep in sweeps:
        values = {name: {cell: {} for cell in sweep.cells} for name in sweep.measures}
        for cell in sweep.cells:
            label = dict(cell.values)["kl"]
            choice = label if label == "none" else label.rpartition("_")[0]
            if choice in numbers:
                values[measure][cell] = dict.fromkeys(range(5), numbers[choice])
        lookup = claims.lookup_in(sweep.cells, values)
        for name, claim in sweep.claims.items():
            if says in name:
                assert claims.answer(claim, lookup=lookup).answer == answer
                num_rows += 1
    assert num_rows in (6, 12)  # two algorithms at three β, in one world or both


def run_of(folder, *, kl_coef, gold, kl, norms=(1.0,) * 5, estimator="k1"):
    """A run of five steps with these gold scores and KLs on the way and at the end."""
    folder.mkdir(parents=True)
    penalty = {"value_estimator": estimator, "placement": "reward", "per": "token"}
    config = {"algorithm": "ppo", "kl_coef": kl_coef, "batch_size": 10}
    config |= {"penalty": penalty | {"direction": "reverse"}}
    (folder / "config.json").write_text(json.dumps({"config": config, "versions": {}}))
    summary = {
        "reference": {"gold": 0.0},
        "policy": {"gold": gold[-1], "kl": kl[-1]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    steps = range(5)
    samples = [
        {"stage": "ppo", "step": step, "gold": gold[step], "kl": kl[step]}
        for step in steps
    ]
    rows = [
        {
            "stage": "ppo",
            "step": step,
            "policy/grad_norm": norms[step],
            "objective/entropy": 1.0 - step / 4,
            "response/length": 5.0 + step,
        }
        for step in steps
    ]
    for name, lines in (("samples", samples), ("metrics", rows)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def swept(tmp_path):
    cells = ["algorithm=ppo,kl=none", "algorithm=ppo,kl=k1_reward_0.5"]
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": dict.fromkeys(cells)}))
    for seed in (0, 1):
        none, penalised = (tmp_path / "runs" / cell / f"seed_{seed}" for cell in cells)
        # At √KL 0, 1, 2 and 3 gold is 0, 1, 0 and -2.
        run_of(
            none,
            kl_coef=0.0,
            gold=[0.0, 1.0, 0.0, -2.0, -2.0, -2.0],
            kl=[0.0, 1.0, 4.0, 9.0, 9.0, 9.0],
        )
        run_of(
            penalised,
            kl_coef=0.5,
            gold=[0.0, 0.75, 0.5, 0.9, 1.5 + seed, 1.5 + seed],
            kl=[0.0, 1.0, 2.0, 2.0, 2.25, 2.5],
            norms=(1.0, 6.0, 2.0, 2.0, 2.0),
        )
    return tmp_path


def test_figures_by_hand(swept, capsys):
    figures.main(finished.Options(swept))
    summary = json.loads((swept / "figures.json").read_text())
    assert summary["target"] == pytest.approx(0.5 * 2.0)  # of the best mean gain
    none, penalised = summary["cells"].values()
    assert (none["choice"], penalised["choice"]) == ("none", "k1 reward")
    assert none["fall"]["mean"] == pytest.approx(1 / 3 + 4 / 3)  # of means of three
    assert penalised["fall"]["mean"] == 0.0
    assert penalised["gradient"]["mean"] == 3.0
    assert penalised["entropy"]["mean"] == pytest.approx(0.5)
    # A step sampled 10 responses, of 5 tokens first, and of one more each time.
    assert none["by_seed"]["tokens"] == {"0": 50.0, "1": 50.0}
    assert penalised["by_seed"]["tokens"] == {"0": 260.0, "1": 260.0}
    # √2.25 is half way between 1 and 2, where the unpenalised gold is 0.5.
    assert penalised["by_seed"]["lead"] == pytest.approx({"0": 1.0, "1": 2.0})
    assert penalised["gold"]["interval"][0] < penalised["gold"]["mean"] == 2.0
    assert none["lead"] is None
    assert (swept / "plots" / "frontier.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "│ k1 reward │ 0.5 │ 2 ±6.4 (2) │ 2.5 ±0 (2) │" in printed


def test_a_run_farther_than_the_unpenalised_one_has_no_lead(swept):
    runs = {run.cell: run for run in finished.runs_of(swept) if run.seed == 0}
    none, penalised = runs.values()
    rows = [{"response/length": length} for length in (2.0, 3.0, 4.0)]
    assert figures.tokens_to(0.6, penalised.points(), rows, batch_size=10) == 20
    assert figures.tokens_to(9.0, penalised.points(), rows, batch_size=10) is None
    with (none.folder / "samples.jsonl").open("a") as file:
        row = {"stage": "ppo", "step": 5, "gold": -2.0, "kl": 16.0}
        file.write(json.dumps(row) + "\n")
    assert figures.lead(none, penalised) is None


def test_what_a_run_has_no_number_of(swept):
    """None where no step moved the policy, or where a norm was not finite."""
    run = finished.runs_of(swept)[0]
    for norms in ((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, "NaN", 1.0, 1.0, 1.0)):
        path = run.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [
            json.dumps(row | {"policy/grad_norm": norm})
            for row, norm in zip(rows, norms, strict=True)
        ]
        path.write_text("\n".join(lines) + "\n")
        measured = figures.measured(run, target=0.5, unpenalised=None)
        assert measured["gradient"] is None
        assert measured["lead"] is None
        assert measured["tokens"] == 50.0


def test_the_weighted_square_is_a_choice_of_its_own():
    """k2 per response is named apart from k2 in the loss, which is per token."""
    penalty = {"value_estimator": "k2", "placement": "loss", "direction": "reverse"}
    names = [
        figures.choice_of(
            finished.Finished(
                "cell",
                0,
                {"kl_coef": kl_coef, "penalty": penalty | {"per": per}},
                {},
                Path(),
            )
        )
        for kl_coef, per in ((0.2, "token"), (0.2, "response"), (0.0, "token"))
    ]
    assert names == ["k2 loss", choices.WEIGHTED, "none"]
    assert {name.split()[-1] for name in names[:2]} <= {*figures.MARKERS}
