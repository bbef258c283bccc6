"""--judge: a Python function of texts that reveals hacking; it is not trained on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.text import Written
from rlhf_jax.devices import row_sharding
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.rewards.text import HostArray, TextReward
from rlhf_jax.roles.rewards.transcripts import Decode
from rlhf_jax.runs import command_line
from rlhf_jax.train.config.watch import Watch


def load(options: Watch, *, mesh: Mesh) -> Callable[..., Judge]:
    """Imports the function of --judge; returns a function that gives it the data."""
    assert options.judge is not None
    function = command_line.load_function(
        options.judge, called="--judge", takes=TextReward.TAKES
    )

    def of_data(
        rows: Sequence[Row], *, decode: Decode, prompts: Sequence[Written]
    ) -> Judge:
        reward = TextReward(
            function, decode, rows, called=f"--judge {options.judge}", prompts=prompts
        )
        return Judge(reward, mesh=mesh, may_fail=options.judge_failure == "warn")

    return of_data


class Judge:
    """The judge of a run; each process scores its own rows."""

    def __init__(self, judge: TextReward, *, mesh: Mesh, may_fail: bool) -> None:
        self._judge, self._mesh, self._may_fail = judge, mesh, may_fail
        self._warned = False

    def __call__(self, rollout: Rollout) -> Stats:
        """Returns `evaluation.judge_stats`, without scores if the judge failed.

        Raises:
          InputError, StopError: the judge failed, with --judge-failure stop.
        """
        mine = row_sharding.unshared(row_sharding.local_rows(rollout), mesh=self._mesh)
        scores, succeeded = row_sharding.put_computed(
            lambda: self._judged(mine), mesh=self._mesh
        )
        return evaluation.judge_stats(
            scores, judged=succeeded if self._may_fail else None
        )

    def _judged(self, mine: Rollout) -> tuple[HostArray, HostArray]:
        """Returns scores f32[b], and bool[b], whether the judge gave them."""
        succeeded = np.ones(len(mine.index), bool)
        try:
            scores = self._judge(mine)
        except (InputError, StopError) as error:
            if not self._may_fail:
                raise
            scores, succeeded = np.zeros(len(succeeded), np.float32), ~succeeded
            if not self._warned:
                print(
                    f"warning: {error}\n--judge-failure warn: the run goes on without "
                    f"this judge/score; later failures are counted in judge/failed and "
                    f"reported at the end",
                    file=sys.stderr,
                )
            self._warned = True
        return scores, succeeded


def failures(measured: list[Row]) -> int:
    """Returns the number of steps at which the judge failed; warns on stderr."""
    looks = [row["judge/failed"] for row in measured if "judge/failed" in row]
    number = sum(share > 0 for share in looks)
    if number:
        print(
            f"warning: the judge failed at {number} of the {len(looks)} steps at "
            f"which it was asked",
            file=sys.stderr,
        )
    return number
