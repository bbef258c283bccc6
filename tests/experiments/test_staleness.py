"""The staleness study: its sweep, an older sampler's policy, and figures."""

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks.asynchrony import updates
from studies import finished
from studies.policies import reviews as program
from studies.policies.algorithms import trainer_of
from studies.policies.options import Config
from studies.staleness import figures
from worlds import reviews

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.sweeps import claims, declaration

TOY = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "sft_steps": 2,
    "reward_steps": 2,
    "num_pairs": 64,
    "num_steps": 4,
    "batch_size": 8,
    "num_minibatches": 1,
    "num_epochs": 1,
    "num_evaluated": 16,
    "policy_learning_rate": 1e-2,
    "look": "training",
    "sample_every": 1,
    "snapshot_every": 2,
}


@pytest.fixture(scope="module")
def sweep():
    return declaration.read(Path(figures.__file__).with_name("sweep.py"))


def test_every_staleness_has_every_correction(sweep):
    cells = {
        (options["staleness"], options["correction"], options["kl_coef"])
        for options in (dict(cell.options) for cell in sweep.cells)
    }
    assert {cell[:2] for cell in cells} == {(0, "truncate")} | {
        (staleness, correction)
        for staleness in (1, 4)
        for correction in ("truncate", "ratio", "none")
    }
    assert len(cells) == len(sweep.cells) == 7 * 3
    assert len(sweep.seeds) == 5


def test_claims_name_cells_of_the_sweep(sweep):
    nothing = {name: {cell: {} for cell in sweep.cells} for name in sweep.measures}
    lookup = claims.lookup_in(sweep.cells, nothing)
    assert len(sweep.claims) == 3 * (2 * 4 + 1)
    for claim in sweep.claims.values():
        assert claims.answer(claim, lookup=lookup).answer == "not enough seeds"


def test_corrections_come_to_the_recipe(tmp_path):
    def options(**changes):
        return Config(out=tmp_path, **{**TOY, **changes})

    plain = options().of_programs()
    assert trainer_of(plain).draw is None
    own = {
        options(staleness=4, correction=name).of_programs()
        for name in ("truncate", "ratio", "none")
    }
    assert len(own | {plain}) == 4
    assert options(staleness=1).of_programs() == options(staleness=4).of_programs()
    measuring = options(staleness=4, correction="none").of_measuring()
    assert measuring == options().of_measuring()
    with pytest.raises(InputError, match="--correction ratio: expected --staleness"):
        options(correction="ratio")
    with pytest.raises(InputError, match="--staleness 1: expected 0 with --algorithm"):
        options(algorithm="dpo", staleness=1)


def play(out, prepared, **changes):
    words = []
    for name, value in (TOY | changes | {"prepared": prepared}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    resume = ["--resume"] if (out / "config.json").exists() else []
    argv = ["--out", str(out), "--no-progress", *words, *resume]
    command_line.main(program.main, Config, description="", argv=argv)
    return metrics.read(out / "metrics.jsonl")


@pytest.mark.slow
def test_runs_are_as_stale_as_they_say_and_figures_tell(tmp_path, monkeypatch):
    # A judge of words: nothing that a model this small says would parse.
    monkeypatch.setattr(
        reviews, "careful_gold", lambda _, response: reviews.gold(response)
    )
    prepared, runs = tmp_path / "prepared", tmp_path / "runs"
    cells = {
        "on": {},
        "truncate": {"staleness": 2},
        "none": {"staleness": 2, "correction": "none"},
        "grpo": {"staleness": 1, "algorithm": "rloo", "correction": "ratio"},
    }
    for name, changes in cells.items():
        rows = play(runs / name / "seed_0", prepared, **changes)
        ages = [row.get("policy/staleness_max", 0) for row in rows]
        if name == "truncate":
            assert ages == [0, 1, 2, 2]
            assert rows[0]["policy/sampler_kl_k3"] < 1e-9
            assert all(row["policy/sampler_kl_k3"] > 1e-9 for row in rows[1:])
        elif name == "none":
            assert "policy/sampler_weight" not in rows[0]
            off_policy = [row["policy/sampler_mismatch"] > 1e-5 for row in rows]
            assert off_policy == [False, True, True, True]
        elif name == "grpo":
            assert "policy/sampler_weight" not in rows[0]
    # Stopped after its first snapshot, a run goes on to the last bit.
    whole = metrics.read(runs / "truncate" / "seed_0" / "metrics.jsonl")
    stopped, learn = tmp_path / "stopped", {"left": 3}
    end_step = program.run.Stage.end_step

    def stopping(self, *args, **kwargs):
        end_step(self, *args, **kwargs)
        learn["left"] -= 1
        if not learn["left"]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(program.run.Stage, "end_step", stopping)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            play(stopped, prepared, staleness=2)
    assert play(stopped, prepared, staleness=2) == whole

    (tmp_path / "sweep.json").write_text(json.dumps({"cells": list(cells)}))
    figures.main(finished.Options(tmp_path))
    recorded_cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert [row["sampler"] for row in recorded_cells] == [
        *("on-policy", "2 behind, truncate", "2 behind, none", "1 behind, ratio")
    ]
    assert [row["staleness_max"] for row in recorded_cells] == [0, 2, 2, 1]
    summary = json.loads((runs / "none" / "seed_0" / "summary.json").read_text())
    gold = summary["policy"]["gold"]
    assert recorded_cells[2]["gold"] == {
        "mean": gold,
        "interval": None,
        "by_seed": {"0": gold},
    }
    monkeypatch.setattr(figures, "FROM", 3)  # of 0 to 3
    finished_runs = finished.runs_of(tmp_path)
    late = {row["sampler"]: row for row in figures.summarise(finished_runs)}
    assert late["2 behind, truncate"]["policy/sampler_mismatch"] == pytest.approx(
        whole[3]["policy/sampler_mismatch"]
    )
    assert late["2 behind, none"]["policy/sampler_ess"] is None
    assert (tmp_path / "plots" / "frontier.png").exists()


@pytest.mark.slow
def test_the_benchmark_tells_both_waits(tmp_path):
    """Verifying a batch takes 0.2 s, for which the on-policy trainer waits."""
    options = updates.Config(
        staleness=(0, 2),
        latency=0.1,
        num_workers=2,
        updates=4,
        rounds=1,
        rows=4,
        group_size=2,
        prompt_length=4,
        response_length=4,
        hidden_size=16,
        num_layers=1,
        num_minibatches=1,
        output=tmp_path / "figures.json",
    )
    updates.main(options)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["latency"] == 0.1
    first, second = figures["figures"]
    assert (first["staleness"], second["staleness"]) == (0, 2)
    assert first["ratio"] == 1
    assert first["trainer"] > 4 * 0.2
    assert second["ratios"] == [second["seconds"] / first["seconds"]]
    with pytest.raises(InputError, match="updates"):
        dataclasses.replace(options, updates=0)
