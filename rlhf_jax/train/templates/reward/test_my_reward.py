"""Responses that are worth something, and some that are not."""

import pytest
from my_reward import verify

from rlhf_jax.extensions import entry_points


@pytest.mark.parametrize(
    ("response", "score"),
    [("it is 12", 1.0), ("12", 1.0), ("it is 13", 0.0), ("", 0.0), ("12" * 101, 0.0)],
)
def test_the_answer_is_worth_1(response, score):
    assert verify("7 + 5?", response, {"answer": "12"}) == score


def test_it_is_found_by_its_name():
    assert entry_points.load("my_reward", group="verifiers") is verify
