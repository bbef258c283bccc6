"""Models, prompts and rollouts that can be checked by hand."""

from __future__ import annotations

import functools

import jax
import numpy as np

from rlhf_jax import batch, config, decoder, frozen, masked, policy
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.models.config import ModelConfig

GPT2 = config.gpt2(
    vocab_size=13, hidden_size=16, num_layers=1, num_heads=2, max_positions=24
)
LLAMA = config.llama(
    vocab_size=13,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=24,
    max_positions=24,
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
STOP = (1, 2)  # token ids that end a response
SIZE = 5  # response columns
TRUNK = ("embed", "layers", "final_norm")

# Tests spend more time compiling than running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def array(x, dtype: type = np.float32) -> jax.Array:
    """Puts an array on a device; `jnp.asarray` would compile a program per shape."""
    return jax.device_put(np.asarray(x, dtype))


@functools.cache
def shapes(model: ModelConfig):
    """The shapes alone, since running `decoder.init` would compile a program."""
    return jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))


@functools.cache
def params(model: ModelConfig = GPT2, *, seed: int = 0, scale: float = 0.3):
    """Random parameters, with different predictions for every token."""
    rng = np.random.default_rng(seed + 100)

    def draw(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre = 1.0 if path[-1].key == "scale" and not model.norm_from_one else 0.0
        drawn = centre + rng.normal(0, scale, leaf.shape)
        return array(drawn, leaf.dtype)

    return jax.tree.map_with_path(draw, shapes(model))


def scorer(model: ModelConfig = GPT2, *, seed: int = 1):
    """Parameters with a scalar head: a reward model's or a critic's."""
    # New arrays: the cached arrays of `params` must survive a donation of these.
    own = params.__wrapped__(model, seed=seed)
    trunk = {name: own[name] for name in TRUNK}
    drawn = np.random.default_rng(seed + 200).normal(0, 0.3, model.hidden_size)
    kernel = array(drawn)
    return {
        "trunk": trunk,
        "score": {"kernel": kernel, "bias": array(0)},
    }


def weights(*, seed: int = 0):
    """Leaves of every kind that storages distinguish, with few shapes."""
    rng = np.random.default_rng(seed)

    def of(*shape: int) -> jax.Array:
        return array(rng.normal(0, 0.3, shape))

    return {
        "embed": {"positions": of(16, 8), "tokens": of(16, 8)},
        "layers": {
            "mlp": {"up": {"bias": of(2, 8), "kernel": of(2, 16, 8)}},
            "mlp_norm": {"scale": of(2, 8)},
        },
    }


def perturbed(tree, *, seed: int, scale: float):
    rng = np.random.default_rng(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        noise = rng.normal(0, scale, leaf.shape).astype(np.float32)
        return array(np.asarray(leaf) + noise.astype(leaf.dtype), leaf.dtype)

    return jax.tree.map(moved, tree)


def prompts(lengths=(4, 2, 3, 1), *, width: int = 4) -> batch.Prompts:
    """Left-padded prompts of tokens that do not stop a response."""
    rng = np.random.default_rng(7)
    mask = np.arange(width)[None, :] >= width - np.array(lengths)[:, None]
    tokens = rng.integers(3, GPT2.vocab_size, mask.shape)
    return batch.Prompts(
        tokens=array(np.where(mask, tokens, 0), np.int32),
        mask=array(mask, bool),
        index=array(np.arange(len(lengths)), np.int32),
        sample=array(np.zeros(len(lengths)), np.int32),
    )


sample = jit(
    rollout.rollout,
    static_argnames=("model", "max_new_tokens", "stop_ids", "temperature"),
)


# Compiled, because running op by op costs more than one program.
freeze = jit(frozen.freeze)
logits = jit(policy.logits, static_argnames=("model",))


def sampled(
    params, *, model: ModelConfig = GPT2, temperature: float = 0.7, seed: int = 5, **to
) -> batch.Rollout:
    return sample(
        params,
        model=model,
        prompts=prompts(**to),
        key=jax.random.key(seed),
        max_new_tokens=SIZE,
        stop_ids=STOP,
        temperature=temperature,
    )


def experience(rollout: batch.Rollout, *, seed: int = 0) -> batch.Experience:
    """An experience with random values, so that clips and ratios have an effect."""
    rng = np.random.default_rng(seed)

    def noise(scale: float) -> jax.Array:
        normal = rng.normal(0, scale, rollout.tokens.shape)
        return array(normal * np.asarray(rollout.response_mask))

    return batch.Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        response_mask=rollout.response_mask,
        value_mask=rollout.response_mask,
        old_logprobs=rollout.old_logprobs + noise(0.3),
        ref_logprobs=rollout.old_logprobs + noise(0.3),
        old_values=noise(0.5),
        token_rewards=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def leaves_equal(left, right) -> bool:
    """Whether all leaves are equal to the bit, with NaN equal to NaN."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def means(stats):
    """The means of stats except one that is a ratio of roundings for equal policies."""
    return {
        name: mean
        for name, mean in masked.mean_stats(stats).items()
        if name != "trust/weight_z"
    }
