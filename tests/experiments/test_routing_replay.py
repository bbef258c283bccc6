"""The study of routing replay: its verdicts, and one world of it."""

import copy

import numpy as np
import pytest
from studies import routing_replay

from rlhf_jax.functional.checks import InputError

ROW = {
    "mismatch": 0.2,
    "clipped": 0.1,
    "ratio, of π": 1e-7,
    "ratio, of π^μ": 0.3,
}
FIGURES = {
    "replay": {
        "off": ROW,
        "R2": dict(ROW),
        "R3": ROW | {"mismatch": 0.1, "ratio, of π": 0.3, "ratio, of π^μ": 1e-7},
    },
    "R2 after an update, of π^old": 1e-7,
}


def test_every_verdict_can_fail():
    assert all(routing_replay.verdicts(FIGURES).values())
    for row, name, value in (
        ("off", "ratio, of π", 1e-3),
        ("R3", "ratio, of π^μ", 1e-3),
        ("R3", "ratio, of π", 1e-6),
        ("R2", "mismatch", 0.3),
        ("R3", "mismatch", 0.3),
    ):
        other = copy.deepcopy(FIGURES)
        other["replay"][row][name] = value
        assert not all(routing_replay.verdicts(other).values()), (row, name)
    later = FIGURES | {"R2 after an update, of π^old": 1e-3}
    assert not all(routing_replay.verdicts(later).values())


def test_a_router_without_near_ties_is_refused(tmp_path):
    with pytest.raises(InputError, match="near_tie"):
        routing_replay.Config(out=tmp_path, near_tie=0.0)


@pytest.mark.slow
def test_probabilities_of_all_responses_sum_to_1_whichever_experts_they_meet():
    params = routing_replay.draw(0, near_tie=0.01)
    model = routing_replay.MODEL
    own = routing_replay.chosen(params, model=model)
    for experts in (None, own, (own + 1) % 6):
        logprobs = routing_replay.logprobs(params, experts, model=model)
        total = routing_replay.probabilities(logprobs).sum()
        np.testing.assert_allclose(total, 1, rtol=1e-5)
