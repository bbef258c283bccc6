"""Claims: what they compare, and when seeds bear them out."""

import pytest

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
    told = claims.answer(claim, lookup=LOOKUP)
    assert (told.answer, told.seeds) == (answer, seeds)
    assert told.difference == pytest.approx(difference)
    assert told.interval.low <= difference <= told.interval.high


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("gold(kl_coef=0", "was never closed"),
        ("gold(kl_coef=0)", "no comparison of two sides"),
        ("gold(kl_coef=0) == 3", "a comparison other than > and <"),
        ("1 < gold(kl_coef=0) < 3", "no comparison of two sides"),
        ("1 < 3", "numbers alone"),
        ("gold(kl_coef=0) / 2 > 1", "gold(kl_coef=0) / 2"),
        ("gold(kl_coef=open('x')) > 1", "open('x')"),
        ("gold(**{'kl_coef': 0}) > 1", "{'kl_coef': 0}"),
        ("gold.x > 1", "gold.x"),
        ("silver(kl_coef=0) > 1", "one of the measures gold, got silver"),
        ("gold(kl_coef=0.3) > 1", "that a cell of the grid has, got kl_coef=0.3"),
        ("gold(lr=1) > 1", "that a cell of the grid has, got lr=1"),
    ],
)
def test_what_is_no_claim(claim, message):
    with pytest.raises(InputError) as error:
        claims.answer(claim, lookup=LOOKUP)
    assert message in str(error.value)
    assert str(error.value).startswith("claim ")
