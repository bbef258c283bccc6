"""Options of the quickstart, its prompts and the widths of its batches."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from pipeline.optimizers import adam
from worlds import reviews

from rlhf_jax import (
    config,
    kl_control,
    ppo,
)
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.control import Control
from rlhf_jax.models import layout
from rlhf_jax.runs import (
    run_config,
)

STOP_IDS = (reviews.EOS_ID,)
PROMPT_COLUMNS = max(map(len, reviews.TRAIN_PROMPTS))
RESPONSE_COLUMNS = 26  # the longest review, <eos> and one column to spare
TRAIN_PROMPTS = [reviews.encode(prompt) for prompt in reviews.TRAIN_PROMPTS]
HELD_OUT_PROMPTS = [reviews.encode(prompt) for prompt in reviews.HELD_OUT_PROMPTS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 40
    """PPO iterations."""
    kl_coef: float = 0.2
    """KL coefficient β, reward units per nat of KL to the reference."""
    kl_control: Control = kl_control.CONSTANT
    """How β changes during the run."""
    temperature: float = 0.7
    """Sampling temperature; it divides the logits in every role."""
    sft_steps: int = 400
    """Updates of supervised fine-tuning."""
    reward_steps: int = 120
    """Updates of reward-model training."""
    sft_batch_size: int = 64
    """Reviews per update of SFT, and pairs per update of the reward model."""
    num_pairs: int = 4096
    """Labelled pairs of responses; an eighth of them is held out."""
    label_noise: float = 0.4
    """Temperature of the gold judge's Bradley-Terry choice, gold units."""
    hidden_size: int = 128
    """Width of all four models."""
    num_layers: int = 2
    """Depth of all four models."""
    num_heads: int = 4
    """Attention heads of all four models."""
    batch_size: int = 128
    """Prompts per iteration."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Optimizer steps per pass."""
    sft_learning_rate: float = 3e-3
    """Peak learning rate of SFT, after a warm-up; falls to 0 along a cosine."""
    reward_learning_rate: float = 1e-3
    """Learning rate of the reward model; falls to 0 linearly."""
    policy_learning_rate: float = 3e-4
    """Learning rate of the policy; falls to 0 linearly."""
    critic_learning_rate: float = 1e-3
    """Learning rate of the critic; falls to 0 linearly."""
    missing_stop_score: float = -3.0
    """Score of a response without <eos>, in the reward model's standard deviations."""
    num_evaluated: int = 512
    """Responses to held-out prompts in the final table."""
    sample_every: int = 10
    """Iterations between samples in samples.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # An invalid controller raises here, not after two stages of training.
        control = self.kl_control.controller(self.kl_coef, num_steps=self.num_steps)
        one = jnp.ones((), jnp.float32)
        control.update(kl=one, mean_length=one, num_episodes=self.batch_size)
        checks.positive(
            label_noise=self.label_noise,
            sft_batch_size=self.sft_batch_size,
            sample_every=self.sample_every,
            sft_learning_rate=self.sft_learning_rate,
            reward_learning_rate=self.reward_learning_rate,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
        )
        if self.num_pairs < 16 or self.num_evaluated < 2 or self.num_evaluated % 2:
            raise checks.InputError(
                "expected --num-pairs of at least 16 and an even --num-evaluated, got "
                f"{self.num_pairs} and {self.num_evaluated}"
            )


def algorithm_of(options: Config) -> ppo.PPO:
    """Returns PPO with four models of one shape.

    Raises:
      InputError: the minibatches do not divide the batch.
    """
    model = layout.fastest(
        config.gpt2(
            vocab_size=len(reviews.VOCABULARY),
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            max_positions=PROMPT_COLUMNS + RESPONSE_COLUMNS,
        )
    )
    updates = options.num_steps * options.num_epochs * options.num_minibatches
    algorithm = ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=adam(options.policy_learning_rate, updates),
        critic_optimizer=adam(options.critic_learning_rate, updates),
        max_new_tokens=RESPONSE_COLUMNS,
        stop_ids=STOP_IDS,
        temperature=options.temperature,
        scores=ScoreShaping(missing_stop_score=options.missing_stop_score),
        num_epochs=options.num_epochs,
        num_minibatches=options.num_minibatches,
    )
    algorithm.minibatch_size(options.batch_size)
    return algorithm
