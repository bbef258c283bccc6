"""Compares a GRPO update on padded and on packed rows, for uneven lengths.

    python experiments benchmarks.packing --response-length 48 --mean 0.29
    python experiments benchmarks.packing --response-length 240 --mean 0.2 --equal

Prompts fill half to all of their columns. Response lengths are lognormal with a mean of
--mean of the longest (σ = 0.8, cut at the longest), and nothing is sampled. Both
updates start from the same state and take turns in one process, and their results are
compared. The time of the packed update includes the host's, which reads lengths and
packs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from rlhf_jax import config, decoder, grpo, kl_control, state
from rlhf_jax.algorithms.batch import PolicyExperience, RolloutPacking
from rlhf_jax.algorithms.policy_gradient.update import minibatches
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts import arrays
from rlhf_jax.functional import checks
from rlhf_jax.models import layout

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    rows: int = 64
    """Responses per iteration."""
    prompt_length: int = 16
    """Columns of a prompt."""
    response_length: int = 48
    """Columns of a response."""
    mean: float = 0.29
    """Mean length of a response, as a share of the columns."""
    equal: bool = False
    """Give every response the full length."""
    vocab_size: int = 512
    """Tokens of the vocabulary."""
    hidden_size: int = 256
    """Width of the model."""
    num_layers: int = 4
    """Layers of the model."""
    group_size: int = 1
    """Adjacent responses to one prompt, which packed rows store once."""
    num_minibatches: int = 4
    """Optimizer steps per pass."""
    num_epochs: int = 1
    """Passes over the batch."""
    rounds: int = 5
    """Measured updates of each kind, after a warm-up update."""
    iterations: int = 200
    """Batches of new lengths over which the used shapes are counted."""

    def __post_init__(self) -> None:
        checks.positive(rounds=self.rounds, mean=self.mean)


def lengths(options: Config, rng: np.random.Generator) -> Any:
    """Draws the lengths of prompts and responses, i32[B, 2], tokens."""
    longest, rows = options.response_length, options.rows
    groups = rows // options.group_size
    prompts = rng.integers(
        options.prompt_length // 2, options.prompt_length + 1, groups
    ).repeat(options.group_size)
    drawn = rng.lognormal(np.log(options.mean * longest) - 0.32, 0.8, rows).astype(int)
    responses = np.full(rows, longest) if options.equal else np.clip(drawn, 1, longest)
    return np.stack([prompts, responses], axis=1)


def experience(options: Config, spans: Any, rng: Any) -> PolicyExperience:
    """Draws random tokens, log-probs and advantages with these lengths."""
    prompt, columns = (
        options.prompt_length,
        np.arange(options.prompt_length + options.response_length),
    )
    response = (columns >= prompt) & (columns < prompt + spans[:, 1:])
    mask = response | ((columns < prompt) & (columns >= prompt - spans[:, :1]))
    noise = rng.standard_normal(mask.shape)
    tokens = rng.integers(0, options.vocab_size, mask.shape)
    size = options.group_size
    tokens[:, :prompt] = tokens[::size, :prompt].repeat(size, axis=0)
    chance = -np.log(options.vocab_size)

    def numbers(values: Any) -> Array:
        return jnp.asarray(np.where(response, values, 0), jnp.float32)

    return PolicyExperience(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(mask),
        response_mask=jnp.asarray(response),
        old_logprobs=numbers(chance + 0.1 * noise),
        ref_logprobs=numbers(chance + 0.1 * noise),
        token_rewards=numbers(0 * noise),
        advantages=numbers(rng.standard_normal((options.rows, 1))),
    )


def main(options: Config) -> None:
    """Prints both times, their ratio, the largest difference and the shapes used."""
    rng = np.random.default_rng(0)
    model = layout.fastest(
        config.gpt2(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.hidden_size // 64,
            max_positions=options.prompt_length + options.response_length,
        )
    )
    recipe = grpo.GRPO(
        model=model,
        policy_optimizer=optax.sgd(0.1),
        max_new_tokens=options.response_length,
        stop_ids=(1,),
        num_minibatches=options.num_minibatches,
        num_epochs=options.num_epochs,
    )
    policy = decoder.init(jax.random.key(0), model=model)
    key = jax.random.key(1)
    spans = lengths(options, rng)
    batch = experience(options, spans, rng)
    columns = batch.tokens.shape[1]
    packer = layouts.Packer(
        arrays.Form(
            rows=options.rows,
            num_minibatches=options.num_minibatches,
            max_new_tokens=options.response_length,
            width=columns,
            group_size=options.group_size,
        ),
        sample=lengths(options, rng),
    )
    order = jax.jit(functools.partial(minibatches, rows=options.rows, recipe=recipe))
    update = jax.jit(
        functools.partial(grpo.update, recipe=recipe), donate_argnames=("state",)
    )

    def fresh() -> state.TrainState:
        return state.grpo_state(
            policy=jax.tree.map(jnp.copy, policy),
            policy_optimizer=recipe.policy_optimizer,
            kl=kl_control.fixed(0.1),
        )

    def pack() -> RolloutPacking | None:
        return packer(spans, np.asarray(order(key)), columns=columns)

    def run(packed: bool) -> tuple[float, float, Any]:
        start = jax.block_until_ready(fresh())
        wall, cpu = time.perf_counter(), time.process_time()
        packing = pack() if packed else None
        after, stats = update(start, experience=batch, key=key, packing=packing)
        jax.block_until_ready((after, stats))
        return time.perf_counter() - wall, time.process_time() - cpu, after.policy

    kinds = {"padded": False, "packed": True}
    results = {name: run(packed)[2] for name, packed in kinds.items()}
    moved = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(
            jax.tree.leaves(results["padded"]), jax.tree.leaves(policy), strict=True
        )
    )
    apart = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True)
    )
    times = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, packed in kinds.items():
            times[name].append(run(packed)[:2])
    for name, times_of_program in times.items():
        print(f"{name}: {np.median(times_of_program, axis=0)} s (wall, CPU)")
    ratios = np.array(times["packed"]) / np.array(times["padded"])
    for name, ratio in zip(("ratio", "ratio of CPU time"), ratios.T, strict=True):
        print(f"{name} {np.median(ratio):.3f} ({ratio.min():.3f} to {ratio.max():.3f})")
    print(f"largest difference {apart / moved:.2g} of the largest movement")
    print(f"sizes of a minibatch (packed rows, columns read): {packer.minibatch}")
    packer.used.clear()
    started = time.perf_counter()
    for step in range(options.iterations):
        packer(
            lengths(options, rng),
            np.asarray(order(jax.random.fold_in(key, step))),
            columns=columns,
        )
    host = (time.perf_counter() - started) / max(1, options.iterations)
    print(f"{1e3 * host:.1f} ms per iteration on the host; sizes that were used:")
    for (kind, number), count in sorted(packer.used.items()):
        print(f"  {kind} {number}: {count}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
