"""Scripted episodes: answers without an environment, and a tiny sampler."""

import concurrent.futures
import contextlib
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms.batch import Prompts, Request
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.environments import episodes
from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.programs import EpisodePrograms
from rlhf_jax.environments.sampler import EpisodeSampler
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.models import decoder
from rlhf_jax.runs import metrics
from rlhf_jax.verification.worker import Failed

STOP = 1
ROWS, PROMPT, ROOM = 6, 5, 19


class Script:
    """A pool of threads whose answers depend only on the responses."""

    def __init__(
        self,
        *,
        latency=lambda row, turn: 0.0,
        turns=3,
        fails=(),
        on_failure="zero",
        counts=(),
    ):
        self.on_failure, self.counts = on_failure, counts
        self.threads = concurrent.futures.ThreadPoolExecutor(8)
        self.latency, self.turns, self.fails = latency, turns, fails
        self.responses, self.warned = [], []

    def step(self, state, response, *, where=""):
        return self.threads.submit(self.answer, state, response)

    def answer(self, state, response):
        row, turn = state[0], state[1] + 1
        time.sleep(self.latency(row, turn))
        self.responses.append((row, response))
        if (row, turn) in self.fails:
            return Answer("", 0.0, True, b"", failure=Failed("raised"))
        done = turn == 1 + row % self.turns
        observed = "9" * ((3 * row + turn) % 5)  # none, too
        counts = tuple(10.0**n * turn for n, _ in enumerate(self.counts))
        return Answer(observed, turn / 4, done, bytes([row, turn]), counts=counts)

    def require(self, failure):
        if self.on_failure == "stop":
            raise StopError(failure.why)

    def warn(self, failures, *, num_episodes):
        self.warned.append((len(failures), num_episodes))


class Encoder:
    def __init__(self, rejects=None):
        self.rejects = rejects

    def observation(self, written, *, where, room):
        if written == self.rejects:
            raise InputError(f"{where}: expected another")
        ids = [int(letter) for letter in written]
        return ids if len(ids) <= room else None


def shown(ids):
    return " ".join(map(str, ids))


@functools.cache
def prompts():
    random = np.random.default_rng(0)
    lengths = np.array([5, 3, 1, 4, 2, 5])
    mask = np.arange(PROMPT)[None] >= PROMPT - lengths[:, None]
    return Prompts(
        tokens=np.where(mask, random.integers(2, 9, (ROWS, PROMPT)), 0).astype(
            np.int32
        ),
        mask=mask,
        index=np.arange(ROWS, dtype=np.int32),
        sample=np.zeros(ROWS, np.int32),
    )


def sharing(of_row, *, sample):
    """Prompts made of these rows of `prompts`."""
    batch, of_row = prompts(), np.array(of_row, np.int32)
    return Prompts(
        tokens=batch.tokens[of_row],
        mask=batch.mask[of_row],
        index=of_row,
        sample=np.array(sample, np.int32),
    )


def recipe_of(model, **options):
    return GRPO(
        model=model,
        policy_optimizer=None,
        max_new_tokens=ROOM,
        group_size=2,
        temperature=1.0,
        **{"stop_ids": (STOP,)} | options,
    )


@functools.cache
def programs_of(model, *, tokens, places, chunk, mesh, **options):
    """The programs of all samplers with these options, compiled once."""
    return EpisodePrograms(
        recipe_of(model, **options),
        columns=PROMPT + tokens,
        places=places,
        chunk=chunk,
        mesh=mesh,
    )


def sampler_of(
    model,
    pool,
    *,
    places=ROWS,
    chunk=3,
    limits=None,
    mesh=None,
    rejects=None,
    **options,
):
    limits = limits or episodes.Limits(tokens=ROOM, turn_tokens=6, turns=4)
    sizes = {"tokens": limits.tokens, "places": places, "chunk": chunk}
    return EpisodeSampler(
        programs_of(model, mesh=mesh, **sizes, **options),
        pool=pool,
        encoder=Encoder(rejects),
        decode=shown,
        limits=limits,
        states=[bytes([row, 0]) for row in range(256)],
    )


@contextlib.contextmanager
def prompt_columns_read(programs):
    """Yields a list of the number of prompt columns in each read."""
    counts, read = [], programs.read

    def counted(rows):
        counts.append(int(np.sum(rows.count[rows.prompt])))
        return read(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "read", counted)
        yield counts


def draw(sampler, params):
    return sampler(params, Request(prompts(), jax.random.key(7), jnp.int32(3)))


def drawn(model, params, pool, **options):
    return draw(sampler_of(model, pool, **options), params)


@functools.cache
def params_of(model):
    init = jax.jit(decoder.init, static_argnames=("model",))
    params = init(jax.random.key(1), model=model)
    return jax.tree.map(lambda leaf: 3 * leaf, params)  # far from uniform


def assert_same_run(run, other):
    """Asserts equal samples and metrics of two runs, up to rounding."""
    for name in ("samples.jsonl", "metrics.jsonl"):
        rows = metrics.read(run / name), metrics.read(other / name)
        assert rows[1]
        for here, other_row in zip(*rows, strict=True):
            assert here.keys() == other_row.keys()
            for key, value in other_row.items():
                if key.endswith("_z") and value is not None:
                    # In standard deviations, of rounding alone.
                    assert abs(here[key] - value) < 1e-2, key
                elif isinstance(value, float) or key.endswith("logprobs"):
                    values, expected = (np.array(x, float) for x in (here[key], value))
                    np.testing.assert_allclose(
                        values, expected, 1e-3, 2e-4, err_msg=key
                    )
                else:
                    assert here[key] == value, key
