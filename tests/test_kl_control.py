import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

from rlhf_jax import kl_control

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def run(controller, kls, num_episodes: int = 512) -> list[float]:
    """Coefficients before the first update and after each, from one jitted step."""
    step = jax.jit(lambda c, kl: c.update(kl=kl, num_episodes=num_episodes))
    coefficients = [float(controller.kl_coef)]
    for kl in kls:
        controller = step(controller, jnp.float32(kl))
        assert controller.kl_coef.dtype == jnp.float32
        coefficients.append(float(controller.kl_coef))
    return coefficients


def test_adaptive_matches_the_oracle():
    kls = [0.0, 3.0, 5.9, 6.0, 7.0, 100.0]
    expected = [0.15]
    for kl in kls:
        expected.append(oracles.adaptive_kl_coef(expected[-1], kl, 512, 6.0, 10000))
    found = run(
        kl_control.adaptive(0.15, target=6.0, unit="response", horizon=10000), kls
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_adaptive_by_hand():
    # Error 0.1 over 1000 of 10000 episodes: 1 % more. Twice the target is cut to 0.2.
    controller = kl_control.adaptive(0.1, target=6.0, unit="response", horizon=10000)
    assert run(controller, [6.6], 1000)[1] == pytest.approx(0.101, rel=1e-6)
    assert run(controller, [12.0], 1000)[1] == pytest.approx(0.102, rel=1e-6)
    assert run(controller, [6.0], 1000)[1] == pytest.approx(0.1, rel=1e-6)


def test_adaptive_settles_where_the_kl_meets_the_target():
    # A policy whose KL falls as the coefficient rises: kl = 0.6 / kl_coef.
    controller = kl_control.adaptive(0.02, target=6.0, unit="response", horizon=1000)
    for _ in range(100):
        controller = controller.update(kl=0.6 / controller.kl_coef, num_episodes=512)
    assert float(controller.kl_coef) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("kl", [np.nan, np.inf, -np.inf])
def test_a_broken_batch_does_not_move_the_coefficient(kl: float):
    controller = kl_control.adaptive(0.15, target=6.0, unit="response", horizon=10000)
    assert run(controller, [kl])[1] == pytest.approx(0.15)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_fixed_stays(kl_coef: float):
    found = run(kl_control.fixed(kl_coef), [0.0, 100.0])
    assert found == pytest.approx([kl_coef] * 3)


def test_scheduled_follows_the_iteration():
    schedule = optax.linear_schedule(0.2, 0.0, transition_steps=4)
    found = run(kl_control.scheduled(schedule, num_steps=6), [9.0] * 5)
    np.testing.assert_allclose(found, [0.2, 0.15, 0.1, 0.05, 0.0, 0.0], atol=1e-7)


def test_records_go_through_scan_and_keep_their_leaves():
    """Part of every snapshot: the arrays are leaves, the settings are not."""
    adaptive = kl_control.adaptive(0.15, target=6.0, unit="response", horizon=10000)
    assert len(jax.tree.leaves(adaptive)) == 1
    schedule = optax.constant_schedule(0.1)
    assert len(jax.tree.leaves(kl_control.scheduled(schedule, num_steps=6))) == 2

    def step(controller, kl):
        return controller.update(kl=kl, num_episodes=64), controller.kl_coef

    kls = jnp.array([1.0, 8.0, 6.5])
    _, coefficients = jax.lax.scan(step, adaptive, kls)
    np.testing.assert_allclose(coefficients, run(adaptive, kls, 64)[:-1], rtol=1e-6)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_bad_coefficients(bad: float):
    with pytest.raises(ValueError, match=r"kl_coef: expected .* 0 or more, got .*;"):
        kl_control.fixed(bad)
    with pytest.raises(ValueError, match=r"schedule\(0\): expected .*, got .*; choose"):
        kl_control.scheduled(lambda step: jnp.float32(bad), num_steps=1)
    with pytest.raises(ValueError, match=r"kl_coef: expected .* above 0, got .*;"):
        kl_control.adaptive(bad, target=6.0, unit="response", horizon=10000)


def test_bad_settings_of_adaptive():
    with pytest.raises(ValueError, match=r"kl_coef: expected .* above 0, got 0"):
        kl_control.adaptive(0.0, target=6.0, unit="response", horizon=10000)
    with pytest.raises(ValueError, match=r"target: expected .* above 0, got -6"):
        kl_control.adaptive(0.1, target=-6.0, unit="response", horizon=10000)
    with pytest.raises(ValueError, match=r"horizon: expected .* above 0, got 0"):
        kl_control.adaptive(0.1, target=6.0, unit="response", horizon=0)
    controller = kl_control.adaptive(0.1, target=6.0, unit="response", horizon=100)
    with pytest.raises(ValueError, match=r"num_episodes: expected below 500 .*raise"):
        controller.update(kl=jnp.float32(1.0), num_episodes=512)
    with pytest.raises(ValueError, match=r"kl: expected shape \(\), got \(3,\); pass"):
        controller.update(kl=jnp.ones(3), num_episodes=4)
