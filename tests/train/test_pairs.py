"""Runs with every pair of a policy gradient's choices: each choice leaves a trace."""

import collections
import contextlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pairs
import pytest
import toy_server
import traces

from rlhf_jax.runs import metrics
from rlhf_jax.train import main, trainer
from rlhf_jax.train.config.capabilities import CHOICES, TABLE

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Server(toy_server.Toy):
    """Draws different tokens for each response, so that groups are not equal."""

    def __init__(self):
        super().__init__()
        self.context = pairs.MODEL.max_positions

    def drawn(self, body):
        start = len(self.requests)
        return [5 + (start * 7 + at * start) % 15 for at in range(body["max_tokens"])]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    pairs.write_files(folder)
    return folder


def run(row, out):
    """Runs a row by the console script's function."""
    loops, critics = [], []
    run_stage = trainer.run_stage

    def spied(loop, models, **more):
        critic = models.train.critic
        loops.append((loop, models))
        critics.append(
            jax.device_get(critic if models.critic is None else models.critic.params)
        )
        return run_stage(loop, models, **more)

    toy = Server()
    line = [*pairs.words(row), "--out", str(out)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(trainer, "run_stage", spied)
        if pairs.SERVER in line:
            url = stack.enter_context(toy_server.serving(toy))
            line[line.index(pairs.SERVER)] = url
        main.main(line)
    ((loop, models),), (critic,) = loops, critics
    return traces.Run(
        row=row,
        folder=out,
        config=loop.config,
        loop=loop,
        models=models,
        critic=critic,
        requests=toy.requests,
        rows=metrics.read(out / "metrics.jsonl"),
        samples=metrics.read(out / "samples.jsonl"),
        summary=json.loads((out / "summary.json").read_text()),
    )


def infinite(rows):
    """The metrics that are not finite; a ledger's may be None."""
    return {
        name: value
        for row in rows
        for name, value in row.items()
        if name not in ("stage", "alarms")
        if not (value is None and name.startswith("trust/"))
        if not np.isfinite(np.asarray(value, float)).all()
    }


ROWS = pairs.rows()


@pytest.mark.slow
def test_the_rows_have_every_pair_that_the_table_allows():
    allowed = {pair for pair in pairs.every_pair() if pairs.is_allowed(dict(pair))}
    covered = set().union(*map(pairs.pairs_of, ROWS))
    assert allowed - covered == set(), "generate them again: tests/train/pairs.py"
    assert all(pairs.is_allowed(row) for row in ROWS)


@pytest.mark.slow
def test_a_pair_that_is_refused_has_its_row_in_the_table():
    for pair in pairs.every_pair():
        chosen = dict(pair)
        if pairs.is_allowed(chosen):
            continue
        method = chosen.pop(pairs.METHOD, None)
        # A method's recipe may have no such choice, which then stands in no table.
        if not chosen.keys() <= set(pairs.OF_THE_RECIPE) or not any(
            method is not None and pairs.is_refused_alone(method, *choice)
            for choice in chosen.items()
        ):
            assert any(row in pairs.violated(pair) for row in TABLE)


@pytest.mark.slow
def test_every_feature_of_the_table_is_in_some_row():
    assert set().union(*map(pairs.chosen, ROWS)) == set(CHOICES)


def test_every_choice_leaves_a_trace():
    for name, choices in pairs.PARAMETERS.items():
        assert {*traces.TRACES[name], pairs.ABSENT} >= set(choices)


def cases():
    """All rows: two of each command, with few choices, are slow, the others long."""
    rows_of_command = collections.Counter()
    for number, row in enumerate(ROWS):
        command, *_ = pairs.words(row)
        rows_of_command[command] += 1
        marks = [pytest.mark.slow, *[pytest.mark.long] * (rows_of_command[command] > 2)]
        yield pytest.param(row, id=f"{number}-{row[pairs.METHOD]}", marks=marks)


@pytest.mark.filterwarnings("ignore:KL penalty")  # of its gradient, which is as it is
@pytest.mark.parametrize("row", [*cases()])
def test_a_row_runs_and_drops_nothing(row, files, tmp_path, monkeypatch):
    print("rlhf-jax", *pairs.words(row))
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ended = run(row, tmp_path / "run")
    problems = infinite(ended.rows), traces.dropped(ended)
    assert problems == ({}, [])
    assert Path(ended.folder / "model" / "model.safetensors").exists()
