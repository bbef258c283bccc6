import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from tiers import one_in

from rlhf_jax import kl_control
from rlhf_jax.functional import checks

pytestmark = pytest.mark.usefixtures("strict_dtypes")

MAKE = {
    "adaptive": kl_control.Adaptive,
    "pi": kl_control.PI,
    "lagrangian": kl_control.Lagrangian,
}


def made(name, kl_coef, *, target=6.0, unit="response", **options):
    choice = MAKE[name](target=target, unit=unit, **options)
    return choice.controller(kl_coef, num_steps=3)


adaptive = functools.partial(made, "adaptive")
pi = functools.partial(made, "pi")
lagrangian = functools.partial(made, "lagrangian")
OAI = {"horizon": 10_000}
GAINS = {"proportional": 0.3, "integral": 0.05}
PER_RESPONSE = {
    "adaptive": adaptive(0.15, **OAI),
    "pi": pi(0.15, **GAINS),
    "lagrangian": lagrangian(0.15, learning_rate=1e-3),
}
LENGTH = 48.0
PER_TOKEN = {
    name: dataclasses.replace(controller, unit="token", target=6.0 / LENGTH)
    for name, controller in PER_RESPONSE.items()
}
HOLDING = pytest.mark.parametrize("name", PER_RESPONSE)


@functools.partial(jax.jit, static_argnames="num_episodes")
def step(controller, kl, length, *, num_episodes: int):
    return controller.update(kl=kl, num_episodes=num_episodes, mean_length=length)


def run(controller, kls, num_episodes: int = 512, length=None) -> list[float]:
    """The coefficients before the first update and after each, by one jitted step."""
    length = None if length is None else jnp.float32(length)
    coefficients = [float(controller.kl_coef)]
    for kl in kls:
        controller = step(
            controller, jnp.float32(kl), length, num_episodes=num_episodes
        )
        assert controller.kl_coef.dtype == jnp.float32
        coefficients.append(float(controller.kl_coef))
    return coefficients


@pytest.mark.parametrize("length", [None, 1.0, 23.5])
def test_adaptive_matches_the_oracle(length):
    """Nats per token are the total KL of the responses over their tokens."""
    kls = [0.0, 3.0, 5.9, 6.0, 7.0, 100.0]
    unit, tokens = ("response", 1.0) if length is None else ("token", length)
    expected = [0.15]
    for kl in kls:
        expected.append(
            oracles.adaptive_kl_coef(expected[-1], kl / tokens, 512, 0.5, 10000)
        )
    controller = adaptive(0.15, target=0.5, unit=unit, horizon=10000)
    np.testing.assert_allclose(run(controller, kls, 512, length), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kl", "kl_coef"),
    [
        (0.0, 0.148464),  # -0.2 over 512 of 10000 episodes: 1.024 % less
        (4.8, 0.148464),  # 0.8 of the target, where the clip begins
        (5.4, 0.149232),  # 0.9 of it: half as much
        (6.0, 0.15),
        (6.6, 0.150768),
        (7.2, 0.151536),
        (100.0, 0.151536),  # the other end of the clip
    ],
)
def test_adaptive_by_hand_with_the_numbers_of_oai(kl, kl_coef):
    assert run(adaptive(0.15, **OAI), [kl])[1] == pytest.approx(kl_coef, rel=1e-6)


def test_adaptive_by_hand():
    # Error 0.1 over 1000 of 10000 episodes: 1 % more. Twice the target is cut to 0.2.
    controller = adaptive(0.1, **OAI)
    assert run(controller, [6.6], 1000)[1] == pytest.approx(0.101, rel=1e-6)
    assert run(controller, [12.0], 1000)[1] == pytest.approx(0.102, rel=1e-6)
    assert run(controller, [6.0], 1000)[1] == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("proportional", "integral", "max_error"),
    [(0.3, 0.05, 1.0), (0.0, 0.2, 1.0), (1.0, 0.01, 1.0), (0.3, 0.05, 0.2)],
)
def test_pi_adds_up_to_its_position_form(proportional, integral, max_error):
    """log β = log β_0 + kp·e + ki·Σe, in float64 and from the errors alone."""
    kls = [0.0, 3.0, 5.4, 6.0, 9.0, 30.0, 6.0]
    errors = np.clip(np.array(kls) / 6 - 1, -max_error, max_error)
    expected = 0.15 * np.exp(proportional * errors + integral * np.cumsum(errors))
    controller = pi(
        0.15, proportional=proportional, integral=integral, max_error=max_error
    )
    np.testing.assert_allclose(run(controller, kls)[1:], expected, rtol=1e-6)


def test_pi_rests_at_its_target():
    """At the start, and after the proportional term of the last error is gone."""
    assert run(pi(0.15, **GAINS), [6.0] * 3) == pytest.approx([0.15] * 4, rel=1e-7)
    first, *rest = run(pi(0.15, **GAINS), [9.0, 6.0, 6.0, 6.0])[1:]
    assert first == pytest.approx(0.15 * np.exp(0.3 * 0.5 + 0.05 * 0.5), rel=1e-6)
    assert rest == pytest.approx([0.15 * np.exp(0.05 * 0.5)] * 3, rel=1e-6)


def test_lagrangian_by_hand():
    """β + η·(kl - target), never below 0, from where it rises again."""
    coefficients = run(
        lagrangian(0.01, learning_rate=0.002), [8.0, 0.0, 0.0, 1.0, 7.0, 6.0]
    )
    expected = [0.01, 0.014, 0.002, 0.0, 0.0, 0.002, 0.002]
    assert coefficients == pytest.approx(expected, rel=1e-5)


@HOLDING
def test_a_target_per_token_is_one_per_response_over_the_length(name):
    kls = [0.0, 3.0, 7.0, 50.0, 6.0]
    by_token = run(PER_TOKEN[name], kls, length=LENGTH)
    if name == "lagrangian":  # its rate is for an excess per unit
        controller = dataclasses.replace(PER_TOKEN[name], learning_rate=1e-3 * LENGTH)
        by_token = run(controller, kls, length=LENGTH)
    expected = run(PER_RESPONSE[name], kls)
    assert by_token == pytest.approx(expected, rel=1e-5)
    # The length counts: the same nats over twice the tokens are half as many a token.
    longer = run(PER_TOKEN[name], [6.0], length=2 * LENGTH)
    assert longer[1] < run(PER_TOKEN[name], [6.0], length=LENGTH)[1]
    # And counts for nothing where the target is per response.
    assert run(PER_RESPONSE[name], kls, length=LENGTH) == expected


def simulate(controller, *, lag: float, num_steps: int = 600, length: float = 10.0):
    """The KL per response of a policy that approaches 3/β, with 10 % noise."""
    noise = np.random.default_rng(0).normal(1.0, 0.1, num_steps).astype(np.float32)

    def step(carry, noise):
        controller, kl = carry
        kl = kl + lag * (jnp.minimum(3.0 / controller.kl_coef, 50.0) - kl)
        controller = controller.update(
            kl=kl * noise, num_episodes=64, mean_length=jnp.float32(length)
        )
        return (controller, kl), kl

    return jax.lax.scan(step, (controller, jnp.float32(0.0)), noise)[1]


PLANT = {
    "adaptive": adaptive(0.1, horizon=400),
    "pi": pi(0.1, **GAINS),
    "lagrangian": lagrangian(0.1, learning_rate=1e-3),
}


@pytest.mark.cases(quick=1)
@HOLDING
@pytest.mark.parametrize("lag", one_in(2, [0.5, 0.05]))
@pytest.mark.parametrize("unit", ["response", "token"])
def test_a_lagging_policy_is_held_at_the_target(name, lag, unit):
    controller = PLANT[name]
    if unit == "token":
        controller = dataclasses.replace(controller, unit="token", target=0.6)
    if unit == "token" and name == "lagrangian":
        controller = dataclasses.replace(controller, learning_rate=1e-2)
    last = simulate(controller, lag=lag)[-150:]
    assert float(last.mean()) == pytest.approx(6.0, rel=0.05)
    assert float(jnp.std(last)) < 0.3  # it rests there, rather than swings about it
    start = simulate(kl_control.fixed(0.1), lag=lag)[-150:]
    assert float(start.mean()) == pytest.approx(30.0, rel=0.01)  # without it


# (controller, responses an update, bounds): β 0.2, target 6 nats.
WOUND_UP = {
    "pi": (pi(0.2, **GAINS), 512, (0.02, 2.0)),
    "adaptive": (adaptive(0.2, horizon=2000), 512, (0.02, 2.0)),
    "lagrangian": (lagrangian(0.2, learning_rate=1e-2), 512, (0.0, 2.0)),
}


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", WOUND_UP)
@pytest.mark.parametrize("num_steps", one_in(2, [500, 2000]))
def test_a_run_that_starts_slowly_comes_back_within_50_steps(name, num_steps):
    """The KL is 0.5 of 6 nats, then rises: 50 steps later β is the initial one."""
    controller, num_episodes, (lower, _) = WOUND_UP[name]
    coefficients = run(controller, [0.5] * num_steps + [12.0] * 50, num_episodes)
    assert coefficients[num_steps] == pytest.approx(lower, rel=1e-6)
    assert coefficients[-1] >= 0.2


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", WOUND_UP)
@pytest.mark.parametrize("num_steps", one_in(2, [500, 2000]))
def test_a_run_far_above_its_target_comes_back_within_50_steps(name, num_steps):
    controller, num_episodes, (_, upper) = WOUND_UP[name]
    coefficients = run(controller, [100.0] * num_steps + [0.0] * 50, num_episodes)
    assert coefficients[num_steps] == pytest.approx(upper, rel=1e-6)
    assert coefficients[-1] <= 0.2


@pytest.mark.cases(quick=1)
@HOLDING
def test_a_late_policy_is_held_at_the_target_too(name):
    """The policy of `simulate`, after 2,000 updates without a change."""
    controller = PLANT[name]
    for _ in range(2):
        controller = jax.lax.fori_loop(
            0,
            1000,
            lambda _, c: c.update(kl=jnp.float32(0.5), num_episodes=64),
            controller,
        )
    assert float(controller.kl_coef) < 0.011
    last = simulate(controller, lag=0.5)[-150:]
    assert float(last.mean()) == pytest.approx(6.0, rel=0.05)


@HOLDING
def test_bounds_that_are_asked_for(name):
    """By hand: β reaches each bound and does not exceed it."""
    make = functools.partial(made, name, **REST[name])
    bounded = make(0.15, min_kl_coef=0.12, max_kl_coef=0.19)
    assert run(bounded, [0.0] * 300)[-1] == pytest.approx(0.12, rel=1e-6)
    assert run(bounded, [50.0] * 300)[-1] == pytest.approx(0.19, rel=1e-6)
    both = make(0.15, min_kl_coef=0.15, max_kl_coef=0.15)
    assert run(both, [0.0, 50.0]) == pytest.approx([0.15] * 3, rel=1e-7)


@HOLDING
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            {"min_kl_coef": 0.2},
            r"kl_coef: expected a number of at least 0.2 .* got 0.1",
        ),
        ({"max_kl_coef": 0.05}, r"kl_coef: .* of at most 0.05, got 0.1; start"),
        ({"min_kl_coef": -0.1}, r"min_kl_coef: expected .* got -0.1; choose"),
        ({"min_kl_coef": np.nan}, r"min_kl_coef: expected .* got nan; choose"),
        ({"max_kl_coef": 0.0}, r"max_kl_coef: expected .* above 0, got 0.0; choose"),
        ({"max_kl_coef": np.inf}, r"max_kl_coef: expected .* got inf; choose"),
    ],
)
def test_bounds_that_cannot_be(name, bounds, message):
    with pytest.raises(checks.InputError, match=message):
        made(name, 0.1, **REST[name], **bounds)


def test_bounds_of_a_coefficient_that_starts_at_0():
    with pytest.raises(checks.InputError, match=r"max_kl_coef: .* kl_coef 0, .*give"):
        lagrangian(0.0, learning_rate=0.1)
    for make in (functools.partial(adaptive, **OAI), functools.partial(pi, **GAINS)):
        with pytest.raises(checks.InputError, match=r"min_kl_coef: .* above 0, got 0"):
            make(0.1, min_kl_coef=0.0)


@HOLDING
@pytest.mark.parametrize("kl", [np.nan, np.inf, -np.inf, None])
def test_a_batch_without_a_kl_changes_nothing(name, kl):
    """The KL is not finite, or the iteration computed none."""
    for controller in (PER_RESPONSE[name], PER_TOKEN[name]):
        arguments = {"num_episodes": 512, "mean_length": jnp.float32(LENGTH)}
        before = controller.update(kl=jnp.float32(7.0), **arguments)
        kl = None if kl is None else jnp.float32(kl)
        after = before.update(kl=kl, **arguments)
        chex.assert_trees_all_equal(after, before)


@HOLDING
def test_responses_without_a_token_change_nothing(name):
    coefficients = run(PER_TOKEN[name], [0.0], length=0.0)
    assert coefficients[1] == coefficients[0]


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_fixed_stays(kl_coef: float):
    coefficients = run(kl_control.fixed(kl_coef), [0.0, 100.0])
    assert coefficients == pytest.approx([kl_coef] * 3)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    "schedule",
    [
        optax.linear_schedule(0.2, 0.0, transition_steps=4),
        optax.cosine_decay_schedule(0.2, decay_steps=5, alpha=0.1),
        optax.piecewise_constant_schedule(0.1, {2: 0.5}),
        optax.warmup_exponential_decay_schedule(0.0, 0.1, 2, 3, 0.5),
        lambda step: 0.03,
    ],
    ids=["linear", "cosine", "piecewise", "warmup", "number"],
)
def test_scheduled_follows_the_iteration(schedule):
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        coefficients = run(kl_control.scheduled(schedule, num_steps=6), [9.0] * 8)
        expected = [float(schedule(jnp.int32(step))) for step in range(6)]
    # After its last step it stays, since nothing beyond was looked at.
    np.testing.assert_allclose(coefficients, expected + expected[-1:] * 3, rtol=1e-6)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            optax.linear_schedule(0.1, -0.1, 10),
            r"schedule\(6\): .* got -0.02.*; choose",
        ),
        (
            lambda step: jnp.log(3.5 - step.astype(jnp.float32)),
            r"schedule\(3\): .* -0.",
        ),
        (
            lambda step: jnp.where(step == 8, jnp.nan, 1.0),
            r"schedule\(8\): .* got nan;",
        ),
        (lambda step: jnp.float32(np.inf), r"schedule\(0\): expected .*, got inf;"),
        (lambda step: jnp.zeros(2), r"schedule\(0\): expected shape \(\), got \(2,\)"),
    ],
)
def test_every_step_of_a_schedule_is_read_at_the_start(schedule, message):
    with pytest.raises(ValueError, match=message):
        kl_control.scheduled(schedule, num_steps=9)


def test_only_the_steps_of_the_run_are_read():
    schedule = optax.linear_schedule(0.1, -0.1, 10)
    assert run(kl_control.scheduled(schedule, num_steps=6), [1.0] * 9)[-1] >= 0
    with pytest.raises(checks.InputError, match=r"num_steps: expected .* got 0"):
        kl_control.scheduled(schedule, num_steps=0)


EVERY = {
    **PER_RESPONSE,
    "fixed": kl_control.fixed(0.15),
    "linear": kl_control.Linear(end=0.05).controller(0.15, num_steps=3),
}
LEAVES = {"adaptive": 3, "pi": 4, "lagrangian": 3, "fixed": 1, "linear": 2}


@pytest.mark.parametrize("name", EVERY)
def test_records_are_donated_scanned_and_put_together_again(name):
    """As parts of snapshots their arrays are leaves and their settings are not."""
    controller = EVERY[name]
    leaves, structure = jax.tree.flatten(controller)
    assert len(leaves) == LEAVES[name]
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == structure

    def step(controller, kl):
        return controller.update(kl=kl, num_episodes=64), controller.kl_coef

    kls = jnp.array([1.0, 8.0, 6.5])
    expected = run(controller, kls, 64)
    _, coefficients = jax.lax.scan(step, again, kls)
    np.testing.assert_allclose(coefficients, expected[:-1], rtol=1e-6)

    donated = jax.jit(step, donate_argnums=0)
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), controller)
    for kl, kl_coef in zip(kls, expected[1:], strict=True):
        state, _ = donated(state, kl)
        assert float(state.kl_coef) == pytest.approx(kl_coef, rel=1e-6)


def test_what_is_made_may_be_donated():
    """A controller shares no buffer with the caller, and none within itself."""
    mine = jnp.float32(0.1)
    makers = {
        "fixed": lambda: kl_control.fixed(mine),
        "adaptive": lambda: adaptive(mine, **OAI),
        "pi": lambda: pi(mine, **GAINS),
        "lagrangian": lambda: lagrangian(mine, learning_rate=1e-3),
        "scheduled": lambda: kl_control.scheduled(lambda step: mine, num_steps=2),
    }
    for make in makers.values():
        update = jax.jit(lambda c: c.update(kl=mine, num_episodes=1), donate_argnums=0)
        update(update(make()))
        assert float(mine) == pytest.approx(0.1)


@pytest.mark.slow
def test_controllers_are_mapped_over_their_coefficient():
    """As in a sweep over β."""
    coefficients = jnp.array([0.02, 0.1, 0.5])
    for make in (
        functools.partial(adaptive, **OAI),
        functools.partial(pi, **GAINS),
        functools.partial(lagrangian, learning_rate=1e-3),
    ):
        step = functools.partial(_after, make=make)
        stepped = jax.vmap(step)(coefficients)
        expected = [run(make(float(c)), [7.0])[1] for c in coefficients]
        np.testing.assert_allclose(stepped, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_grid_of_every_number_of_a_controller():
    """Targets, horizons, gains and bounds can be mapped over, as well as β."""

    def after(kl_coef, number):
        options = {"target": number, "unit": "response"}
        controls = (
            kl_control.Adaptive(horizon=100 * number, **options),
            kl_control.PI(proportional=number, max_error=number, **options),
            kl_control.Lagrangian(learning_rate=number, **options),
            kl_control.Linear(end=number),
        )
        made = [control.controller(kl_coef, num_steps=3) for control in controls]
        return [c.update(kl=jnp.float32(7.0), num_episodes=8).kl_coef for c in made]

    grid = jax.jit(jax.vmap(after))(jnp.array([0.1, 0.2]), jnp.array([6.0, 5.0]))
    alone = after(0.2, 5.0)
    for output, expected in zip(grid, alone, strict=True):
        assert float(output[1]) == pytest.approx(float(expected), rel=1e-5)


def _after(kl_coef, *, make):
    return make(kl_coef).update(kl=jnp.float32(7.0), num_episodes=512).kl_coef


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_bad_coefficients(bad: float):
    for make in (kl_control.fixed, functools.partial(lagrangian, learning_rate=0.1)):
        with pytest.raises(
            ValueError, match=r"kl_coef: expected .* 0 or more, got .*;"
        ):
            make(bad)
    for make in (functools.partial(adaptive, **OAI), functools.partial(pi, **GAINS)):
        with pytest.raises(ValueError, match=r"kl_coef: expected .* above 0, got .*;"):
            make(bad)
    with pytest.raises(ValueError, match=r"schedule\(0\): expected .*, got .*; choose"):
        kl_control.scheduled(lambda step: jnp.float32(bad), num_steps=1)


def test_a_coefficient_of_0_can_be_added_to_but_not_multiplied():
    from_zero = lagrangian(0.0, learning_rate=0.1, max_kl_coef=1.0)
    assert run(from_zero, [7.0])[1] == pytest.approx(0.1)
    for make in (functools.partial(adaptive, **OAI), functools.partial(pi, **GAINS)):
        with pytest.raises(ValueError, match=r"kl_coef: expected .* above 0, got 0"):
            make(0.0)


REST = {"adaptive": OAI, "pi": GAINS, "lagrangian": {"learning_rate": 1e-3}}


@HOLDING
@pytest.mark.parametrize("unit", [None, "sequence"])
def test_a_target_without_a_unit(name, unit):
    message = (
        r"target: expected a unit with the target of 6 nats, got unit=.*; say unit"
    )
    with pytest.raises(checks.InputError, match=message):
        made(name, 0.1, unit=unit)
    with pytest.raises(TypeError, match="unit"):
        MAKE[name](target=6.0)


@HOLDING
def test_a_target_per_token_asks_for_the_length(name):
    with pytest.raises(checks.InputError, match=r"mean_length: .*per token, got none;"):
        PER_TOKEN[name].update(kl=jnp.float32(1.0), num_episodes=4)
    with pytest.raises(ValueError, match=r"mean_length: expected shape \(\), got \(3,"):
        PER_TOKEN[name].update(
            kl=jnp.float32(1.0), num_episodes=4, mean_length=jnp.ones(3)
        )
    with pytest.raises(ValueError, match=r"kl: expected shape \(\), got \(3,\); pass"):
        PER_RESPONSE[name].update(kl=jnp.ones(3), num_episodes=4)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("adaptive", {"target": -6.0}), ("adaptive", {"horizon": 0})),
        *(("pi", {"target": 0.0}), ("pi", {"integral": 0.0})),
        *(("pi", {"max_error": float("nan")}), ("lagrangian", {"target": np.nan})),
        *(("lagrangian", {"learning_rate": 0.0}), ("lagrangian", {"target": np.inf})),
    ],
)
def test_bad_settings(name, setting):
    field = next(iter(setting))
    message = rf"{field}: expected .* above 0, got .*; choose {field} > 0"
    with pytest.raises(checks.InputError, match=message):
        made(name, 0.1, **{**REST[name], **setting})


def test_gains_that_would_push_the_wrong_way():
    with pytest.raises(checks.InputError, match=r"proportional: .* 0 or more, got -1"):
        pi(0.1, proportional=-1.0, integral=0.1)


def test_an_adaptive_step_that_could_turn_the_sign():
    controller = adaptive(0.1, horizon=100)
    with pytest.raises(ValueError, match=r"num_episodes: expected .* below 500.*raise"):
        controller.update(kl=jnp.float32(1.0), num_episodes=512)


OPTIONS = {
    "adaptive": {"horizon": 900},
    "pi": {"proportional": 0.1, "integral": 0.2, "max_error": 0.3},
    "lagrangian": {"learning_rate": 0.5},
}
BOUNDS = {"min_kl_coef": 0.1, "max_kl_coef": 0.7}


@HOLDING
def test_every_option_of_a_choice_is_in_its_controller(name):
    options = {"target": 5.0, "unit": "token", **BOUNDS, **OPTIONS[name]}
    fields = {field.name for field in dataclasses.fields(MAKE[name])}
    assert fields == set(options)
    controller = made(name, 0.2, **options)
    for option, value in (options | {"kl_coef": 0.2}).items():
        field = getattr(controller, option)
        assert field == (jnp.float32(value) if "coef" in option else value)


def test_defaults():
    """The defaults that README and help show."""
    assert adaptive(0.2).horizon == 10_000
    controller = pi(0.2)
    gains = (controller.proportional, controller.integral, controller.max_error)
    assert gains == (0.3, 0.05, 1.0)
    controller = lagrangian(0.2)
    assert controller.learning_rate == 1e-3
    assert (controller.min_kl_coef, controller.max_kl_coef) == (0.0, 2.0)
    fixed = kl_control.Fixed().controller(0.2, num_steps=3)
    assert fixed == kl_control.fixed(0.2)


def test_a_target_per_response_is_told_and_no_other():
    assert kl_control.CONSTANT.target_per_response is None
    assert kl_control.Linear(end=0.1).target_per_response is None
    by_response = kl_control.PI(target=6.0, unit="response")
    assert by_response.target_per_response == 6.0
    assert kl_control.PI(target=0.1, unit="token").target_per_response is None


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_line_goes_from_the_coefficient_to_its_end(num_steps):
    line = kl_control.Linear(end=0.1)
    controller = line.controller(0.3, num_steps=num_steps)
    coefficients = run(controller, [1.0] * (num_steps - 1))
    expected = np.linspace(0.3, 0.1, num_steps)
    assert coefficients == pytest.approx(list(expected), rel=1e-5)
    assert controller.num_steps == num_steps
    # Made again, as by a run that resumes, it is the same program.
    again = kl_control.Linear(end=0.1).controller(0.3, num_steps=num_steps)
    assert jax.tree.structure(again) == jax.tree.structure(controller)


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_a_line_from_or_to_a_bad_coefficient(bad):
    with pytest.raises(checks.InputError, match=rf"kl_coef: expected .*, got {bad}; "):
        kl_control.Linear(end=0.1).controller(bad, num_steps=3)
    with pytest.raises(checks.InputError, match=rf"end: .* 0 or more, got {bad}; "):
        kl_control.Linear(end=bad).controller(0.1, num_steps=3)


def test_a_schedule_is_built_where_only_shapes_are_asked_for():
    """As in a trainer's memory check before a run with --kl-control linear."""
    made = kl_control.Linear(end=0.4).controller
    shapes = jax.eval_shape(lambda: made(0.1, num_steps=6))
    assert shapes.kl_coef.shape == shapes.step.shape == ()

    def wrong(step):
        return 0.5 - step.astype(jnp.float32)

    with pytest.raises(checks.InputError, match=r"schedule\(1\): expected a finite"):
        jax.eval_shape(lambda: kl_control.scheduled(wrong, num_steps=3))
