r"""Measures wall seconds of GRPO updates, with the sampler 0, 1 and 2 steps behind.

    python experiments benchmarks.asynchrony.updates
    python experiments benchmarks.asynchrony.updates --latency 0.2 --output async.json
    XLA_FLAGS=--xla_force_host_platform_device_count=2 \
        python experiments benchmarks.asynchrony.updates --latency 0

Each response is verified in a process that sleeps for --latency. On-policy the trainer
waits for the verifiers. With a queue (`rlhf-jax grpo --max-staleness`) a thread samples
and verifies while the trainer learns from earlier responses. One process runs all
variants in turns, from one state, with programs that are compiled before; the model is
random. A ratio is the median over rounds of the ratio within a round.

With several devices the last one samples, for every staleness, and the first one
learns, so on-policy one of them is always idle. On a shared device only the host's time
can be saved, because the arithmetic of updates and sampling does not change.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks.asynchrony.verifier import Slow
from rlhf_jax import config, decoder, grpo, kl_control, state
from rlhf_jax.algorithms.batch import Prompts, Request, Rollout
from rlhf_jax.algorithms.policy_gradient.corrections import Truncate
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import NO_MODELS
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.runs import report
from rlhf_jax.train.rollouts.queue import RolloutQueue
from rlhf_jax.verification.pool import PooledReward, VerifierPool

Array = jax.Array
Params = Any
VOCABULARY = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    staleness: tuple[int, ...] = (0, 1, 2)
    """Steps that the sampler is behind, compared in turns; ratios are to the first."""
    latency: float = 0.05
    """Duration of the verification of a response, seconds."""
    num_workers: int = 8
    """Processes of the verifier, which sleep."""
    updates: int = 10
    """Iterations of a turn."""
    rounds: int = 5
    """Measured turns of each staleness, after a warm-up turn."""
    rows: int = 64
    """Responses per iteration."""
    group_size: int = 8
    """Responses per prompt."""
    prompt_length: int = 16
    """Columns of a prompt."""
    response_length: int = 32
    """Columns of a response."""
    hidden_size: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Layers of the model."""
    num_epochs: int = 1
    """Passes over a batch of responses."""
    num_minibatches: int = 4
    """Optimizer steps per pass."""
    output: Path | None = None
    """JSON file for the figures; None writes none."""

    def __post_init__(self) -> None:
        checks.positive(
            updates=self.updates, rounds=self.rounds, num_workers=self.num_workers
        )
        checks.non_negative(latency=self.latency)
        checks.groups(self.rows, group_size=self.group_size)


class Turns:
    """The compiled programs; a call runs a turn of one staleness."""

    def __init__(self, options: Config, *, pool: VerifierPool) -> None:
        self._options = options
        self._home, *_, self._away = jax.devices() * 2
        model = config.gpt2(
            vocab_size=VOCABULARY,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=4,
            max_positions=options.prompt_length + options.response_length,
        )
        self._params = jax.jit(decoder.init, static_argnames=("model",))(
            jax.random.key(0), model=model
        )
        plain = grpo.GRPO(
            model=model,
            policy_optimizer=optax.adam(1e-5),
            max_new_tokens=options.response_length,
            stop_ids=(),
            temperature=1.0,
            group_size=options.group_size,
            num_epochs=options.num_epochs,
            num_minibatches=options.num_minibatches,
        )
        stale = dataclasses.replace(plain, sampler_correction=Truncate())
        self._recipe = plain
        self._sample = jax.jit(functools.partial(grpo.sample, recipe=plain))
        self._learn = {
            ahead: jax.jit(
                functools.partial(grpo.learn, recipe=stale if ahead else plain),
                donate_argnames=("state",),
            )
            for ahead in (False, True)
        }
        rows = [{} for _ in range(options.rows)]
        self._reward: PooledReward = pool.reward(decode=_decode, rows=rows)

    def prompts(self, step: int) -> Prompts:
        """Random prompts, one per group."""
        options, rng = self._options, np.random.default_rng(step)
        groups = options.rows // options.group_size
        tokens = rng.integers(1, VOCABULARY, (groups, options.prompt_length))
        tokens = tokens.repeat(options.group_size, axis=0).astype(np.int32)
        return Prompts(
            tokens=jnp.asarray(tokens),
            mask=jnp.ones(tokens.shape, bool),
            index=jnp.arange(groups, dtype=jnp.int32).repeat(options.group_size),
            sample=jnp.tile(jnp.arange(options.group_size, dtype=jnp.int32), groups),
        )

    def draw(
        self, policy: Params, request: Request
    ) -> tuple[Rollout, Callable[[], dict[str, Scores]]]:
        """Samples on the last device and starts the verifiers."""
        policy, asked = jax.device_put((policy, request), self._away)
        rollout = self._sample(
            policy, prompts=asked.prompts, key=asked.key, version=asked.version
        )
        rollout = jax.device_put(rollout, self._home)
        pending = self._reward.submit(rollout)
        return rollout, lambda: {"verifier": pending.collect()}

    def __call__(self, staleness: int) -> dict[str, float]:
        """Runs a turn; returns its seconds and the waits of trainer and sampler."""
        options, key = self._options, jax.random.key(1)
        train = state.grpo_state(
            policy=storage.store(self._params),
            policy_optimizer=self._recipe.policy_optimizer,
            kl=kl_control.fixed(0.0),
        )
        jax.block_until_ready(train)
        learn = functools.partial(
            self._learn[staleness > 0], frozen=NO_MODELS, key=jax.random.key(2)
        )
        start = time.perf_counter()
        if not staleness:
            waited = 0.0
            for step in range(options.updates):
                since = time.perf_counter()
                rollout, pending = self.draw(
                    train.policy,
                    Request(
                        self.prompts(step), jax.random.fold_in(key, step), train.step
                    ),
                )
                [scores] = pending().values()
                waited += time.perf_counter() - since
                train, *_ = learn(train, rollout=rollout, scores=scores)
            jax.block_until_ready(train)
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "trainer": waited, "sampler": seconds - waited}

        def request(step: int, version: Array) -> Request:
            version = jnp.array(version, copy=True)  # the update donates it
            return Request(self.prompts(step), jax.random.fold_in(key, step), version)

        queue = RolloutQueue(
            self.draw,
            hand_over=storage.store,
            request=request,
            staleness=staleness,
            num_steps=options.updates,
            threaded=True,
        )
        begun = queue.first(train.policy, version=train.step)
        with queue:
            queue.begin(begun, start=0, policy=train.policy, version=train.step)
            for step in range(options.updates):
                rollout, by_name = queue.take()
                queue.submit(step + staleness, train.policy, version=train.step)
                [scores] = by_name.values()
                train, *_ = learn(train, rollout=rollout, scores=scores)
            jax.block_until_ready(train)
            seconds = time.perf_counter() - start
            return {"seconds": seconds} | queue.waits.read()


def _decode(ids: Any) -> str:
    return " ".join(map(str, ids))


def main(options: Config) -> None:
    """Runs the rounds, and prints and writes the figures."""
    turns: dict[int, list[dict[str, float]]] = {k: [] for k in options.staleness}
    with VerifierPool(
        Slow(options.latency), num_workers=options.num_workers, timeout=60.0
    ) as pool:
        turn = Turns(options, pool=pool)
        for number in range(options.rounds + 1):
            for k, measured in turns.items():
                measurement = turn(k)
                if number:  # the first one compiles
                    measured.append(measurement)
    first = turns[options.staleness[0]]
    figures = []
    for k, measured in turns.items():
        ratios = [
            own["seconds"] / other["seconds"]
            for own, other in zip(measured, first, strict=True)
        ]
        figures.append(
            {"staleness": k, "ratio": statistics.median(ratios), "ratios": ratios}
            | {
                name: statistics.median(measurement[name] for measurement in measured)
                for name in ("seconds", "trainer", "sampler")
            }
        )
    report.table(
        f"{options.updates} updates; medians of {options.rounds} rounds, in turns",
        ("steps behind", "seconds", "ratio", "trainer waited", "sampler waited"),
        [
            (
                str(row["staleness"]),
                *(row[name] for name in ("seconds", "ratio", "trainer", "sampler")),
            )
            for row in figures
        ],
    )
    if options.output is not None:
        measurement = {"options": dataclasses.asdict(options), "figures": figures}
        text = json.dumps(measurement, default=str, indent=1)
        options.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
