"""Routing replay on a mixture whose router is near ties: gradient, mismatch, clipping.

    python experiments studies.routing_replay --out runs/routing_replay

The study enumerates all 256 responses of 4 tokens from a vocabulary of 4. The model is
a mixture of 2 layers and 6 experts, 2 per token. The sampler computes in bfloat16, so
some tokens go to other experts than in the trainer. Every expectation is an exact sum
over responses, weighted by μ.

certificate  The expected gradient of E_μ[r · π/μ], with and without the ratio, compared
             with ∇E[r] of two policies: π, with its own experts, and π^μ, with the
             experts that the sampler chose. After an update R2 is compared with the
             policy that has the experts of the previous policy.
mismatch     E_μ |log π_old - log μ|, nats per token.
clipped      Share of tokens, weighted by μ, with a ratio π/μ outside [0.8, 1.2].
KL           From the policy to a reference with its own experts, and to one with the
             experts of the policy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from certificates import conclusion

from rlhf_jax import config, decoder, policy
from rlhf_jax.functional import checks
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.runs import command_line, report, run, run_config

Array = jax.Array
Params = Any
WORDS, LENGTH, CLIP = 4, 4, 0.2
MODEL = dataclasses.replace(
    config.llama(
        vocab_size=WORDS + 1,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=24,
        max_positions=8,
    ),
    experts=config.Experts(6, 2),
)
PROMPT = WORDS  # a token that no response has
TOKENS = np.array(
    [(PROMPT, *words) for words in itertools.product(range(WORDS), repeat=LENGTH)],
    np.int32,
)
SLACK = 1e-5  # tolerance, relative to the largest entry of a target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    near_tie: float = 0.01
    """Standard deviation between the experts' rows of a router, whose entries are
    about 1."""
    step: float = 0.3
    """Step size of the update on E[r] between R2's record and its replay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(near_tie=self.near_tie, step=self.step)


def draw(seed: int, *, near_tie: float) -> Params:
    """Draws parameters of a mixture whose router has nearly equal rows."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> Array:
        name = jax.tree_util.keystr(path)
        scale = near_tie if "router" in name else 0.3
        centre: Any = 1.0 if "scale" in name else 0.0
        if "router" in name:  # a large common part, which makes rounding matter
            centre = rng.normal(size=(*shape.shape[:-1], 1))
        return jnp.asarray(centre + rng.normal(0, scale, shape.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, decoder.shapes(MODEL))


@functools.partial(jax.jit, static_argnames="model")
def logprobs(params: Params, experts: Array | None = None, *, model: ModelConfig):
    """f32[256, 4] of every response, nats, normalised without the prompt's token."""
    unused = dataclasses.replace(model, unused_ids=((PROMPT, PROMPT + 1),))
    mask = jnp.ones(TOKENS.shape, bool)
    return policy.logprobs(
        params, model=unused, tokens=jnp.asarray(TOKENS), mask=mask, experts=experts
    )[:, 1:]


@functools.partial(jax.jit, static_argnames="model")
def chosen(params: Params, *, model: ModelConfig) -> Array:
    """i32[256, 5, L, k], the experts of every token of every response."""
    mask = jnp.ones(TOKENS.shape, bool)
    routing = decoder.hidden_and_routing(
        params, model=model, tokens=jnp.asarray(TOKENS), mask=mask
    )[1]
    return routing.chosen


def probabilities(logprobs: Array) -> Array:
    """f32[256], the probability of every response."""
    return jnp.exp(logprobs.sum(axis=1))


def gradient_of_reward(params: Params, rewards: Array, experts: Array | None) -> Params:
    """∇E[r] of the policy, with its own experts or with the given ones."""

    def expected(params: Params) -> Array:
        return (probabilities(logprobs(params, experts, model=MODEL)) * rewards).sum()

    return jax.jit(jax.grad(expected))(params)


def surrogate(
    params: Params, mu: Array, rewards: Array, experts: Array | None, *, ratio: bool
) -> Params:
    """∇ E_μ[r · π/sg(π_old)], where π_old is μ with `ratio` and π without."""

    def expected(params: Params) -> Array:
        new = logprobs(params, experts, model=MODEL)
        old = mu if ratio else jax.lax.stop_gradient(new)
        weights = jnp.exp((new - old).sum(axis=1))
        return (probabilities(mu) * weights * rewards).sum()

    return jax.jit(jax.grad(expected))(params)


def distance(one: Params, other: Params) -> float:
    """max |one - other| / max |other| over all leaves."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    apart = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    return apart / max(float(jnp.abs(b).max()) for b in jax.tree.leaves(other))


def measure(seed: int, *, near_tie: float, step: float) -> dict[str, Any]:
    """Measures all figures of one world."""
    params = draw(seed, near_tie=near_tie)
    reference = draw(seed + 1000, near_tie=near_tie)
    rewards = jnp.asarray(np.random.default_rng(seed).normal(size=len(TOKENS)))
    rewards = rewards.astype(jnp.float32)
    sampler = dataclasses.replace(MODEL, dtype="bfloat16")
    mu = logprobs(params, model=sampler)
    of_sampler = chosen(params, model=sampler)
    of_old = chosen(params, model=MODEL)
    own = gradient_of_reward(params, rewards, None)
    frozen = gradient_of_reward(params, rewards, of_sampler)
    rows = {}
    for name, experts in {"off": None, "R2": of_old, "R3": of_sampler}.items():
        new = logprobs(params, experts, model=MODEL)
        weights = probabilities(mu)[:, None] / LENGTH
        outside = jnp.abs(jnp.exp(new - mu) - 1) > CLIP
        figures = {
            "mismatch": float((weights * jnp.abs(new - mu)).sum()),
            "clipped": float((weights * outside).sum()),
        }
        for ratio in (True, False):
            gradient = surrogate(params, mu, rewards, experts, ratio=ratio)
            how = "ratio" if ratio else "no ratio"
            figures[f"{how}, of π"] = distance(gradient, own)
            figures[f"{how}, of π^μ"] = distance(gradient, frozen)
        rows[name] = figures
    moved = jax.tree.map(lambda leaf, slope: leaf + step * slope, params, own)
    old = logprobs(params, model=MODEL)
    stale = surrogate(moved, old, rewards, of_old, ratio=True)
    other = chosen(moved, model=MODEL)
    pi = logprobs(params, of_old, model=MODEL)
    mean = probabilities(pi)
    kls = {
        name: float((mean * (pi - ref).sum(axis=1)).sum())
        for name, ref in {
            "own experts": logprobs(reference, model=MODEL),
            "the policy's experts": logprobs(reference, of_old, model=MODEL),
        }.items()
    }
    return {
        "seed": seed,
        "flipped": float((jnp.sort(of_sampler) != jnp.sort(of_old)).any(-1).mean()),
        "flipped by the update": float(
            (jnp.sort(other) != jnp.sort(of_old)).any(-1).mean()
        ),
        "replay": rows,
        "R2 after an update, of π": distance(
            stale, gradient_of_reward(moved, rewards, None)
        ),
        "R2 after an update, of π^old": distance(
            stale, gradient_of_reward(moved, rewards, of_old)
        ),
        "kl": kls,
    }


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """{claim: whether it holds}."""
    rows = figures["replay"]
    off, replayed = rows["off"], rows["R3"]
    return {
        "off with the ratio: ∇E[r] of π": off["ratio, of π"] < SLACK,
        "R3 with the ratio: ∇E[r] of π^μ": replayed["ratio, of π^μ"] < SLACK,
        "R3 is not ∇E[r] of π": replayed["ratio, of π"] > 100 * SLACK,
        "R2 at the first update: as off": rows["R2"] == off,
        "R2 later: ∇E[r] of π^old": figures["R2 after an update, of π^old"] < SLACK,
        "R3 lowers the mismatch": replayed["mismatch"] < off["mismatch"],
    }


def main(options: Config) -> None:
    """Prints the tables; raises StopError if a certificate fails."""
    started = time.perf_counter()
    with run.Run(options, num_steps={}) as job:
        figures = measure(options.seed, near_tie=options.near_tie, step=options.step)
        columns = list(figures["replay"]["off"])
        report.table(
            f"{figures['flipped']:.1%} of choices flip between sampler and trainer",
            ("replay", *columns),
            [
                (name, *(f"{row[column]:.1e}" for column in columns))
                for name, row in figures["replay"].items()
            ],
        )
        for name, value in figures["kl"].items():
            print(f"KL to a reference with {name}: {value:.4f} nats")
        shown = verdicts(figures)
        for name, holds in shown.items():
            print(f"{name}: {'holds' if holds else 'FAILS'}")
    conclusion.conclude(
        job.folder,
        list(shown.items()),
        not_covered=("routers that learn between samples, other sizes of near ties",),
        figures={"figures": figures},
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
