"""Trains a small decoder to add, from worked examples and from a verifier."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from worlds.arithmetic import (
    LETTERS,
    NEW_TOKENS,
    PAD_ID,
    PROMPT_TOKENS,
    STOP_ID,
    encode,
)

from rlhf_jax import config, critic, decoder, grpo, kl_control, ppo, sft, state
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.grpo.experience import Baseline
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example
from rlhf_jax.functional import checks, losses
from rlhf_jax.functional.kl.penalty import IN_LOSS, Penalty
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import run, run_config
from studies.policies import made_once, programs
from studies.policies.regularisers import NO_REGULARISER, Regulariser

Array = jax.Array
Params = Any
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sft(run_config.RunConfig):
    """The options on which a reference depends."""

    sft_steps: int = 80
    """Updates of supervised fine-tuning."""
    sft_batch_size: int = 128
    """Worked examples per update."""
    sft_learning_rate: float = 2e-3
    """Learning rate of AdamW in SFT; constant."""
    hidden_size: int = 96
    """Width of the model."""
    num_layers: int = 2
    """Depth of the model."""
    num_heads: int = 4
    """Attention heads of the model."""
    held_out: int = 200
    """Triples kept out of both stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            sft_steps=self.sft_steps, sft_learning_rate=self.sft_learning_rate
        )
        if not 1 <= self.held_out <= 900:
            raise checks.InputError(
                f"--held-out: expected 1 to 900 of the 1000 triples, got "
                f"{self.held_out}; leave some to train on"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Sft):
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Algorithm that trains the policy."""
    penalty: Penalty = IN_LOSS
    """Estimator and placement of the KL penalty."""
    regulariser: Regulariser = NO_REGULARISER
    """Regulariser in addition to the penalty, for GRPO."""
    aggregation: losses.Aggregation = "token_mean"
    """Mean of the token losses."""
    lam: float = 0.95
    """λ of PPO's GAE. Its advantages are not whitened."""
    num_steps: int = 1000
    """Number of iterations."""
    batch_size: int = 512
    """Responses per iteration."""
    group_size: int = 8
    """Responses per prompt of GRPO."""
    baseline: Baseline = "group"
    """Baseline of GRPO: the mean of the group, or of the other responses in it, with
    which β in the loss has the scale of β in the reward."""
    kl_coef: float = 0.05
    """KL coefficient β, reward units per nat."""
    learning_rate: float = 5e-4
    """Learning rate of the policy; falls linearly to 0."""
    critic_learning_rate: float = 1e-3
    """Learning rate of PPO's critic; falls linearly to 0."""
    num_epochs: int = 1
    """Passes over each batch."""
    num_minibatches: int = 2
    """Optimizer steps per pass."""
    temperature: float = 1.0
    """Sampling temperature; it divides the logits in every role."""
    sample_every: int = 100
    """Iterations between evaluations on held-out sums, rows of samples.jsonl."""
    prepared: Path | None = None
    """Folder of the reference of each seed, which is trained once for all runs with the
    same training options; None is OUT/prepared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            learning_rate=self.learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            sample_every=self.sample_every,
            num_steps=self.num_steps,
        )
        checks.non_negative(kl_coef=self.kl_coef)
        checks.fraction(lam=self.lam)
        if self.algorithm == "ppo" and self.regulariser != NO_REGULARISER:
            raise checks.InputError(
                f"--regulariser: expected none with --algorithm ppo, got "
                f"{self.regulariser}; leave it out, or choose grpo"
            )
        if self.algorithm == "grpo":
            checks.groups(self.batch_size, group_size=self.group_size, least=2)

    def of_programs(self) -> Config:
        """The options on which compiled programs depend; the others have defaults."""
        return dataclasses.replace(
            programs.without_place(self), prepared=None, kl_coef=1.0
        )

    def of_preparation(self, folder: Path) -> Sft:
        """The options of the run that trains this seed's reference."""
        return Sft(
            out=folder,
            seed=self.seed,
            resume=True,  # or start
            progress=self.progress,
            sft_steps=self.sft_steps,
            sft_batch_size=self.sft_batch_size,
            sft_learning_rate=self.sft_learning_rate,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            held_out=self.held_out,
        )


# --- the reference ----------------------------------------------------------------


def reference_of(
    options: Config, rows: Sequence[Row], *, check: Callable[[], None]
) -> Params:
    """The reference of a seed, trained by the first run that needs it.

    Args:
      rows: worked examples.
      check: see `made_once.made_once`.
    """
    place = options.out / "prepared" if options.prepared is None else options.prepared
    folder = made_once.folder_of(place, "arithmetic", options.of_preparation(place))

    def fine_tuned() -> made_once.Arrays:
        own = options.of_preparation(folder / "run")
        with run.Run(own, num_steps={"sft": own.sft_steps}) as job:
            return fine_tune(rows, job=job, options=own)

    return jax.tree.map(
        jnp.asarray, made_once.made_once(folder, fine_tuned, check=check)
    )


def fine_tune(rows: Sequence[Row], *, job: run.Run, options: Sft) -> Params:
    """Trains on worked examples until the form and some of the sums are known."""
    model = model_of(options)
    params = jax.jit(decoder.init, static_argnames=("model",))(
        jax.random.fold_in(jax.random.key(options.seed), 0), model=model
    )
    examples = batches.sequence_batches(
        [Example(encode(row["prompt"]), encode(row["answer"] + ".")) for row in rows],
        batch_size=options.sft_batch_size,
        seed=options.seed,
        pad_id=PAD_ID,
        buckets=(PROMPT_TOKENS + NEW_TOKENS,),
    )
    optimizer = optax.adamw(options.sft_learning_rate)
    update = jax.jit(
        functools.partial(sft.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    initial = state.supervised_state(params, optimizer=optimizer)
    with job.stage("sft", initial, meta={}) as stage:
        for step in stage.steps():
            stage.state, stats = update(stage.state, batch=examples[step])
            stage.end_step(step, stats)
    return stage.state.params


def model_of(options: Sft) -> ModelConfig:
    """The model config of reference, policy and critic."""
    return config.gpt2(
        vocab_size=len(LETTERS),
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        max_positions=PROMPT_TOKENS + NEW_TOKENS,
    )


# --- the policy -------------------------------------------------------------------


class Programs(NamedTuple):
    """The programs of an algorithm; between `sample` and `learn` a verifier runs."""

    algorithm: ppo.PPO | grpo.GRPO
    # (reference, kl_coef) -> the state before the first iteration
    start: Callable[[Params, float], TrainState]
    sample: Callable[..., Rollout]
    learn: Callable[..., tuple[TrainState, Stats, Any]]  # donates the state


@functools.cache
def programs_of(options: Config) -> Programs:
    """The programs of an algorithm, which are compiled once.

    Args:
      options: `Config.of_programs` of a run; equal options share their programs.
    """
    model = model_of(options)
    updates = options.num_steps * options.num_epochs * options.num_minibatches

    def adam(learning_rate: float) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(optax.linear_schedule(learning_rate, 0.0, updates)),
        )

    if options.algorithm == "grpo":
        algorithm = grpo.GRPO(
            model=model,
            policy_optimizer=adam(options.learning_rate),
            max_new_tokens=NEW_TOKENS,
            stop_ids=(STOP_ID,),
            temperature=options.temperature,
            penalty=options.penalty,
            aggregation=options.aggregation,
            baseline=options.baseline,
            group_size=options.group_size,
            num_epochs=options.num_epochs,
            num_minibatches=options.num_minibatches,
            **options.regulariser.of_recipe,
        )

        def start(reference: Params, kl_coef: float) -> TrainState:
            return state.grpo_state(
                policy=storage.store(reference),
                policy_optimizer=algorithm.policy_optimizer,
                kl=kl_control.fixed(kl_coef),
            )

        sample, learn = grpo.sample, grpo.learn
    else:
        algorithm = ppo.PPO(
            model=model,
            critic_model=model,
            policy_optimizer=adam(options.learning_rate),
            critic_optimizer=adam(options.critic_learning_rate),
            max_new_tokens=NEW_TOKENS,
            stop_ids=(STOP_ID,),
            temperature=options.temperature,
            penalty=options.penalty,
            aggregation=options.aggregation,
            whiten_advantages=None,
            lam=options.lam,
            num_epochs=options.num_epochs,
            num_minibatches=options.num_minibatches,
        )

        def start(reference: Params, kl_coef: float) -> TrainState:
            return state.ppo_state(
                policy=storage.store(reference),
                critic=critic.from_policy(reference, model=model),
                policy_optimizer=algorithm.policy_optimizer,
                critic_optimizer=algorithm.critic_optimizer,
                kl=kl_control.fixed(kl_coef),
            )

        sample, learn = ppo.sample, ppo.learn
    algorithm.minibatch_size(options.batch_size)
    return Programs(
        algorithm,
        start,
        jax.jit(functools.partial(sample, recipe=algorithm)),
        jax.jit(functools.partial(learn, recipe=algorithm), donate_argnames=("state",)),
    )
