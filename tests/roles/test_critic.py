import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import critic, policy, rewards
from rlhf_jax.functional.checks import InputError

LENGTHS, SIZE = (6, 4, 1), 6
MODEL = tiny.GPT2
values_of = jax.jit(critic.values, static_argnames="model")


def params():
    rng = np.random.default_rng(5)
    head = {
        "kernel": jnp.asarray(rng.normal(size=MODEL.hidden_size), jnp.float32),
        "bias": jnp.float32(0.25),
    }
    return {"trunk": tiny.params(MODEL), "score": head}


def test_a_value_is_the_head_of_the_state_before_its_token():
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    values = np.asarray(values_of(params(), model=MODEL, tokens=tokens, mask=mask))
    assert values.dtype == np.float32
    # The reward model reads the last token: of a text cut just before column t.
    score = jax.jit(rewards.sequence_scores, static_argnames="model")
    for t in range(1, SIZE):
        mask_before = mask & (np.arange(SIZE) < t)[None, :]
        before = np.asarray(
            score(params(), model=MODEL, tokens=tokens, mask=mask_before)
        )
        known = mask[:, t] & mask[:, t - 1]
        np.testing.assert_allclose(values[known, t], before[known], atol=1e-5)
        assert not values[~known, t].any()
    assert not values[:, 0].any()


def test_a_value_does_not_see_its_own_token():
    tokens, mask = tiny.batch((SIZE,), SIZE, side="left")
    before = np.asarray(values_of(params(), model=MODEL, tokens=tokens, mask=mask))
    for t in range(SIZE - 1):
        changed = tokens.copy()
        changed[0, t] = (changed[0, t] + 1) % tiny.VOCAB
        after = np.asarray(values_of(params(), model=MODEL, tokens=changed, mask=mask))
        np.testing.assert_array_equal(after[0, : t + 1], before[0, : t + 1])
        assert (np.abs(after - before)[0, t + 1 :] > 1e-5).all()


def test_column_0_cannot_be_the_first():
    """Column 0 has no state before it, and index -1 would be the last column."""
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    arrays = {"model": MODEL, "tokens": tokens, "mask": mask, "first_column": 0}
    for function, parameters in (
        (critic.values, params()),
        (policy.logprobs, params()["trunk"]),
        (policy.logprobs_and_entropy, params()["trunk"]),
    ):
        with pytest.raises(InputError, match="first_column: expected a finite number"):
            function(parameters, **arrays)


def test_padding_on_either_side_changes_no_value():
    values_of_side = {}
    for side in ("left", "right"):
        tokens, mask = tiny.batch(LENGTHS, SIZE, side=side, padding=-1)
        values = values_of(params(), model=MODEL, tokens=tokens, mask=mask)
        values_of_side[side] = np.asarray(values)[mask]
    np.testing.assert_allclose(
        values_of_side["left"], values_of_side["right"], atol=1e-5
    )


def test_a_critic_of_the_policy_starts_at_0_and_learns():
    start = critic.from_policy(tiny.params(MODEL), model=MODEL)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    values = values_of(start, model=MODEL, tokens=tokens, mask=mask)
    np.testing.assert_array_equal(values, 0.0)

    def error(head):
        values = critic.values(
            {**start, "score": head}, model=MODEL, tokens=tokens, mask=mask
        )
        return ((values - 1.0) ** 2).sum()

    gradient = jax.jit(jax.grad(error))(start["score"])
    assert np.asarray(gradient["kernel"]).any()
    assert float(gradient["bias"]) != 0
    assert set(start["trunk"]) == {"embed", "layers", "final_norm"}


def test_a_critic_is_a_copy():
    source = jax.tree.map(jnp.copy, params())
    made = critic.from_policy(source["trunk"], model=MODEL)
    expected = {"trunk": params()["trunk"]}
    jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(source)
    assert source["trunk"]["embed"]["tokens"].is_deleted()
    for name, leaves in expected.items():
        chex.assert_trees_all_equal(made[name], leaves)


@pytest.mark.slow
def test_an_untied_policy_leaves_its_head_behind():
    made = critic.from_policy(tiny.params(tiny.LLAMA), model=tiny.LLAMA)
    assert "head" not in made["trunk"]
    assert "head" in tiny.params(tiny.LLAMA)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    shapes = [
        jax.eval_shape(
            lambda f=f, p=p: f(p, model=tiny.LLAMA, tokens=tokens, mask=mask)
        )
        for f, p in [(critic.values, made), (policy.logprobs, tiny.params(tiny.LLAMA))]
    ]
    assert shapes[0] == shapes[1]
