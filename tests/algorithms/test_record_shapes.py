"""The records that a batch passes through have the shapes of their annotations."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest
import toys
from beartype.door import is_bearable
from jaxtyping import jaxtyped

from rlhf_jax import frozen, rewards
from rlhf_jax.algorithms import batch
from rlhf_jax.algorithms.flow import rollout, score


def check(record) -> None:
    """A size, such as B or S, has one value in all fields of a record."""
    with jaxtyped("context"):
        for name, hint in typing.get_type_hints(type(record)).items():
            value = getattr(record, name)
            assert is_bearable(value, hint), f"{name} is not {hint}, but {value}"


def test_from_prompts_to_experience():
    check(toys.prompts())

    def way(params, prompts, key):
        sampled = rollout.rollout(
            params,
            model=toys.GPT2,
            prompts=prompts,
            key=key,
            max_new_tokens=toys.SIZE,
            stop_ids=toys.STOP,
            temperature=0.7,
            version=jnp.int32(3),
        )
        sampled = rollout.recompute_logprobs(
            sampled,
            params,
            model=toys.GPT2,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
        )
        scored = score.score(
            sampled,
            reference=frozen.freeze(params),
            values=score.response_values(
                rewards.init(key, params, model=toys.GPT2),
                rollout=sampled,
                model=toys.GPT2,
                max_new_tokens=toys.SIZE,
                after_stop=False,
            ),
            scores=jnp.zeros(4, jnp.float32),
            model=toys.GPT2,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
        )
        for record in (sampled, scored):
            check(record)
        return scored

    scored = jax.eval_shape(way, toys.params(), toys.prompts(), jax.random.key(0))
    assert scored.values is not None
    assert scored.kl is not None


def test_an_experience():
    check(toys.experience(toys.sampled(toys.params())))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", jnp.zeros((4, 3), jnp.int32)),  # another S
        ("tokens", jnp.zeros((4, 4), jnp.float32)),
        ("mask", jnp.ones((4, 4), jnp.int32)),
        ("index", jnp.zeros((4, 1), jnp.int32)),
    ],
)
def test_a_wrong_shape_or_dtype_is_found(name, value):
    wrong = dataclasses.replace(toys.prompts(), **{name: value})
    with pytest.raises(AssertionError, match="is not"):
        check(wrong)


def test_preferences():
    tokens = jnp.zeros((2, 5), jnp.int32)
    mask = jnp.ones((2, 5), jnp.bool_)
    texts = batch.Sequences(tokens=tokens, mask=mask, response_mask=mask)
    check(texts)
    check(batch.Preferences(chosen=texts, rejected=texts))
    pairs = jnp.ones((2, 3), jnp.bool_)
    check(
        batch.PackedPreferences(
            tokens=tokens,
            segments=tokens,
            response_mask=mask,
            pairs=pairs,
            index=jnp.zeros(2, jnp.int32),
        )
    )
