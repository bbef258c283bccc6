"""PPO against GRPO: runs differ only in the method, and the table is the record's."""

import dataclasses
import json

import numpy as np
import places
import pytest
from studies.ppo_or_grpo import judge, preparation
from worlds import reviews

from rlhf_jax.runs import command_line
from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train.main import TRAINERS

SWEEP = places.EXPERIMENTS / "studies" / "ppo_or_grpo" / "sweep.toml"
ROWS = {
    "gold of samples": "gold",
    "reward-model score of samples": "score",
    "KL of samples [nats per response]": "kl",
    "score of greedy held-out responses, after": "greedy_after",
}


@pytest.mark.slow
def test_the_runs_differ_by_their_method_alone(tmp_path):
    sweep = declaration.read(SWEEP)
    assert len(sweep.seeds) == 5
    configs = {}
    for run in planned.runs_of(sweep, out=tmp_path):
        [name] = run.program
        config = command_line.parse(
            TRAINERS[name].load().Config, description=None, argv=run.options
        )
        configs[name, run.seed] = vars(config)
    for seed in sweep.seeds:
        ppo, grpo = configs["ppo", seed], configs["grpo", seed]
        differ = {name for name in grpo if ppo[name] != grpo[name]}
        assert differ == {"out", "method", "placement"}
        assert ppo.keys() - grpo.keys() == {"critic"}
        methods = [dataclasses.asdict(config["method"]) for config in (ppo, grpo)]
        shared = methods[0].keys() & methods[1].keys()
        assert {n for n in shared if methods[0][n] != methods[1][n]} == {"penalty"}
        assert {"num_epochs", "num_minibatches", "temperature", "surrogate"} < shared
        # Of PPO's roles, the critic is with the policy, and the others are GRPO's.
        places_of = [dataclasses.asdict(config["placement"]) for config in (ppo, grpo)]
        assert places_of[0].items() >= places_of[1].items()


def test_the_judge_is_the_gold_judge():
    assert judge.gold(["p"], ["it is superb . "], [{}]) == [
        reviews.gold(["it", "is", "superb", "."])
    ]


def test_better_reviews_are_chosen_more_often():
    rows = preparation.pairs(0)
    assert len(rows) > 0.95 * preparation.NUM_PAIRS
    lead = np.array(
        [
            reviews.gold(row["chosen"].split()) - reviews.gold(row["rejected"].split())
            for row in rows
        ]
    )
    assert 0.75 < (lead > 0).mean() < 0.95


@pytest.mark.slow
def test_the_preparation_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "NUM_REVIEWS", 200)
    monkeypatch.setattr(preparation, "NUM_PAIRS", 64)
    preparation.main(
        preparation.Options(out=tmp_path, seeds=(2,), sft_steps=2, reward_steps=2)
    )
    for name in ("sft", "reward"):
        assert (tmp_path / name / "seed_2" / "model" / "config.json").exists()
    lines = (tmp_path / "data" / "held_out.jsonl").read_text().splitlines()
    assert len(lines) == preparation.NUM_HELD_OUT


def test_the_table_is_what_was_recorded():
    file = places.RECORDED / "ppo_or_grpo" / "record.json"
    cells = json.loads(file.read_text(encoding="utf-8"))["results"]["cells"]
    ppo, grpo = cells["trainer=ppo"], cells["trainer=grpo"]
    readme = (places.EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    [*_, section] = readme.split("studies/ppo_or_grpo/sweep.toml")
    assert "(greedy responses score −0.14 before)" in section
    for cell in (ppo, grpo):
        before = cell["greedy_before"]["estimate"]["mean"]
        assert before == pytest.approx(-0.14, abs=0.00501)
    for title, measure in ROWS.items():
        [row] = [
            line for line in section.splitlines() if line.startswith(f"| {title} |")
        ]
        shown = [
            [float(word) for word in cell.replace("−", "-").split() if word != "to"]
            for cell in row.replace("(", "").replace(")", "").split("|")[2:-1]
        ]
        estimates = (
            ppo[measure]["estimate"],
            grpo[measure]["estimate"],
            grpo[measure]["less_first_cell"],
        )
        for numbers, estimate in zip(shown, estimates, strict=True):
            expected = [estimate["mean"], *estimate["interval"]]
            assert numbers == pytest.approx(expected, abs=0.00501)
