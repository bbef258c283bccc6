"""Scores rows of two processes with three devices each, by a reward and a judge.

A program by itself, two of which test_processes.py starts: processes join only once.
"""

import sys

import jax
import numpy as np
import pytest

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.processes import Group
from rlhf_jax.functional.errors import InputError
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.train.rewards import text_reward
from rlhf_jax.train.watch.judge import Judge

ROWS = 12
DATA = [{"number": number} for number in range(ROWS)]


def meshes():
    """Yields a mesh, and the process that should be asked for each of its rows."""
    devices = jax.devices()
    # Of three blocks of rows both processes have the second.
    yield MeshShape(data=3, tensor=2).make(), [0] * 8 + [1] * 4
    yield MeshShape(tensor=6).make(), [0] * 12
    yield MeshShape(data=6).make(), [0] * 6 + [1] * 6
    for process in (0, 1):  # the other process has no rows
        own = devices[3 * process : 3 * process + 3]
        yield MeshShape(data=3).make(own), [process] * 12


def rollout_on(mesh):
    """A rollout of two prompt and two response tokens per row."""
    tokens = np.arange(ROWS * 4, dtype=np.int32).reshape(ROWS, 4)
    rollout = Rollout(
        tokens=tokens,
        mask=np.ones((ROWS, 4), bool),
        response_mask=np.array([[False, False, True, True]] * ROWS),
        old_logprobs=np.zeros((ROWS, 4), np.float32),
        index=np.arange(ROWS, dtype=np.int32),
        sample=np.zeros(ROWS, np.int32),
        entropy=None,
    )
    own = row_sharding.own_rows(rollout, mesh=mesh)
    return row_sharding.put_rows(own, mesh=mesh)


def main(coordinator, process_id):
    here = int(process_id)
    Group(coordinator, num_processes=2, process_id=here).join()
    asked = []

    def number_and_process(prompts, responses, rows):
        asked.extend(row["number"] for row in rows)
        return [row["number"] + 100.0 * here for row in rows]

    def fails(prompts, responses, rows):
        raise ValueError("no such score")

    reward, broken = (
        TextReward(function, lambda ids: " ".join(map(str, ids)), DATA)
        for function in (number_and_process, fails)
    )
    for mesh, owners in meshes():
        rollout = rollout_on(mesh)
        mine = [row for row in range(ROWS) if owners[row] == here]
        expected = np.arange(ROWS) + 100.0 * np.array(owners)
        scores = processes.whole(text_reward(reward, mesh=mesh)(rollout))
        np.testing.assert_array_equal(scores, expected)
        stats = Judge(reward, mesh=mesh, may_fail=False)(rollout)
        total, count = map(processes.whole, stats["judge/score"])
        np.testing.assert_allclose(total / count, expected.mean())
        assert asked == mine * 2
        asked.clear()
        with pytest.raises(InputError, match="no such score"):
            text_reward(broken, mesh=mesh)(rollout)
        stats = Judge(broken, mesh=mesh, may_fail=True)(rollout)
        failed, count = map(processes.whole, stats["judge/failed"])
        assert failed == count == ROWS
    print("scored")


if __name__ == "__main__":
    main(*sys.argv[1:])
