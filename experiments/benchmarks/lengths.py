"""Distributions of response lengths for --lengths.

geometric   ends at every token with the same probability, as EOS of an untrained model
lognormal   σ = 0.8, as of reasoning models: most are short and a few very long
FILE        one line per response, an integer or an object with "length"

Lengths are drawn from a pool of quantiles of the distribution, so the pool is always
the same. The longest are cut to the columns of the workload.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path

from benchmarks.peers.line_protocol import Workload
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import histogram

POOL = 256  # number of lengths in the pool
SIGMA = 0.8  # standard deviation of the logarithm


def uneven(workload: Workload, *, lengths: str, mean: float) -> Workload:
    """The workload with response lengths of a distribution.

    Args:
      workload: a workload with responses of R tokens.
      lengths: geometric, lognormal or the path of a file.
      mean: mean length of the first two before the cut, as a share of R.

    Raises:
      InputError: the file is missing, or one of its lengths exceeds R.
    """
    longest = workload.response_length
    middle = [(i + 0.5) / POOL for i in range(POOL)]
    if lengths == "geometric":
        ends = 1 / max(1.0, mean * longest)
        drawn = [
            math.ceil(math.log(1 - share) / math.log1p(-ends)) if ends < 1 else 1
            for share in middle
        ]
    elif lengths == "lognormal":
        centre = math.log(mean * longest) - SIGMA**2 / 2
        normal = statistics.NormalDist(centre, SIGMA)
        drawn = [int(math.exp(normal.inv_cdf(share))) for share in middle]
    else:
        read = histogram.read(Path(lengths))
        if read[-1] > longest:
            raise InputError(
                f"--lengths {lengths}: expected at most {longest} tokens, which a "
                f"response of {workload.name} has, got {read[-1]}; name workloads "
                f"with longer ones, or cut the lengths"
            )
        drawn = list(histogram.spread(read, rows=POOL))
    pool = tuple(min(longest, max(1, length)) for length in drawn)
    return dataclasses.replace(workload, lengths=pool)
