"""Messages about large numbers stay short."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

HUGE = 10**5000  # more digits than Python turns into text, and 16610 bits


@pytest.mark.parametrize(
    ("check", "number", "message"),
    [
        (checks.positive, -HUGE, "above 0, got a negative one of 16610 bits; choose"),
        (checks.positive, HUGE, "at most 2147483647, got one of 16610 bits; choose"),
        (checks.positive, -2, "above 0, got -2; choose x > 0"),
        (checks.non_negative, -HUGE, "or more, got a negative one of 16610 bits; cho"),
        (checks.non_negative, HUGE, "at most 2147483647, got one of 16610 bits; choo"),
        (checks.non_negative, -0.5, "or more, got -0.5; choose x >= 0"),
        (checks.finite, -HUGE, "2147483647, got a negative one of 16610 bits; choose"),
        (checks.fraction, HUGE, "from 0 to 1, got one of 16610 bits; choose 0 <= x"),
        (checks.fraction, -HUGE, "from 0 to 1, got a negative one of 16610 bits"),
        (checks.fraction, 1.5, "from 0 to 1, got 1.5; choose 0 <= x <= 1"),
        (checks.fraction, 2**31, "from 0 to 1, got 2147483648"),
        (checks.fraction, 2**31 - 1, "from 0 to 1, got 2147483647"),
    ],
    ids=itertools.count(),  # not the numbers themselves
)
def test_a_huge_integer_is_told_by_its_size(check, number, message):
    with pytest.raises(InputError) as caught:
        check(x=number)
    assert str(caught.value).startswith("x: expected a")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-HUGE, "expected at least 2, got a negative one of 16610 bits; sample more"),
        (HUGE, "to divide the 8 rows of a batch, got one of 16610 bits; change either"),
        (3, "to divide the 8 rows of a batch, got 3; change either"),
    ],
    ids=itertools.count(),  # not the numbers themselves
)
def test_a_huge_group_size_is_told_by_its_size(size, message):
    with pytest.raises(InputError) as caught:
        checks.groups(8, group_size=size, least=2)
    assert message in str(caught.value)


def test_twenty_problems_are_listed_and_the_others_counted():
    problems = [f"line {number}" for number in range(23)]
    lines = [f"  line {number}" for number in range(20)]
    assert checks.listed(problems).split("\n") == [*lines, "  and 3 more"]
    assert checks.listed(problems[:20]).split("\n") == lines


def test_numbers_at_the_edge_pass():
    checks.positive(x=2**31 - 1, y=jnp.float32(-1))  # arrays are not read
    checks.non_negative(x=0)
    checks.fraction(x=0, y=1)
    checks.groups(8, group_size=8, least=2)
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    checks.positive(x=float(largest), y=float(smallest))
    with pytest.raises(checks.InputError, match="a number that float32 holds"):
        checks.positive(x=2.0 * float(largest))
    with pytest.raises(checks.InputError, match="a number that float32 holds"):
        checks.positive(x=0.5 * float(smallest))
    for number in (-math.inf, math.inf, math.nan):
        with pytest.raises(checks.InputError, match="x: expected a finite number, got"):
            checks.finite(x=number)


@pytest.mark.parametrize("kind", [int, np.int32, np.int64])
def test_a_count_may_be_of_python_or_numpy(kind):
    checks.at_least_one(max_logits=kind(3))
    for wrong in (kind(0), 1.0, np.float32(1), True, None, jnp.array(1)):
        with pytest.raises(InputError, match="max_logits: expected a whole number"):
            checks.at_least_one(max_logits=wrong)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_numbers_of_numpy_are_read_as_python_s(kind):
    with pytest.raises(InputError, match="dual_clip: expected a number above 1"):
        checks.within(above=1, advice="choose 3", dual_clip=kind(0.5))
    with pytest.raises(InputError, match="clip_range: expected a finite number"):
        checks.positive(clip_range=kind(-1))
    checks.within(above=1, advice="choose 3", dual_clip=kind(3))


@pytest.mark.parametrize("value", [np.array([-1.0]), jnp.array([0.1, 0.2])])
def test_several_numbers_are_no_number(value):
    with pytest.raises(InputError, match="x: expected one number, got an array of sh"):
        checks.positive(x=value)


def test_a_bound_beyond_32_bits_is_the_bound():
    checks.within(least=0, most=2**32 - 1, advice="choose another", seed=2**32 - 1)
    with pytest.raises(InputError, match="at most 4294967295, got 4294967296; choose"):
        checks.within(least=0, most=2**32 - 1, advice="choose another", seed=2**32)
