"""The advantages by hand, and the options of the command."""

import jax.numpy as jnp
import my_method
import numpy as np
import optax
import pytest

from rlhf_jax import config
from rlhf_jax.algorithms.batch import Rollout, Scored

MASK = jnp.array([[False, False, True, True], [False, False, True, False]])


def scored_by_hand():
    """Two responses to prompts of two tokens, without a KL."""
    zeros = jnp.zeros(MASK.shape)
    rollout = Rollout(
        tokens=jnp.ones(MASK.shape, jnp.int32),
        mask=jnp.ones(MASK.shape, bool),
        response_mask=MASK,
        old_logprobs=zeros,
        entropy=zeros,
        index=jnp.arange(2, dtype=jnp.int32),
        sample=jnp.zeros(2, jnp.int32),
    )
    scores = jnp.array([3.0, -1.0])
    return Scored(rollout, scores=scores, values=None, ref_logprobs=None, kl=None)


def test_advantages_are_the_signs_of_whitened_rewards_to_go():
    model = config.gpt2(
        vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, max_positions=8
    )
    method = my_method.Method(
        model=model, policy_optimizer=optax.sgd(0.1), max_new_tokens=2, stop_ids=(0,)
    )
    experience, stats = method.experience(scored_by_hand(), kl_coef=jnp.zeros(()))
    # Rewards to go are 3, 3 and -1, and their mean is 5/3.
    expected = [[0, 0, 1, 1], [0, 0, -1, 0]]
    np.testing.assert_array_equal(experience.advantages, expected)
    assert stats == {}


def test_the_command_has_the_options_of_a_method(capsys):
    with pytest.raises(SystemExit) as exit_:
        my_method.command(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: rlhf-jax my_method --model" in shown
    assert "--kl-coef" in shown
