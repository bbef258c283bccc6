"""A server that passes every hand-over's check but lies on real draws is caught.

Covers requests over HTTP, the rollout, an update, metrics and alarms.
"""

import functools

import jax
import numpy as np
import optax
import pytest
import toy_files
import toy_server

from rlhf_jax import policy
from rlhf_jax.algorithms import state
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.functional import masked
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.roles.reference.frozen import NO_MODELS
from rlhf_jax.runs import alarms
from rlhf_jax.samplers import agreement, protocol
from rlhf_jax.samplers.process import ProcessSampler
from rlhf_jax.samplers.server import ServerSampler

MODEL = toy_files.MODEL
RECIPE = GRPO(
    model=MODEL,
    policy_optimizer=optax.sgd(0.3),
    max_new_tokens=8,
    stop_ids=(1,),
    group_size=4,
    temperature=1.0,
    num_epochs=1,
)
PROMPTS = Prompts(
    tokens=np.repeat([[0, 5], [6, 7], [8, 9], [0, 4], [3, 3], [2, 9]], 4, axis=0),
    mask=np.repeat([[0, 1], [1, 1], [1, 1], [0, 1], [1, 1], [1, 1]], 4, axis=0) > 0,
    index=np.repeat(np.arange(6, dtype=np.int32), 4),
    sample=np.tile(np.arange(4, dtype=np.int32), 6),
)
FEW, MANY = 5, 12
WIDTH = MODEL.max_positions


class Drawing(toy_server.Toy):
    """Draws from the policy during a hand-over's check, and afterwards by `lie`."""

    def __init__(self, lie):
        super().__init__()
        self.lie, self.previous = lie, None
        self.since = 0  # requests since the weights were loaded
        self._logits = jax.jit(policy.logits, static_argnames=("model",))

    def load(self, path):
        self.previous, self.since = self.params, 0
        super().load(path)

    def answer(self, path, body):
        if path != "/v1/completions":
            return super().answer(path, body)
        self.since += 1
        lie = self.lie if self.since > agreement.ROWS else None
        params = self.params
        if lie == "previous weights" and self.previous is not None:
            params = self.previous
        random = np.random.default_rng(0 if lie == "one seed" else body["seed"])
        drawn, logprobs = [], []
        while len(drawn) < body["max_tokens"] and 1 not in drawn:
            row = [*body["prompt"], *drawn]
            tokens = np.array([[*row, *[0] * (WIDTH - len(row))]], np.int32)
            mask = np.arange(WIDTH)[None] < len(row)
            logits = self._logits(params, model=self.model, tokens=tokens, mask=mask)
            logits = np.float64(logits[0, len(row) - 1])
            probs = np.exp(logits - logits.max())
            probs /= probs.sum()
            token = random.choice(len(probs), p=probs)
            token = int(probs.argmax()) if lie == "greedy" else int(token)
            drawn.append(token)
            logprobs.append(min(0.0, float(np.log(probs[token]))))
        if lie == "off by 0.2":
            logprobs = [x - 0.2 for x in logprobs]
        if lie == "wrong ids":  # none ends the response earlier, or later
            drawn = [token if token < 2 else 2 + (token - 1) % 22 for token in drawn]
        if lie == "swapped" and 1 not in drawn[:2]:
            drawn[:2] = drawn[1::-1]
            logprobs[:2] = logprobs[1::-1]
        choice = {"token_ids": drawn, "logprobs": {"token_logprobs": logprobs}}
        return {"choices": [choice]}


@functools.cache
def learn():
    return jax.jit(functools.partial(iteration.learn, recipe=RECIPE))


def spread(leaf):
    """Three times the initial weights, which makes some tokens likely."""
    return 3 * np.array(leaf)


def raised(sampler, steps):
    """The alarms by their first step."""
    train = state.grpo_state(
        policy=jax.tree.map(spread, toy_files.params()),
        policy_optimizer=RECIPE.policy_optimizer,
        kl=fixed(0.0),
    )
    limits = alarms.LIMITS.allowing(staleness=0)
    watch = alarms.Watch(functools.partial(alarms.check, limits=limits))
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(5), step)
        params = jax.device_get(train.policy)
        assert sampler.hand_over(params, version=step) < 1e-4
        drawn = sampler.draw(PROMPTS, key=key, version=step)
        rollout = protocol.rollout_of(PROMPTS, drawn, version=step)
        scores = (rollout.tokens[:, 2:] * rollout.response_mask[:, 2:]).mean(axis=1)
        train, stats, _ = learn()(
            train,
            rollout=rollout,
            scores=np.float32(scores),
            frozen=NO_MODELS,
            key=key,
        )
        means = jax.device_get(masked.mean_stats(stats))
        watch.see(step, {name: float(x) for name, x in means.items()})
    return {
        alarm.name: alarm.step
        for alarm in watch.raised
        if alarm.name.startswith("trust_")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "alarm"),
    [
        ("off by 0.2", "trust_distance"),
        ("wrong ids", "trust_distance"),
        ("swapped", "trust_distance"),
        ("greedy", "trust_entropy"),
        ("previous weights", "trust_distance"),
        ("one seed", "trust_duplicates"),
    ],
)
def test_a_lie_on_real_draws_alone_is_caught(lie, alarm):
    with (
        toy_server.serving(Drawing(lie)) as url,
        ServerSampler(url, RECIPE, tolerance=1e-4, timeout=5.0) as sampler,
    ):
        alarmed = raised(sampler, FEW)
    # At once; of the first weights there are none before them.
    assert alarmed.get(alarm) == (1 if lie == "previous weights" else 0), alarmed


@pytest.mark.slow
def test_an_honest_server_raises_nothing():
    with (
        toy_server.serving(Drawing(None)) as url,
        ServerSampler(url, RECIPE, tolerance=1e-4, timeout=5.0) as sampler,
    ):
        assert raised(sampler, MANY) == {}


@pytest.mark.slow
def test_our_decoder_raises_nothing():
    with ProcessSampler(RECIPE) as sampler:
        assert raised(sampler, 50) == {}
