"""The loss of distillation: a divergence at every token, plus the policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience
from rlhf_jax.algorithms.flow import ledger
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.functional import masked
from rlhf_jax.functional.aggregation import token_weights
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.packing import Packing
from rlhf_jax.roles.policy import exact_kl
from rlhf_jax.roles.reference.frozen import FrozenModels, adapted_params, read, shape_of

if TYPE_CHECKING:  # its recipe, which imports this module
    from rlhf_jax.algorithms.distill.recipe import Distill

Array = jax.Array
Params = Any


def distillation_loss(
    policy: Params,
    *,
    experience: PolicyExperience,
    kl_coef: Array | float,
    num_tokens: Array,
    num_responses: Array,
    recipe: Distill,
    frozen: FrozenModels,
    packing: Packing | None = None,
) -> tuple[Array, masked.Stats]:
    """L = β Σ_t w_t·D(student ‖ teacher)_t + policy_loss of a (micro-)batch.

    D is `recipe.divergence` between the distributions of token t over the vocabulary,
    and w the weights of `recipe.aggregation`. The prefixes are the student's samples,
    which are not differentiated. The gradient reaches the student's parameters only.
    The policy loss is a term only if `recipe.reads_advantages`.

    Args:
      frozen: its reference is the teacher, or the teacher's head where the experience
        has the teacher's hidden states.

    Returns:
      f32[] and {name: (sum, weight)}; `loss/divergence` is D, nats per token.

    Raises:
      InputError: there is no teacher, or hidden states come with a packing.

    Source: Agarwal et al. 2023, arXiv:2306.13649, algorithm 1 with λ = 1.
    """
    mask = experience.response_mask
    loss, stats, hidden, texts = policy_terms(
        policy,
        experience=experience,
        kl_coef=kl_coef,
        num_tokens=num_tokens,
        num_responses=num_responses,
        recipe=recipe,
        frozen=frozen,
        packing=packing,
    )
    if not recipe.reads_advantages:  # no policy loss, and no backward pass for one
        loss = jnp.zeros_like(loss)
        prefixes = ("policy/sampler_mismatch", ledger.PREFIX)
        stats = {name: x for name, x in stats.items() if name.startswith(prefixes)}
    if recipe.divergence is None:
        return loss, stats
    teacher = frozen.reference
    if teacher is None:
        raise InputError(
            "expected the teacher as the reference of the update, got none; pass it, "
            "or its head with its hidden states"
        )
    teacher_model = shape_of(teacher, policy=recipe.model)
    teacher_hidden = experience.ref_hidden
    if teacher_hidden is None:
        # The teacher runs in every minibatch. `teacher_states` would run it once, and
        # keep its hidden states in memory.
        teacher_hidden = texts.hidden_states(
            read(teacher),
            model=teacher_model,
            experts=experience.experts if recipe.reference_replays else None,
        )
    elif packing is not None:
        raise InputError(
            "packing: expected none with hidden states of the teacher, which are of "
            "padded rows; leave one of them out"
        )
    mixed = recipe.divergence == "jensen_shannon"
    # `policy_terms` returned the student's states: one forward pass serves both.
    divergence = exact_kl(
        adapted_params(policy, base=frozen.base, lora=recipe.lora),
        hidden,
        read(teacher),
        teacher_hidden,
        texts=texts,
        model=recipe.model,
        ref_model=teacher_model,
        temperature=recipe.temperature,
        direction="forward" if recipe.divergence == "forward" else "reverse",
        top_k=recipe.top_k,
        jsd_beta=recipe.jsd_beta if mixed else None,
    )
    divergence = texts.padded(divergence)
    weights = token_weights(
        mask,
        aggregation=recipe.aggregation,
        loss_scale_factor=recipe.loss_scale,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )
    # A statistic; the loss below keeps its gradient.
    of_tokens = masked.masked_sum(jax.lax.stop_gradient(divergence), mask=mask)
    stats |= {"loss/divergence": (of_tokens, mask.sum(dtype=jnp.float32))}
    return loss + kl_coef * masked.masked_sum(weights * divergence, mask=mask), stats
