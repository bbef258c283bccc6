"""The run warns if its reward model will read truncated responses."""

import types

import jax.numpy as jnp
import pytest

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.train import trainer

STOP = 9
TOKENS = [[1, 5, STOP, 0], [1, 5, 6, 7], [1, 5, 6, 0], [1, 5, 6, 7], [1, 2, 5, STOP]]
RESPONSES = [[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


def told(
    capsys,
    *,
    rows,
    models=("reward",),
    environment=None,
    fixed_length=None,
    reads_stops=False,
):
    mask = jnp.asarray(RESPONSES, bool)[jnp.asarray(rows)]
    unread = jnp.zeros(mask.shape)
    scores = types.SimpleNamespace(reads_stops=reads_stops)
    config = types.SimpleNamespace(
        rewards=types.SimpleNamespace(model_names=models),
        sampler=types.SimpleNamespace(environment=environment),
        method=types.SimpleNamespace(fixed_length=fixed_length, scores=scores),
        batch=types.SimpleNamespace(max_new_tokens=3),
    )
    rollout = Rollout(
        tokens=jnp.asarray(TOKENS)[jnp.asarray(rows)],
        mask=mask,
        response_mask=mask,
        old_logprobs=unread,
        entropy=unread,
        index=jnp.asarray(rows),
        sample=jnp.zeros(len(rows), int),
    )
    trainer.tell_cut(config, rollout, stop_ids=(STOP,))
    return capsys.readouterr().out


def test_most_responses_without_a_stop_token_are_told_before_the_run(capsys):
    line = told(capsys, rows=[0, 1, 2, 3, 4])
    assert "3 of 5 responses are cut at --max-new-tokens 3" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "case",
    [
        {"rows": [0, 1, 4, 2]},  # half of them
        {"rows": [1, 2, 3], "models": ()},  # a verifier reads what is there
        {"rows": [1, 2, 3], "environment": object()},
        {"rows": [1, 2, 3], "fixed_length": object()},  # as the user asked
        {"rows": [1, 2, 3], "reads_stops": True},
    ],
)
def test_it_is_silent_where_responses_end_or_no_reward_model_reads_them(capsys, case):
    assert told(capsys, **case) == ""
