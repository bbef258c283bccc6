"""Options of the quickstart, and the prompts and columns of its language."""

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
RESPONSE_COLUMNS = 26  # the longest review, <eos> and one more
TRAIN_PROMPTS = [reviews.encode(prompt) for prompt in reviews.TRAIN_PROMPTS]
HELD_OUT_PROMPTS = [reviews.encode(prompt) for prompt in reviews.HELD_OUT_PROMPTS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 40
    """PPO iterations."""
    kl_coef: float = 0.2
    """Reward units per nat of KL to the reference; 0 lets the policy go."""
    kl_control: Control = kl_control.CONSTANT
    """What becomes of kl_coef during the run."""
    temperature: float = 0.7
    """Divides the logits in every role."""
    sft_steps: int = 400
    """Updates of supervised fine-tuning."""
    reward_steps: int = 120
    """Updates of reward-model training."""
    sft_batch_size: int = 64
    """Reviews an update of SFT, and pairs an update of the reward model."""
    num_pairs: int = 4096
    """Labelled pairs; an eighth of them is held out."""
    label_noise: float = 0.4
    """Of the gold judge, in gold units: the temperature of its Bradley-Terry choice."""
    hidden_size: int = 128
    """Width of all four models."""
    num_layers: int = 2
    """Depth of all four models."""
    num_heads: int = 4
    """Attention heads of all four models."""
    batch_size: int = 128
    """Prompts an iteration."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Optimizer steps a pass."""
    sft_learning_rate: float = 3e-3
    """Peak, after a warm-up; falls to 0 along a cosine."""
    reward_learning_rate: float = 1e-3
    """Falls to 0 linearly."""
    policy_learning_rate: float = 3e-4
    """Falls to 0 linearly."""
    critic_learning_rate: float = 1e-3
    """Falls to 0 linearly."""
    missing_stop_score: float = -3.0
    """Score of a response that never ended, in the reward model's standard units."""
    num_evaluated: int = 512
    """Responses to held-out prompts in the final table."""
    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # They raise now what would be found after two stages of training.
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
    """PPO with four models of one shape; finds sizes that do not fit."""
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
