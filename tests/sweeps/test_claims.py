"""Claims: their comparisons, and when seeds confirm them."""

import numpy as np
import pytest
from scipy import stats

from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import claims, declaration

SWEEP = declaration.declared(
    {
        "trainer": "ppo",
        "grid": {"kl_coef": [0.0, 0.2], "penalty.value_estimator": ["k1", "k3"]},
    },
    source="file",
)
# Seeds differ by far more than cells: only their pairs tell.
OF_CELLS = {
    "kl_coef=0,value_estimator=k1": {0: 10.0, 1: 20.0, 2: 30.0},
    "kl_coef=0,value_estimator=k3": {0: 10.5, 1: 19.5, 2: 30.3},
    "kl_coef=0.2,value_estimator=k1": {0: 11.0, 1: 21.1, 2: 31.05},
    "kl_coef=0.2,value_estimator=k3": {0: 11.4, 1: 21.5, 3: 7.0},
}
LOOKUP = claims.lookup_in(
    SWEEP.cells, {"gold": {cell: OF_CELLS[cell.name] for cell in SWEEP.cells}}
)


@pytest.mark.parametrize(
    ("claim", "answer", "seeds", "difference"),
    [
        # 1, 1.1 and 1.05 by pairs.
        (
            "gold(kl_coef=0.2, value_estimator='k1') > "
            "gold(kl_coef=0, value_estimator='k1')",
            *("yes", 3, 1.05),
        ),
        (
            "gold(kl_coef=0.2, value_estimator='k1') < "
            "gold(kl_coef=0.0, value_estimator='k1')",
            *("no", 3, -1.05),
        ),
        # 0.5, -0.5 and 0.3.
        (
            "gold(kl_coef=0, value_estimator='k3') > "
            "gold(kl_coef=0, value_estimator='k1')",
            *("not enough seeds", 3, 0.1),
        ),
        # Means of two cells: 11.2 - 10.25 and 21.3 - 19.75, of the seeds that all have.
        ("gold(kl_coef=0.2) > gold(kl_coef=0)", "not enough seeds", 2, 1.25),
        (
            "2 * gold(kl_coef=0, value_estimator='k1') - 5 > "
            "gold(kl_coef=0, value_estimator='k1')",
            *("not enough seeds", 3, 15.0),
        ),
        ("-gold(kl_coef=0, value_estimator='k1') < 0", "not enough seeds", 3, 20.0),
        ("gold(kl_coef=0, value_estimator='k1') + 1000 > 3", "yes", 3, 1017.0),
    ],
)
def test_answers(claim, answer, seeds, difference):
    answered = claims.answer(claim, lookup=LOOKUP)
    assert (answered.answer, answered.seeds) == (answer, seeds)
    assert answered.difference == pytest.approx(difference)
    assert answered.interval.low <= difference <= answered.interval.high


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("gold(kl_coef=0", "was never closed"),
        ("gold(kl_coef=0)", "no comparison of two sides"),
        ("gold(kl_coef=0) == 3", "no comparison of two sides by > or <"),
        ("1 < gold(kl_coef=0) < 3", "no comparison of two sides"),
        ("1 < 3", "numbers alone"),
        ("gold(kl_coef=0) / 2 > 1", "gold(kl_coef=0) / 2"),
        ("gold(kl_coef=open('x')) > 1", "open('x')"),
        ("gold(**{'kl_coef': 0}) > 1", "{'kl_coef': 0}"),
        ("gold.x > 1", "gold.x"),
        ("silver(kl_coef=0) > 1", "one of the measures gold, got silver"),
        ("gold(kl_coef=0.3) > 1", "that a cell of the grid has, got kl_coef=0.3"),
        ("gold(lr=1) > 1", "options of the grid, kl_coef, value_estimator, penalty"),
        ("gold(lr=None) > 1", "value_estimator, penalty_value_estimator, got lr"),
        ("gold(kl_coef=False) > 1", "that a cell of the grid has, got kl_coef=False"),
        ("gold(kl_coef={1, [2]}) > 1", "{1, [2]}"),
        ("gold(kl_coef=0) > True", "True"),
        ("gold(kl_coef=0) > 1e999", "got one with inf, which is not a finite number"),
    ],
)
def test_what_is_no_claim(claim, message):
    with pytest.raises(InputError) as error:
        claims.answer(claim, lookup=LOOKUP)
    assert message in str(error.value)
    assert str(error.value).startswith("claim ")


def test_settings_by_whole_names_and_lists():
    grid = {"policy.rank": [1], "critic.rank": [3], "clip": [[0.1, 0.2]]}
    sweep = declaration.declared({"trainer": "ppo", "grid": grid}, source="file")
    lookup = claims.lookup_in(sweep.cells, {"gold": {sweep.cells[0]: {0: 1.0}}})
    assert lookup("gold", {"policy_rank": 1, "critic_rank": 3}) == {0: 1.0}
    answered = claims.answer("gold(clip=[0.1, 0.2]) > 0", lookup=lookup)
    assert (answered.seeds, answered.difference) == (1, 1.0)


@pytest.mark.parametrize(
    ("differences", "answer"),
    [
        ((0.0, 0.0, 0.0), "no"),
        ((1.0, 1.0, 1.0), "yes"),
        ((-1.0, -1.0, -1.0), "no"),
        ((1.0, 1.0), "not enough seeds"),  # by chance
        ((1.0,), "not enough seeds"),
        ((), "not enough seeds"),
    ],
)
def test_differences_that_are_equal(differences, answer):
    cell = SWEEP.cells[0]
    numbers = dict(enumerate(differences))
    lookup = claims.lookup_in((cell,), {"gold": {cell: numbers}})
    assert claims.answer("gold(kl_coef=0) > 0", lookup=lookup).answer == answer


def asked(values):
    """The answer to a claim with these differences by seed."""
    numbers = dict(enumerate(values))
    return claims.answer("a() > 0", lookup=lambda name, settings: numbers)


@pytest.mark.parametrize(
    "values", [[1.0, -0.5], [3.0, 1.0, -1.5], [0.3, -1.2, 0.1, 0.4], [-5.0, 1.0, 1.0]]
)
def test_an_open_claim_is_answered_by_the_seeds_it_needs(values):
    """Checked by a search over n: n - 1 seeds do not suffice."""
    answered = asked(values)
    assert answered.answer == "not enough seeds"
    mean, deviation = abs(np.mean(values)), np.std(values, ddof=1)
    least = next(
        n
        for n in range(2, 10**5)
        if stats.t.ppf(0.975, n - 1) * deviation / np.sqrt(n) < mean
    )
    assert claims.seeds_needed(answered) == least > len(values)
    # Seeds with that mean and deviation: t's interval leaves 0 out, and with one less
    # it does not.
    for count, verdict in ((least, {"yes", "no"}), (least - 1, {"not enough seeds"})):
        drawn = np.random.default_rng(0).normal(size=count)
        drawn = (drawn - drawn.mean()) / drawn.std(ddof=1)
        assert asked(np.mean(values) + deviation * drawn).answer in verdict


def test_seeds_that_nobody_knows():
    assert claims.seeds_needed(asked([])) is None
    assert claims.seeds_needed(asked([1.0])) is None  # one seed has no spread
    assert claims.seeds_needed(asked([1.0, -1.0])) is None  # no number would do
    assert claims.seeds_needed(asked([1e-5 + 1.0, 1e-5 - 1.0])) is None  # over MOST
    assert claims.seeds_needed(asked([2.0, 2.0])) == claims.FEW
