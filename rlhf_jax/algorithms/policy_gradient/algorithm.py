"""The interface of a policy-gradient algorithm.

An algorithm is a subclass of `PolicyGradient` with its own options, `experience`, and a
loss if it needs more than the policy's (`policy_gradient.loss`): `ppo.PPO`,
`grpo.GRPO`, `reinforce.REINFORCE`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import (
    PolicyExperience,
    Prompts,
    Rollout,
    RolloutPacking,
    Scored,
)
from rlhf_jax.algorithms.policy_gradient.corrections import Reject
from rlhf_jax.algorithms.policy_gradient.loss import Part, policy_terms
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.algorithms.state import LossFunction, Optimizer, TrainState
from rlhf_jax.functional import aggregation, checks, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import expect_none, refuse
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA, targets
from rlhf_jax.models.packing import Packing
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params
from rlhf_jax.roles.reference.lifecycle import FROZEN, Lifecycle

Array = jax.Array
Params = Any
Tree = TypeVar("Tree")
# A whole minibatch -> the minibatch to learn from, and the loss of its parts.
MinibatchLoss = Callable[[Any], tuple[Any, LossFunction]]


class CriticRecipe(NamedTuple):
    """The critic of an algorithm, and how it is trained with the policy."""

    model: ModelConfig
    optimizer: Optimizer
    after_stop: bool  # the state after the last token of a response has a value
    shared_trunk: bool  # the critic is a head on the policy's trunk
    warmup: int  # iterations at the start that train the critic alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyRecipe, abc.ABC):
    """A recipe with its shapes and its optimizer; hashable, so static under `jit`."""

    model: ModelConfig  # of the policy and the reference
    policy_optimizer: Optimizer
    max_new_tokens: int  # R, response columns
    stop_ids: tuple[int, ...]  # tokens that end a response; () never stops
    lifecycle: Lifecycle = FROZEN  # of the reference; the caller's loop moves it
    # Trains adapters over one base; None trains every parameter.
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(max_new_tokens=self.max_new_tokens)
        refuse((*self._faults_of_stops(), *self._faults_of_model()))
        self._check_lengths()
        self.check_top_k(**{"penalty.top_k": self.penalty.top_k})
        self.check_top_k(**{"top_k of surrogate": self.recorded_top_k})
        if self.lora is not None:
            # Fail where the recipe is made, not in the first trace.
            targets(model=self.model, lora=self.lora)  # raises for a bad pattern
        warning = self.penalty.warning
        if warning is not None:
            also = self.length_bias
            warnings.warn(
                warning if also is None else f"{warning}; {also}", stacklevel=5
            )

    def check_top_k(self, **numbers: int | None) -> None:
        """Raises InputError for a top k larger than the vocabulary."""
        checks.within(
            most=self.model.vocab_size,
            advice="the vocabulary has no more tokens: choose fewer",
            **numbers,
        )

    def _faults_of_model(self) -> Iterator[str]:
        """Options of mixtures of experts on a dense model, or of groups without any."""
        replay = self.routing_replay
        for name, is_set in {
            "routing_replay": replay is not None,
            "balance_coef": self.balance_coef != 0,
        }.items():
            if is_set and self.model.experts is None:
                yield (
                    f"{name}: expected a mixture of experts, got a dense "
                    f"{self.model.family}; leave {name} out"
                )
        if self.aggregation == "prompt_mean" and self.rows_per_prompt == 1:
            yield (
                "aggregation: expected groups of responses to a prompt with "
                "'prompt_mean', got an algorithm without groups, where it is "
                "'sequence_mean'; choose that"
            )

    @property
    def reads_stops(self) -> dict[str, bool]:
        """Whether an option reads stop tokens, by name."""
        return {
            "scores.missing_stop_score or missing_stop_penalty": (
                self.scores.reads_stops
            ),
            "fixed_length": self.fixed_length is not None,
        }

    def _faults_of_stops(self) -> Iterator[str]:
        """Options that read stop tokens, where there are none."""
        for name, needs in self.reads_stops.items():
            if needs and not self.stop_ids:
                yield (
                    f"{name}: expected stop_ids to look for, got none, so that no "
                    f"response would ever have stopped; name stop_ids or leave it out"
                )

    def _check_lengths(self) -> None:
        """Raises InputError for an option that no length of a response can trigger."""
        if self.fixed_length is not None:
            checks.within(
                below=self.max_new_tokens,
                advice="no later token could end a response: lower it, or raise "
                "max_new_tokens",
                truncate_after=self.fixed_length.truncate_after,
            )
        checks.within(
            below=self.max_new_tokens,
            advice="no response is longer: lower it, or raise max_new_tokens",
            **{"scores.overlong_after": self.scores.overlong_after},
        )

    @abc.abstractmethod
    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Makes the experience of the updates from a scored rollout.

        Args:
          scored: Scored[B, S], from `sample` and `score`.
          kl_coef: β, f32[], reward units per nat. Here it acts in the reward: with a
            penalty in the reward, `token_rewards` subtracts β·scored.kl.

        Returns:
          A record with at least the fields of `PolicyExperience`, and its stats.
        """

    def rollout(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        frozen: FrozenModels = NO_MODELS,
        version: Array | None = None,
    ) -> Rollout:
        """Samples responses to prompts, by default from the policy. β does not act.

        Args:
          policy: parameters to run with, including adapters.
          prompts: Prompts[B, P].
          key: key of this step.
          frozen: for algorithms that also sample from the reference (Nash-MD).
          version: i32[], version of the policy, recorded per token; None records none.

        Returns:
          Rollout[B, P + R].
        """
        del frozen  # read by Nash-MD
        return flow.rollout.rollout(
            policy,
            model=self.model,
            prompts=prompts,
            key=key,
            max_new_tokens=self.max_new_tokens,
            # With a fixed length sampling does not stop: `sample` truncates afterwards.
            stop_ids=self.stop_ids if self.fixed_length is None else (),
            temperature=self.temperature,
            group_size=self.rows_per_prompt,
            continuous_batching=self.continuous_batching,
            version=version,
            record_experts=self.routing_record is not None,
            record_top_k=self.recorded_top_k,
        )

    @property
    def routing_record(self) -> tuple[int, int] | None:
        """L and k, layers and experts of a token that the sampler records, or None."""
        replay, experts = self.routing_replay, self.model.experts
        if replay is None or replay.source != "sampler" or experts is None:
            return None
        return self.model.num_layers, experts.per_token

    def record_bytes(self, *, tokens: int) -> dict[str, int]:
        """Bytes of a batch's records in addition to its tokens, by name.

        These are the replayed experts, i32[B, S, L, k], and the sampler's likeliest
        tokens, i32[B, S, k], with their log-probs, f32[B, S, k].

        Args:
          tokens: B·S.
        """
        records, experts = {}, self.model.experts
        if self.routing_replay is not None and experts is not None:
            size = 4 * self.model.num_layers * experts.per_token
            records["routing record"] = tokens * size
        if self.recorded_top_k is not None:
            records["likeliest tokens"] = tokens * 8 * self.recorded_top_k
        return records

    def minibatch_loss(
        self,
        minibatch: Any,
        *,
        kl_coef: Array,
        frozen: FrozenModels = NO_MODELS,
    ) -> tuple[Any, LossFunction]:
        """Returns the loss of the parts of a minibatch, by default the policy's alone.

        Args:
          minibatch: the rows of the experience that one optimizer step reads.
          kl_coef: β, f32[], reward units per nat. Here it acts in the loss: β·kl_loss,
            with a penalty in the loss.
          frozen: of the iteration, for exact KL in the loss and for adapters.

        Returns:
          The minibatch to learn from, and ((policy, critic), part, packing) ->
          (loss, stats), whose losses add up over the parts. `packing` is the layout of
          the part, passed if the update is packed.
        """
        # Counts of the whole minibatch, before it is cut into parts: every part divides
        # by them, so that losses and gradients of parts add up exactly.
        mask = minibatch.response_mask
        terms = functools.partial(
            self.terms,
            kl_coef=kl_coef,
            num_tokens=mask.sum(dtype=jnp.float32),
            num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
            frozen=frozen,
        )

        def loss(
            trained: tuple[Params, Params],
            part: PolicyExperience,
            packing: Packing | None = None,
        ) -> tuple[Array, masked.Stats]:
            return terms(trained[0], experience=part, packing=packing)

        return minibatch, loss

    def terms(self, policy: Params, **part: Unpack[Part]) -> tuple[Array, masked.Stats]:
        """`policy_terms` of a part of a minibatch: its loss f32[] and stats."""
        output = policy_terms(policy, recipe=self, **part)
        return output.loss, output.stats

    @property
    def critic(self) -> CriticRecipe | None:
        """The critic; None for an algorithm that has none."""
        return None

    @property
    def reads_ref_hidden(self) -> bool:
        """Whether to pass `learn` the reference's hidden states, not only log-probs.

        `ReferenceOutput` has them, and `FrozenModels.reference` is then the head alone
        (`flow.teacher`).
        """
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether some responses of a rollout are not trained on."""
        return isinstance(self.sampler_correction, Reject)

    def reported(self, rows: Tree) -> Tree:
        """The rows that count in statistics of the objective and in logged samples.

        Args:
          rows: a pytree of arrays with B rows of a rollout, or of scalars.
        """
        return rows

    def refuse_critic_apart(self) -> None:
        """Checks that critic and policy can be trained in separate programs.

        Raises:
          InputError: they share a trunk, or a guard may skip a step of both, which the
            critic's program cannot know.
        """
        shared = self.critic is not None and self.critic.shared_trunk
        for name, value, why in (
            ("shared_trunk", shared or None, "they are one network"),
            ("stop_approxkl", self.stop_approxkl, "it ends the updates of both"),
            ("max_ratio_mean", self.max_ratio_mean, "it leaves out a step of both"),
        ):
            expect_none(
                "where the critic is trained apart from the policy",
                advice=f"{why}: leave it out, or train them together",
                **{name: value},
            )

    def refuse_turns(self, turns: Array | None) -> None:
        """Raises InputError for rewards of turns with `fixed_length`."""
        if self.fixed_length is not None and turns is not None:
            raise InputError(
                f"fixed_length: expected None for episodes of several turns, each of "
                f"which ends at a stop token, got {self.fixed_length}, which would cut "
                f"them at the first; leave it out"
            )

    def kl_coef(self, state: TrainState) -> Array:
        """β of this iteration, f32[], reward units per nat: only computed here.

        It is the controller's coefficient, times `lifecycle.kl_every` with
        `lifecycle.scale_kl_coef`.
        """
        # The controller's state is an array: a moving β does not recompile anything.
        coef, lifecycle = state.kl.kl_coef, self.lifecycle
        return coef * lifecycle.kl_every if lifecycle.scale_kl_coef else coef

    @property
    def loss_scale(self) -> float | None:
        """The divisor of aggregation constant, tokens; None for the means.

        prompt_mean has `PolicyExperience.prompt_scale` for each row instead.
        """
        if self.aggregation != "constant" or self.loss_scale_factor is not None:
            return self.loss_scale_factor
        return float(self.max_new_tokens)

    @property
    def length_bias(self) -> str | None:
        """How the aggregation biases the expected gradient; None if it does not.

        It does not where all responses are trained on to the same length.
        """
        if not self.stop_ids or self.truncates_reward_only:
            return None
        return aggregation.bias(self.aggregation)


def values(
    state: TrainState,
    *,
    rollout: Rollout,
    recipe: PolicyGradient,
    frozen: FrozenModels = NO_MODELS,
    packing: RolloutPacking | None = None,
) -> Array | None:
    """Computes the critic's values of a rollout, as `learn` does if none are passed.

    The critic is a model, adapters of the base, or a head on the policy's trunk. As a
    separate program it can run while the host computes the scores.

    Returns:
      f32[B, S], reward units, 0 where a state has no value; None for an algorithm
      without a critic.

    Raises:
      InputError: the state has no critic.
    """
    critic = recipe.critic
    if critic is None:
        return None
    if state.critic is None:
        raise InputError(
            "expected values where the critic is apart from the state, got none; "
            "pass those of critic_apart.values"
        )
    adapt = {"base": frozen.base, "lora": recipe.lora}
    if critic.shared_trunk:
        # `state.critic` has only the head: the trunk is not stored twice.
        trunk = adapted_params(state.policy, **adapt)
        params = {"trunk": trunk, "score": state.critic["score"]}
    else:
        params = adapted_params(state.critic, **adapt)
    return flow.score.response_values(
        params,
        rollout=rollout,
        model=critic.model,
        max_new_tokens=recipe.max_new_tokens,
        after_stop=critic.after_stop,
        packing=None if packing is None else packing.batch,
    )
