"""Seeds of one config form one group, named by the options that differ."""

import json

from toy_runs import run

from rlhf_jax.reports import grouping, reading


def grouped(*folders):
    runs, _ = reading.read_all(folders)
    return grouping.grouped(runs)


def test_runs_that_differ_in_the_seed_and_in_where_they_are_written_are_one_group(
    tmp_path,
):
    groups = grouped(
        run(tmp_path / "b02_s0", seed=0, snapshot_every=5),
        run(tmp_path / "b02_s1", seed=1, snapshot_every=50),
        run(tmp_path / "b0_s0", seed=0, kl_coef=0.0, ppo={"lam": 0.9, "gamma": 1.0}),
    )
    assert groups.options == ("kl_coef", "ppo.lam")
    first, second = groups.groups
    assert (first.name, first.runs, first.values) == (
        "kl_coef=0.2, lam=0.95",
        (0, 1),
        ("0.2", "0.95"),
    )
    assert (second.name, second.runs) == ("kl_coef=0.0, lam=0.9", (2,))


def test_an_option_that_one_config_lacks_differs_and_true_is_not_one(tmp_path):
    groups = grouped(
        run(tmp_path / "a", critic="x", whiten=True, num=1),
        run(tmp_path / "b", whiten=1, num=1),
    )
    assert set(groups.options) == {"critic", "whiten"}
    assert [group.values for group in groups.groups] == [
        ("x", "true"),
        ("null", "1"),
    ]


def test_options_that_only_record_split_no_seeds(tmp_path):
    groups = grouped(
        run(tmp_path / "a", packing="off", sample_every=10, sample_reference=True),
        run(tmp_path / "b", seed=1, num_alternatives=3, packing="off", num_shown=4),
        run(tmp_path / "c", seed=2, packing="on"),
    )
    assert groups.options == ("packing",)
    assert [group.runs for group in groups.groups] == [(0, 1), (2,)]


def test_other_versions_are_other_configs(tmp_path):
    folders = [run(tmp_path / "a"), run(tmp_path / "b", seed=1)]
    recorded = json.loads((folders[1] / "config.json").read_text())
    recorded["versions"]["jax"] = "0.12.0"
    (folders[1] / "config.json").write_text(json.dumps(recorded))
    groups = grouped(*folders)
    assert groups.options == ("version of jax",)
    assert len(groups.groups) == 2


def test_a_name_is_short_where_many_options_differ(tmp_path):
    settings = {f"option_{n}": "x" * 12 for n in range(9)}
    groups = grouped(
        run(tmp_path / "first" / "seed_0"),
        run(tmp_path / "second" / "seed_0", **settings),
    )
    assert [group.name for group in groups.groups] == ["first", "second"]


def test_one_config_is_named_by_its_folder(tmp_path):
    groups = grouped(run(tmp_path / "alone"))
    assert groups.options == ()
    assert groups.groups[0].name == "alone"


def test_the_runs_of_a_sweep_are_found_and_one_that_has_not_begun_is_told(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for seed in range(2):
        run(tmp_path / "runs" / "kl_coef=0.0" / f"seed_{seed}", seed=seed, kl_coef=0.0)
        run(tmp_path / "runs" / "kl_coef=0.2" / f"seed_{seed}", seed=seed)
    late = run(tmp_path / "runs" / "kl_coef=0.2" / "seed_2", seed=2)
    (late / "metrics.jsonl").write_text("")
    runs, waiting = reading.read_all([tmp_path])
    assert waiting == ["kl_coef=0.2/seed_2"]
    groups = grouping.grouped(runs).groups
    assert [(group.name, len(group.runs)) for group in groups] == [
        ("kl_coef=0.0", 2),
        ("kl_coef=0.2", 2),
    ]


def test_options_with_the_seed_of_a_sweep_split_no_seeds(tmp_path):
    """A model of each seed is one option, as `sweep.toml` has it."""
    options = {"model": "sft/seed_{seed}/model", "prompts": "{seed}.jsonl"}
    cells = {name: {"start.reference": [name, "{seed}"]} for name in ("a", "b")}
    sweep = {"options": options, "cells": cells}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    for name in cells:
        for seed in (0, 10):
            start = {"model": f"sft/seed_{seed}/model", "reference": [name, str(seed)]}
            run(
                tmp_path / "runs" / name / f"seed_{seed}",
                seed=seed,
                start=start,
                prompts=f"{seed}.jsonl" if name == "a" else "7.jsonl",
            )
    groups = grouping.grouped(reading.read_all([tmp_path])[0])
    assert [group.runs for group in groups.groups] == [(0, 1), (2, 3)]
    assert groups.options == ("start.reference", "prompts")
    assert [group.values for group in groups.groups] == [
        ('["a", "{seed}"]', "{seed}.jsonl"),
        ('["b", "{seed}"]', "7.jsonl"),
    ]
