"""Gradient regularisation: the gradient of L + γ/2·‖∇L‖², alone and in an update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_turns
import toys

from rlhf_jax import grpo, kl_control, state
from rlhf_jax.algorithms.policy_gradient.gradient_penalty import penalised
from rlhf_jax.algorithms.policy_gradient.iteration import learn
from rlhf_jax.algorithms.policy_gradient.options import GradientPenalty
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_LOSS
from rlhf_jax.roles.reference.frozen import FrozenModels

STRENGTH = 0.3
RECIPE = grpo.GRPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(1.0),
    max_new_tokens=toy_turns.SIZE,
    stop_ids=toys.STOP,
    group_size=2,
    penalty=IN_LOSS,
)


learned = toys.jit(learn, static_argnames=("recipe",))


def loss(x):
    return jnp.sum(jnp.sin(x["a"]) * x["b"] ** 2) + jnp.sum(jnp.exp(x["b"]))


def test_it_is_the_gradient_of_half_the_squared_norm():
    x = {"a": jnp.array([0.3, -1.0]), "b": jnp.array([0.5, 0.2])}

    def whole(x):
        slope = jax.grad(loss)(x)
        return loss(x) + STRENGTH / 2 * optax.tree.norm(slope, squared=True)

    expected, first = jax.grad(whole)(x), jax.grad(loss)(x)
    errors = []
    for step in (1e-1, 1e-2):
        chosen = GradientPenalty(strength=STRENGTH, step=step, max_norm=None)
        output = penalised(jax.grad(loss), x, first, penalty=chosen)
        errors.append(float(optax.tree.norm(optax.tree.sub(output, expected))))
    # Of first order in the step.
    assert errors[1] < 0.12 * errors[0] < 0.1
    assert optax.tree.norm(optax.tree.sub(first, expected)) > 1.0


def test_both_gradients_are_clipped():
    """L = x²/2 at 3: gradients 3 and 3 + 0.5·2 = 4, both clipped to 2."""
    for bound, expected in ((2.0, 2.0), (3.5, 3 + 0.6 * (3.5 - 3)), (None, 3 + 0.9)):
        chosen = GradientPenalty(strength=0.3, step=0.5, max_norm=bound)
        output = penalised(lambda x: x, jnp.array(3.0), jnp.array(3.0), penalty=chosen)
        assert float(output) == pytest.approx(expected)


def step_of(params, recipe):
    """The negative move of the parameters in one update on the same rollout."""
    before = state.grpo_state(
        policy=params,
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(0.2),
    )
    reference = toys.freeze(toys.params(seed=3, scale=0.15))
    after, stats, _ = learned(
        before,
        rollout=toy_turns.rollout(),
        scores=jnp.array([0.5, -1.0, 0.25, 2.0, -0.5, 1.0]),
        frozen=FrozenModels(reference=reference),
        key=jax.random.key(5),
        recipe=recipe,
    )
    grads = jax.tree.map(lambda old, new: np.asarray(old - new), params, after.policy)
    return grads, stats


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_an_update_takes_the_difference_of_two_updates(micro_batch_size):
    """With SGD at rate 1 parameters move by the gradient."""
    recipe = dataclasses.replace(
        RECIPE, micro_batch_size=micro_batch_size, num_epochs=1
    )
    params = toys.params(scale=0.15)
    first, plain = step_of(params, recipe)
    step = 0.05
    ahead = jax.tree.map(lambda x, g: x + step * g, params, first)
    second, _ = step_of(ahead, recipe)
    chosen = GradientPenalty(strength=STRENGTH, step=step)
    output, stats = step_of(
        params, dataclasses.replace(recipe, gradient_penalty=chosen)
    )
    for moved, one, other in zip(
        *map(jax.tree.leaves, (output, first, second)), strict=True
    ):
        expected = one + STRENGTH / step * (other - one)
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=2e-5)
    assert not np.allclose(optax.tree.norm(output), optax.tree.norm(first), rtol=1e-2)
    # What is reported is of the parameters before the step.
    for name in ("loss/policy", "policy/approxkl", "loss/kl"):
        np.testing.assert_allclose(stats[name], plain[name], rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"strength": 0.0}, {"strength": 1.0, "step": -1.0}]
)
def test_numbers_are_above_0(options):
    with pytest.raises(InputError, match="expected a finite number above 0"):
        GradientPenalty(**options)
