"""The policy's terms of a loss, which all policy gradients share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience
from rlhf_jax.algorithms.flow import ledger
from rlhf_jax.algorithms.policy_gradient.options import KLCov
from rlhf_jax.functional import losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import penalty
from rlhf_jax.functional.kl.penalty import with_sampled_tail
from rlhf_jax.models.experts import balance_loss, router_stats
from rlhf_jax.models.packing import Packing, Texts, texts_of
from rlhf_jax.roles.policy import exact_kl, logprobs_from_hidden, logprobs_of
from rlhf_jax.roles.reference.frozen import (
    NO_MODELS,
    Frozen,
    FrozenModels,
    adapted_params,
    read,
    shape_of,
)

if TYPE_CHECKING:  # which imports this module
    from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient

Array = jax.Array
Params = Any
# (log-probs, advantages, mask and counts, by keyword) -> (loss, stats).
Loss = Callable[..., tuple[Array, masked.Stats]]


class Part(TypedDict):
    """The arguments of `policy_terms` that describe a part of a minibatch."""

    experience: PolicyExperience  # [b, S], the rows of the part
    kl_coef: Array | float  # β, reward units per nat
    num_tokens: Array  # f32[], response tokens of the whole minibatch
    num_responses: Array  # f32[], responses with a token of the whole minibatch
    frozen: FrozenModels
    packing: Packing | None


class PolicyTerms(NamedTuple):
    """The results of `policy_terms`."""

    loss: Array  # f32[]
    stats: masked.Stats
    # The policy's states, floats[*texts.tokens.shape, D], for other heads on its trunk.
    hidden: Array
    texts: Texts  # the rows in the layout of `hidden`


def policy_terms(
    policy: Params,
    *,
    experience: PolicyExperience,
    kl_coef: Array | float,
    num_tokens: Array,
    num_responses: Array,
    recipe: PolicyGradient,
    frozen: FrozenModels = NO_MODELS,
    packing: Packing | None = None,
) -> PolicyTerms:
    """L = policy_loss + β·kl_loss - c_H·entropy of a (micro-)batch.

    policy_loss is the loss of `recipe.surrogate`. β·kl_loss is a term with a penalty in
    the loss (`recipe.penalty`), the entropy with `recipe.entropy_coef` or
    `entropy_control`. `options.KLCov` adds coef·`kl_cov_loss`, and
    `recipe.balance_coef` a balance loss. With further references in the experience,
    kl_loss is kl_loss(π, π_ref) + Σ_i w_i·kl_loss(π, π_i).

    Args:
      policy: parameters, or adapters; the gradient reaches only these.
      num_tokens, num_responses: f32[], response tokens of the whole minibatch, and its
        responses with a token.
      frozen: its references are read only for exact KL in the loss; the experience has
        the log-probs and weights of further references.

    Returns:
      The loss with the stats of its terms, `policy/sampler_mismatch`, and the sums of
      the ledger of trust if the experience has entries for it.
    """
    mask = experience.response_mask
    params = adapted_params(policy, base=frozen.base, lora=recipe.lora)
    # Columns before the response have no loss, so heads skip them and save most of the
    # vocabulary-sized work. The last prompt column predicts the first response token.
    texts = texts_of(
        experience.tokens,
        experience.mask,
        first_column=experience.tokens.shape[1] - recipe.max_new_tokens,
        packing=packing,
    )
    hidden, balance, router_stats = _hidden_states(
        params, texts, experience=experience, num_tokens=num_tokens, recipe=recipe
    )
    # In chunks of the vocabulary: even the backward pass has no array [b, S, V].
    logprobs, entropy = logprobs_from_hidden(
        params,
        hidden,
        texts=texts,
        model=recipe.model,
        temperature=recipe.temperature,
    )
    # From here on all arrays are padded [b, S]: losses do not know of packing.
    logprobs = texts.padded(logprobs)
    scale: losses.LossScale = recipe.loss_scale
    if recipe.aggregation == "prompt_mean":
        scale = experience.prompt_scale
    # Policy loss, entropy and KL have one divisor, of the whole minibatch, so that the
    # losses of micro-batches add up.
    counts: dict[str, Any] = {
        "aggregation": recipe.aggregation,
        "loss_scale_factor": scale,
        "num_tokens": num_tokens,
        "num_responses": num_responses,
    }
    advantages, left_out = _kept_advantages(experience, logprobs, recipe)
    surrogate: dict[str, Any] = {
        "logprobs": logprobs,
        "old_logprobs": experience.old_logprobs,
        "advantages": advantages,
        "mask": mask,
        **counts,
    }
    if recipe.reads_reference:
        if experience.ref_logprobs is None:
            raise InputError(
                "expected a reference for surrogate dar, got none; pass one in frozen"
            )
        surrogate["ref_logprobs"] = experience.ref_logprobs
    if recipe.recorded_top_k is not None:
        recorded = experience.top_k
        if recorded is None or packing is not None:
            raise InputError(
                "expected padded rows with the sampler's top k for surrogate centred, "
                "got others; sample with the trainer's own decoder, without a packing"
            )
        surrogate["old_top_logprobs"] = recorded.logprobs
        surrogate["top_logprobs"] = logprobs_of(
            recorded.tokens,
            params,
            hidden,
            texts=texts,
            model=recipe.model,
            logprobs=logprobs,
            temperature=recipe.temperature,
        )
    loss, stats = recipe.surrogate.loss(**surrogate)
    stats |= left_out | router_stats
    if recipe.balance_coef:
        loss += recipe.balance_coef * balance
    # Measured in every minibatch, as a scan has one body; `update` keeps the first.
    stats["policy/sampler_mismatch"] = mean_distance(
        jax.lax.stop_gradient(logprobs), experience.old_logprobs, mask=mask
    )
    if experience.sampled is not None:
        stats |= ledger.sums(
            experience.sampled,
            logprobs=logprobs,
            entropy=texts.padded(entropy),
            mask=experience.mask,
            max_new_tokens=recipe.max_new_tokens,
            vocab_size=recipe.model.num_tokens,
        )
    if isinstance(recipe.token_choice, KLCov):
        # Imported here: few runs need it.
        from rlhf_jax.functional.policy_losses.token_choice import kl_cov_loss

        assert experience.chosen is not None  # set by `token_choice.choose`
        kl_cov, kl_cov_stats = kl_cov_loss(
            logprobs=logprobs,
            old_logprobs=experience.old_logprobs,
            chosen=experience.chosen,
            mask=mask,
            **counts,
        )
        loss, stats = loss + recipe.token_choice.coef * kl_cov, stats | kl_cov_stats
    # Static: at 0 the term is not in the program.
    controlled = experience.entropy_coef
    if recipe.entropy_coef or controlled is not None:
        bonus, bonus_stats = losses.entropy_bonus(
            entropy=texts.padded(entropy), mask=mask, **counts
        )
        # The maximum, as a packed part has 0 in the rows of other parts.
        coef = recipe.entropy_coef if controlled is None else controlled.max()
        loss, stats = loss + coef * bonus, stats | bonus_stats
    if recipe.penalty.in_loss and experience.ref_logprobs is not None:

        def of_reference(
            ref_logprobs: Array, reference: Frozen | None
        ) -> tuple[Array, masked.Stats]:
            exact = None
            # From the hidden states of the policy's log-probs: one forward pass of the
            # policy serves both.
            if recipe.penalty.loss_needs_logits:
                experts = experience.experts if recipe.reference_replays else None
                exact = _exact_kl(params, hidden, texts, reference, recipe, experts)
                if recipe.penalty.tail == "sampled":
                    exact = with_sampled_tail(
                        *exact,
                        logprobs=logprobs,
                        ref_logprobs=ref_logprobs,
                        mask=mask,
                        log_weights=logprobs - experience.behaviour_logprobs
                        if recipe.penalty.weights_tail
                        else None,
                    )
            return penalty.kl_loss(
                penalty=recipe.penalty,
                logprobs=logprobs,
                # Importance weights of the KL are relative to the sampler; the ratio of
                # the surrogate is relative to `old_logprobs`.
                old_logprobs=experience.behaviour_logprobs,
                ref_logprobs=ref_logprobs,
                mask=mask,
                weights=losses.token_weights(mask, **counts),
                exact=exact,
            )

        kl_loss, kl_stats = of_reference(experience.ref_logprobs, frozen.reference)
        for name, further in experience.further.items():
            assert further.logprobs is not None  # set by `flow.objective.add_further`
            model = frozen.further[name].frozen if frozen.further else None
            added, added_stats = of_reference(further.logprobs, model)
            kl_loss += further.weight * added
            # The logged KL is weighted, as in the loss; clipping is counted over all
            # references.
            kl_sum, num_kl = added_stats.pop("loss/kl")
            first_sum, _ = kl_stats.pop("loss/kl")
            kl_stats = masked.add_stats(kl_stats, added_stats)
            kl_stats["loss/kl"] = first_sum + further.weight * kl_sum, num_kl
        loss, stats = loss + kl_coef * kl_loss, stats | kl_stats
    return PolicyTerms(loss, stats, hidden, texts)


def _hidden_states(
    params: Params,
    texts: Texts,
    *,
    experience: PolicyExperience,
    num_tokens: Array,
    recipe: PolicyGradient,
) -> tuple[Array, Array | float, masked.Stats]:
    """Hidden states; for mixtures of experts also a balance loss and router stats."""
    model, experts = recipe.model, experience.experts
    if model.experts is None:
        return texts.hidden_states(params, model=model), 0.0, {}
    hidden, routing = texts.hidden_and_routing(params, model=model, experts=experts)
    # Each part balances its own tokens, weighted by its share of the minibatch.
    # A minibatch without a token, whose responses are all left out, has no share.
    share = experience.response_mask.sum(dtype=jnp.float32) / jnp.maximum(
        num_tokens, 1.0
    )
    stats = jax.lax.stop_gradient(router_stats(routing))
    return hidden, share * balance_loss(routing), stats


def _kept_advantages(
    experience: PolicyExperience, logprobs: Array, recipe: PolicyGradient
) -> tuple[Array, masked.Stats]:
    """Advantages, 0 at tokens that `token_choice` or `off_policy_mask` leave out."""
    advantages = experience.advantages
    if experience.chosen is not None and not isinstance(recipe.token_choice, KLCov):
        # Here, and not in the experience, whose advantages PPO may still whiten.
        advantages = jnp.where(experience.chosen, advantages, 0.0)
    if recipe.off_policy_mask is None:
        return advantages, {}
    # Imported here: few runs need it.
    from rlhf_jax.functional.policy_losses.sequence_mask import off_policy_mask

    kept = off_policy_mask(
        logprobs=logprobs,
        old_logprobs=experience.behaviour_logprobs,
        advantages=experience.advantages,
        mask=experience.response_mask,
        threshold=recipe.off_policy_mask,
    )
    # Not in the mask: tokens that are left out still count in the divisor of a loss.
    stats = {"policy/off_policy_masked": (~kept).astype(jnp.float32)}
    return (
        jnp.where(kept, advantages, 0.0),
        masked.sum_stats(stats, mask=experience.response_mask),
    )


def _exact_kl(
    params: Params,
    hidden: Array,
    texts: Texts,
    reference: Frozen | None,
    recipe: PolicyGradient,
    experts: Array | None,
) -> Any:
    if reference is None:
        raise InputError(
            "expected the reference itself for exact KL in the loss, got log-probs "
            "alone; pass it in frozen, or choose k1, k2 or k3"
        )
    ref_model = shape_of(reference, policy=recipe.model)
    with jax.named_scope("reference"):
        ref_params = read(reference)
        ref_hidden = texts.hidden_states(ref_params, model=ref_model, experts=experts)
    exact = exact_kl(
        params,
        hidden,
        ref_params,
        ref_hidden,
        texts=texts,
        model=recipe.model,
        ref_model=ref_model,
        temperature=recipe.temperature,
        direction=recipe.penalty.direction,
        top_k=recipe.penalty.top_k,
        sampled_tail=recipe.penalty.tail == "sampled",
    )
    return jax.tree.map(texts.padded, exact)


def mean_distance(left: Array, right: Array, *, mask: Array) -> tuple[Array, Array]:
    """(Σ m·|left - right|, Σ m), nats per token for log-probs."""
    distance = masked.masked_sum(jnp.abs(left - right), mask=mask)
    return distance, mask.sum(dtype=jnp.float32)
