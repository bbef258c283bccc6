"""A reward that is watched and not trained on."""

from __future__ import annotations

import sys

import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data.json_lines import Row
from rlhf_jax.devices import row_sharding
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.rewards.text import TextReward


class Judge:
    """--judge: a Python function of texts; each process judges its own rows."""

    def __init__(self, judge: TextReward, *, mesh: Mesh, may_fail: bool) -> None:
        self._judge, self._mesh, self._may_fail = judge, mesh, may_fail
        self._warned = False

    def __call__(self, rollout: Rollout) -> Stats:
        """`evaluation.judge_stats`; without scores where the judge fails and may.

        Raises:
          InputError, StopError: as `TextReward`, where it may not.
        """
        mine = row_sharding.local_rows(rollout)
        succeeded = np.ones(len(mine.index), bool)
        try:
            scores = self._judge(mine)
        except (InputError, StopError) as error:
            if not self._may_fail:
                raise
            scores, succeeded = np.zeros(len(succeeded), np.float32), ~succeeded
            if not self._warned:
                print(
                    f"warning: {error}\n--judge-failure warn: the run goes on, without "
                    f"a judge/score where this happens; later failures are counted in "
                    f"judge/failed and told at the end",
                    file=sys.stderr,
                )
            self._warned = True
        scores, succeeded = row_sharding.put_computed(
            (scores, succeeded), mesh=self._mesh
        )
        return evaluation.judge_stats(
            scores, judged=succeeded if self._may_fail else None
        )


def judge_failures(measured: list[Row]) -> int:
    """Steps at which a judge that may fail did, told on stderr."""
    looks = [row["judge/failed"] for row in measured if "judge/failed" in row]
    failures = sum(share > 0 for share in looks)
    if failures:
        print(
            f"warning: the judge failed at {failures} of the {len(looks)} steps at "
            f"which it was asked",
            file=sys.stderr,
        )
    return failures
