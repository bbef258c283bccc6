"""The comparison of algorithms: figures by hand and from a sweep."""

import json

import pytest
from studies import finished
from studies.compare_algorithms import comparison
from studies.compare_algorithms import figures as compared

# --- the figures ------------------------------------------------------------------


def row(algorithm, seed, kl, gold, **others):
    measured = {"score": 2 * gold, "fluency": 0.9, "distinct": 1.0}
    return {"algorithm": algorithm, "seed": seed, "kl": kl, "gold": gold} | (
        measured | others
    )


@pytest.fixture
def rows():
    """Two seeds: best-of-n reaches a KL of 1 in the first and 4 in the second."""
    before = [row("reference", 0, 0.0, 0.0), row("reference", 1, 0.0, 0.5)]
    after = [
        row("ppo", 0, 0.25, 1.0),
        row("dpo", 0, 9.0, -1.0),
        *(
            row("best_of_n", 0, kl, gold, n=n, kl_bound=1.1 * kl)
            for n, kl, gold in ((2, 0.25, 0.4), (4, 1.0, 0.8))
        ),
        row("ppo", 1, 1.0, 1.5),
        row("dpo", 1, 1.0, 0.5),
        *(
            row("best_of_n", 1, kl, gold, n=n, kl_bound=1.1 * kl)
            for n, kl, gold in ((2, 0.25, 0.7), (4, 4.0, 1.0))
        ),
    ]
    points = [
        row(name, seed, kl, gold, step=step)
        for seed in (0, 1)
        for name in ("ppo", "dpo")
        for step, kl, gold in ((0, 0.0, 0.1), (4, 0.5 + seed, 0.3))
    ]
    return points, before, after


def test_figures_by_hand(rows):
    summary = comparison.summarise(*rows, kl_coef=0.5)
    assert summary["num_seeds"] == 2
    assert summary["reference"]["gold"] == 0.25
    assert list(summary["policies"]) == ["PPO", "DPO", "best of 2", "best of 4"]
    of_ppo = summary["policies"]["PPO"]
    assert of_ppo["kl"] == pytest.approx(0.625)
    assert of_ppo["gold"] == pytest.approx(1.25)
    assert of_ppo["of_seeds"]["net_gold"] == pytest.approx([1 - 0.125, 1.5 - 0.5])
    assert of_ppo["net_score"] == pytest.approx((2 - 0.125 + 3 - 0.5) / 2)
    # √KL 1 is a third of the way from 0.5 (gold 0.7) to 2 (gold 1.0).
    assert of_ppo["of_seeds"]["lead"] == pytest.approx([0.6, 1.5 - 0.8])
    of_dpo = summary["policies"]["DPO"]
    assert of_dpo["of_seeds"]["lead"][0] is None  # no n goes so far
    assert of_dpo["of_seeds"]["lead"][1] == pytest.approx(0.5 - 0.8)
    assert of_dpo["lead"] is None
    of_two = summary["policies"]["best of 2"]
    assert (of_two["n"], of_two["kl_bound"]) == (2, pytest.approx(0.275))
    assert of_two["lead"] == pytest.approx(0)
    assert summary["paths"]["ppo"] == [
        {"step": step, "kl": kl, "gold": gold, "score": 2 * gold}
        | {"fluency": pytest.approx(0.9), "distinct": 1.0}
        for step, kl, gold in ((0, 0.0, 0.1), (4, 1.0, 0.3))
    ]
    json.dumps(summary, allow_nan=False)


def test_a_policy_between_the_reference_and_the_smallest_n_has_a_lead():
    best = [row("best_of_n", 0, 1.0, 2.0, n=2, kl_bound=1.0)]
    reference = row("reference", 0, 0.0, 1.0)
    near = row("ppo", 0, 0.25, 1.2)
    assert comparison.lead(near, reference, best) == pytest.approx(1.2 - 1.5)
    # An estimate of the KL may be below 0, and there may be no best-of-n at all.
    at_start = row("ppo", 0, -1e-9, 1.2)
    assert comparison.lead(at_start, reference, best) == pytest.approx(0.2)
    assert comparison.lead(near, reference, []) is None


@pytest.mark.slow
def test_the_table_and_the_plot(rows, tmp_path, capsys):
    summary = comparison.summarise(*rows, kl_coef=0.5)
    comparison.tell(summary, kl_coef=0.5)
    printed = capsys.readouterr().out
    for text in ("PPO", "best of 4", "±", "—", "lead in gold"):
        assert text in printed
    comparison.plot(tmp_path, *rows)
    assert (tmp_path / "plots" / "comparison.png").stat().st_size > 10_000
    _, before, after = rows
    without = [of for of in after if "n" not in of]
    comparison.tell(comparison.summarise([], before, without, kl_coef=1.0), kl_coef=1.0)
    comparison.plot(tmp_path, [], before, without)


def test_figures_of_a_sweep(tmp_path):
    """The folder of a sweep gives the same figures as its rows."""
    cells = {}
    for seed in (0, 1):
        reference = {"kl": 0.0, "gold": 0.1 * seed, "score": 0.0}
        reference |= {"fluency": 1.0, "distinct": 1.0}
        for algorithm, gold in (("ppo", 0.9), ("best_of_n", 0.8)):
            cells[f"algorithm={algorithm}"] = {"algorithm": algorithm}
            folder = tmp_path / "runs" / f"algorithm={algorithm}" / f"seed_{seed}"
            folder.mkdir(parents=True)
            measured = reference | {"kl": 1.0, "gold": gold + seed}
            summary = {"reference": reference, "seconds": 1.0}
            way = []
            if algorithm == "ppo":
                summary["policy"] = measured
                way = [{"stage": "ppo", "step": 0, **reference}]
            else:
                summary["best of 2"] = measured | {"n": 2, "kl_bound": 0.2}
            for name, value in {
                "config": {
                    "config": {"algorithm": algorithm, "kl_coef": 0.25},
                    "versions": {},
                },
                "summary": summary,
            }.items():
                (folder / f"{name}.json").write_text(json.dumps(value))
            lines = "".join(json.dumps(row) + "\n" for row in way)
            (folder / "samples.jsonl").write_text(lines)
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": cells}))
    compared.main(finished.Options(tmp_path))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["policies"]["PPO"]["of_seeds"]["gold"] == [0.9, 1.9]
    assert figures["policies"]["PPO"]["of_seeds"]["net_gold"] == [0.65, 1.65]
    # At the KL of best of 2 its gold is 0.8 + seed.
    assert figures["policies"]["PPO"]["lead"] == pytest.approx(0.1)
    assert figures["policies"]["best of 2"]["n"] == 2
    assert [of["step"] for of in figures["paths"]["ppo"]] == [0]
    assert figures["kl_coef"] == 0.25
    assert (tmp_path / "plots" / "comparison.png").stat().st_size > 10_000
