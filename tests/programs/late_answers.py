"""Episodes whose answers come late or at once, with XLA's own flags: the same bits?

    PYTHONPATH=tests:tests/environments python tests/programs/late_answers.py

Tests compile without optimisation (`conftest`), and optimised kernels may round a row
by what stands in others. Prints how many log-probs differ, and exits with status 1 if
any does.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import test_episodes
import tiny
from test_episodes import Script

from rlhf_jax.algorithms.batch import Prompts, Request

ROWS = 16
LATENCIES = (
    lambda row, turn: 0.0,
    lambda row, turn: 0.01 * ((row * 7 + turn * 3) % 5),
    lambda row, turn: 0.02 * (row == 0),
    lambda row, turn: 0.03 * (row % 2),
)


def prompts() -> Prompts:
    """ROWS prompts, repeated from those of the tests."""
    few = test_episodes.prompts()
    again = np.arange(ROWS) % few.tokens.shape[0]
    return Prompts(
        tokens=few.tokens[again],
        mask=few.mask[again],
        index=np.arange(ROWS, dtype=np.int32),
        sample=np.zeros(ROWS, np.int32),
    )


def main() -> None:
    model = dataclasses.replace(tiny.GPT2, hidden_size=128)
    params = jax.tree.map(lambda leaf: leaf / 3, test_episodes.params_of(model))
    script = Script()
    sampler = test_episodes.sampler_of(model, script, places=ROWS)
    drawn = []
    for script.latency in LATENCIES:
        drawn.append(
            sampler(params, Request(prompts(), jax.random.key(7), jnp.int32(3)))
        )
    whole, *others = drawn
    differing = 0
    for late in others:
        for one, other in zip(
            jax.tree.leaves(whole), jax.tree.leaves(late), strict=True
        ):
            differing += int(np.sum(np.asarray(one) != np.asarray(other)))
    print(f"{differing} numbers differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
