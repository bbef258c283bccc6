"""--lengths: how long responses are, as a pool of lengths that prompts choose among.

geometric   ends at every token with the same probability, as EOS of an untrained model
lognormal   σ = 0.8: as those of models that reason, most short and a few very long
FILE        a line per response, an integer or an object with "length"

The pool is the quantiles of the distribution, so that it is the same every time. Its
longest are cut to the columns of the workload.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path

from benchmarks.peers.line_protocol import Workload
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import histogram

POOL = 256  # lengths
SIGMA = 0.8  # of the logarithm


def uneven(workload: Workload, *, lengths: str, mean: float) -> Workload:
    """The workload with responses of a distribution.

    Args:
      workload: responses of R tokens each.
      lengths: geometric, lognormal or the path of a file.
      mean: of the first two before they are cut, as a share of R.

    Raises:
      InputError: no such file, or a length in it that the workload has no room for.
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
