"""DPO's optimum on the enumerable world, by its gradient and by training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from certificates import verdicts
from certificates.measured import dpo
from worlds import enumerable

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=256)
LOG_REF = LOGITS - np.logaddexp.reduce(LOGITS)
REWARDS = RNG.normal(0, 0.3, 256)


def all_pairs(beta):
    """log π -> (loss, gradient)."""
    of = toys.jit(jax.value_and_grad(dpo.loss, has_aux=True))

    def loss(log_policy):
        (value, stats), gradient = of(
            jnp.asarray(log_policy, jnp.float32),
            log_ref=jnp.asarray(LOG_REF, jnp.float32),
            rewards=jnp.asarray(REWARDS, jnp.float32),
            beta=beta,
        )
        assert float(stats["loss/dpo"][1]) == 256 * 255 / 2
        return float(value), np.asarray(gradient, np.float64)

    return loss


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_optimum_of_the_loss_is_that_of_ppo(beta):
    """No gradient at π* ∝ π_ref exp(r/β), and no lower loss: the labels' entropy."""
    loss = all_pairs(beta)
    best = enumerable.optimum(LOG_REF, REWARDS, beta=beta).log_policy
    start, slope = loss(LOG_REF)
    assert start == pytest.approx(np.log(2), rel=1e-6)
    value, flat = loss(best)
    assert np.abs(flat).max() < 1e-3 * np.abs(slope).max()
    lead = REWARDS[:, None] - REWARDS[None, :]
    better = 1 / (1 + np.exp(-lead[np.triu_indices(256, 1)]))
    entropy = -better * np.log(better) - (1 - better) * np.log(1 - better)
    assert value == pytest.approx(entropy.mean(), rel=1e-5)
    assert value < start
    for seed in range(3):
        noise = 0.1 * np.random.default_rng(seed).normal(size=256)
        assert loss(best + noise)[0] > value


@pytest.mark.long
def test_dpo_reaches_the_optimum():
    model = enumerable.model(hidden_size=32)
    world = enumerable.draw(3, model=model, distance=3.5)
    best = world.optimum(0.3).log_policy
    assert enumerable.divergence(world.log_ref, best) > 0.2
    reached = dpo.reach(world, beta=0.3, model=model, steps=1000)
    assert np.exp(reached).sum() == pytest.approx(1, abs=1e-5)
    assert enumerable.divergence(reached, best) <= verdicts.NATS
