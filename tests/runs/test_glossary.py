"""Every metric of the glossary names a test that recomputes it.

What an update logs is recomputed in test_update_formulas.py, and what a run measures of
held-out prompts, redraws and samplers in tests/train/test_watched_numbers.py; here is
the rest of what stands in a row, in float64 from the arrays that it is made of.
"""

import ast
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from glossary_tests import BY_TEST, RECOMPUTED
from places import EXPERIMENTS, ROOT, TESTS

from rlhf_jax import drift, masked, rewards
from rlhf_jax.algorithms import batch
from rlhf_jax.algorithms.policy_gradient.corrections import staleness
from rlhf_jax.environments import finished
from rlhf_jax.reports import glossary
from rlhf_jax.runs import alarms, metrics


class File:
    """A file of tests: its functions, and the strings of the file and its oracles."""

    def __init__(self, path: str) -> None:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        self.functions: set[str] = set()
        oracles_of_it = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.add(node.name)
            elif isinstance(node, ast.Import):
                oracles_of_it += [x.name for x in node.names if "oracle" in x.name]
        sources = [ROOT / path, *(TESTS / f"{name}.py" for name in oracles_of_it)]
        self.text = "\n".join(file.read_text(encoding="utf-8") for file in sources)

    def names(self, metric: str) -> bool:
        """Whether it has the metric, whole or put together as f"reward/{name}"."""
        *parts, last = metric.rstrip("0123456789").split("NAME")
        # Not as the beginning of a longer name.
        end = "" if metric != metric.rstrip("0123456789") else r"(?!\w)"
        found = re.search(re.escape(last) + end, self.text)
        if found and all(part in self.text for part in parts):
            return True
        stem, _, last = metric.rpartition("/")
        return f'f"{stem}/{{' in self.text and f'"{last}"' in self.text


def test_every_metric_of_the_glossary_is_recomputed_by_a_test():
    without = glossary.read().keys() - RECOMPUTED.keys()
    assert not without, (
        f"{sorted(without)} of rlhf_jax/runs/README.md: write a test that recomputes "
        f"each from arrays in float64, and name it in tests/glossary_tests.py"
    )
    gone = RECOMPUTED.keys() - glossary.read().keys()
    assert not gone, f"{sorted(gone)}: no longer in the glossary; take them out here"


def test_the_test_of_a_metric_is_there_and_names_it():
    gone, silent = [], []
    for place, recomputed in BY_TEST.items():
        path, _, test = place.partition("::")
        file = File(path)
        if not test.startswith("test_") or test not in file.functions:
            gone.append(place)
        silent += [(place, metric) for metric in recomputed if not file.names(metric)]
    assert not gone, f"{gone}: name the tests that recompute these metrics now"
    assert not silent, f"{silent}: is it another test that recomputes these metrics?"


def test_a_metric_has_one_test_in_the_table():
    listed = [metric for recomputed in BY_TEST.values() for metric in recomputed]
    assert len(listed) == len({*listed})


def means(stats: masked.Stats) -> dict[str, float]:
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


# Episodes of an environment, and verifiers.


def test_how_episodes_ended_is_a_share_of_all_that_were_to_be():
    """Of seven episodes the last never began, one failed and one took too long."""
    empty = np.zeros((7, 6))
    began = np.arange(7) < 6
    ends = {
        "failed": [0],
        "timed_out": [1],
        "truncated": [2, 3],
        "out_of_turns": [4],
        "late": [5, 6],
        "out_of_room": [],
    }
    turns = np.array([1, 2, 3, 1, 4, 1, 0])
    episodes = finished.none(
        batch.Prompts(
            tokens=np.zeros((7, 2), np.int32),
            mask=np.ones((7, 2), bool),
            index=np.arange(7, dtype=np.int32),
            sample=np.zeros(7, np.int32),
        ),
        size=4,
    )
    for name, rows in ends.items():
        episodes.parts[name][rows] = 1.0
    episodes.parts["turns"][:] = turns
    episodes.rollout.response_mask[began, 2:4] = True
    assert episodes.rollout.response_mask.shape == empty.shape
    for leave_out in (True, False):
        scores = episodes.scores(leave_out=leave_out)
        out = 3 if leave_out else 1
        assert means(rewards.part_stats(scores)) == pytest.approx(
            {f"reward/{name}": len(rows) / 7 for name, rows in ends.items()}
            | {"reward/turns": turns.sum() / 7, "reward/left_out": out / 7},
            rel=1e-6,
        )


def test_a_verifier_that_took_too_long_has_failed_too():
    failed, late = np.array([1, 0, 1, 0, 1.0]), np.array([0, 0, 1, 0, 0.0])
    scores = rewards.Scores(
        toys.array([0, 2, 0, 1, 0]),
        parts={"failed": toys.array(failed), "timed_out": toys.array(late)},
        left_out=toys.array(failed, bool),
    )
    assert means(rewards.part_stats(scores)) == pytest.approx(
        {"reward/failed": 3 / 5, "reward/timed_out": 1 / 5, "reward/left_out": 3 / 5}
    )


# Samplers.


def test_ages_are_of_response_tokens():
    """The oldest stamp belongs to a prompt column, so no age counts it."""
    version = np.array([[0, 7, 5, 0], [0, 6, 4, 7]])
    mask = np.array([[0, 1, 1, 0], [0, 1, 0, 1]], bool)
    rollout = types.SimpleNamespace(
        version=toys.array(version, np.int32), response_mask=toys.array(mask, bool)
    )
    ages = [9 - version[cell] for cell in oracles.entries(mask)]
    assert means(staleness(rollout, step=jnp.int32(9))) == pytest.approx(
        {"policy/staleness": np.mean(ages), "policy/staleness_max": max(ages)}
    )


# What a run writes of its parameters and of itself.


def test_drift_is_logged_by_tensor_and_as_one_vector():
    reference = toys.weights(seed=0)
    params = toys.perturbed(reference, seed=1, scale=0.2)
    params["embed"]["tokens"] = reference["embed"]["tokens"]
    tensors = {"moved": [], "size": []}
    paths = jax.tree.leaves_with_path(reference)
    for (path, start), end in zip(paths, jax.tree.leaves(params), strict=True):
        stacked = path[0].key == "layers"  # a tensor for each layer
        start, end = (
            np.float64(x) if stacked else np.float64(x)[None] for x in (start, end)
        )
        tensors["moved"] += [np.linalg.norm(x) for x in end - start]
        tensors["size"] += [np.linalg.norm(x) for x in start]
    moved, size = map(np.array, tensors.values())
    stats = drift.stats(jax.jit(drift.weight_drift)(params, reference))
    assert means(stats) == pytest.approx(
        {
            "drift/relative": moved.sum() / size.sum(),
            "drift/global_norm": np.linalg.norm(moved) / np.linalg.norm(size),
        },
        rel=1e-5,
    )


def test_a_row_names_the_alarms_that_are_active_at_its_step(tmp_path):
    """The drift alarm is active while above its limit: in the second and third row."""
    drifts = [0.01, 0.3, 0.2, 0.05]
    limits = alarms.Limits(drift=0.1)
    check = functools.partial(alarms.check, limits=limits)
    with metrics.Recorder(tmp_path, check=check) as record:
        record.begin("ppo")
        for step, share in enumerate(drifts):
            record.write(step, {"drift/relative": (jnp.float32(share), jnp.float32(1))})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line).get("alarms") for line in lines]
    assert logged == [["weight_drift"] if x > 0.1 else None for x in drifts]


UNITS = r"[KMGT]i?B|T?FLOPs?|ms|s|tokens(?:/s)?|responses|nats"
THINGS = "chip|device|token|step|second|layer|row|response|prompt|update|program|group"
A_THING = re.compile(rf"\b(?:{UNITS})(?: of #)? an? (?:{THINGS})\b(?! of)")


def printed(tree: ast.Module) -> set[str]:
    """The texts of a module without docstrings; # stands for a value."""
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }
    pieces = {
        id(x) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for x in n.values
    }
    texts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                x.value if isinstance(x, ast.Constant) else "#" for x in node.values
            ]
            texts.add("".join(map(str, parts)))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documented | pieces
        ):
            texts.add(node.value)
    return texts


def test_a_printed_unit_says_per():
    found = [
        f"{file.name}: {text}"
        for folder in (ROOT / "rlhf_jax", EXPERIMENTS)
        for file in sorted(folder.rglob("*.py"))
        for text in printed(ast.parse(file.read_text(encoding="utf-8")))
        if A_THING.search(text)
    ]
    assert not found, "write GiB per chip, not GiB a chip"
    for wrong in ("of # GiB a chip", "#.00 GiB of # a device"):
        assert A_THING.search(wrong), wrong
