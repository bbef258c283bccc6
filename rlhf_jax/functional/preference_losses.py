"""Losses over pairs of answers: Bradley-Terry, and DPO with its variants.

As every loss (`losses`, which has these too): a sum over pairs divided by the number of
pairs, so that given the number of the whole minibatch those of its parts add up.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError

Array = jax.Array
Stats = masked.Stats

DPOKind = Literal["sigmoid", "ipo", "hinge"]
"""What the implicit rewards of a pair are held to: the likelihood of the preference, a
lead of 1/(2β) nats exactly, or a lead of 1 at least."""


def pairwise_loss(
    *,
    chosen: Array,
    rejected: Array,
    margin: Array | None = None,
    num_pairs: Array | None = None,
) -> tuple[Array, Stats]:
    """Bradley-Terry, -(1/N) Σ log σ(chosen - rejected - margin).

    Args:
      chosen, rejected: f32[B], reward units, scores of the two answers of a pair.
      margin: f32[B], reward units by which chosen should lead; None is 0.
      num_pairs: f32[], N of the whole minibatch when this is a micro-batch; None
        is B.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `chosen` and
      `rejected`. `loss/pairwise`: the loss. `pairwise/accuracy`: share of pairs with
      chosen > rejected, margin aside; a tie is a miss. `pairwise/lead`: chosen -
      rejected, reward units.

    Raises:
      ValueError: shapes differ. TypeError: not f32.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; the margin is
    Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    checks.shape((None,), chosen=chosen)
    margin = jnp.zeros_like(chosen) if margin is None else margin
    checks.same_shape(chosen=chosen, rejected=rejected, margin=margin)
    checks.float32(chosen=chosen, rejected=rejected, margin=margin)
    every_pair = jnp.ones(chosen.shape, jnp.bool_)
    lead = chosen - rejected
    losses = -jax.nn.log_sigmoid(lead - jax.lax.stop_gradient(margin))
    stats = masked.sum_stats(
        {
            "loss/pairwise": losses,
            "pairwise/accuracy": (lead > 0).astype(jnp.float32),
            "pairwise/lead": lead,
        },
        mask=every_pair,
    )
    return _per_pair(losses, every_pair, num_pairs), stats


def dpo_loss(
    *,
    chosen_logprobs: Array,
    rejected_logprobs: Array,
    ref_chosen_logprobs: Array | None,
    ref_rejected_logprobs: Array | None,
    beta: float,
    kind: DPOKind = "sigmoid",
    label_smoothing: float | Array = 0.0,
    num_pairs: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Stats]:
    """Preferences learned without a reward model, the mean over pairs of a loss of h.

        h        = log π(c)/π_ref(c) - log π(r)/π_ref(r)     c chosen, r rejected
        sigmoid  -(1-ε) log σ(βh) - ε log σ(-βh)             DPO; ε > 0 is cDPO
        ipo      (h - 1/(2β))²                               IPO
        hinge    max(0, 1 - βh)                              SLiC

    log π(y) is a sum over the tokens of a response, in IPO too, as its eq. 17 has it: h
    grows with the lengths, and 1/(2β) is a lead in nats of whole answers. Its authors
    have since confirmed that a mean over tokens is meant: for that pass means, and a β
    in reward units per nat per token (`dpo.DPORecipe.token_mean`).

    β·log π(y)/π_ref(y) is the reward that π is optimal for, up to a number that a
    prompt's answers share (the implicit reward). So the reference is a part of the
    loss: without one (both None, for comparison) h = log π(c) - log π(r), nothing
    holds π where it was, and longer answers are unlikelier to begin with.

    Args:
      chosen_logprobs, rejected_logprobs: f32[B], nats, sums over the response tokens;
        or their means, for IPO alone.
      ref_chosen_logprobs, ref_rejected_logprobs: f32[B], nats, the reference's sums;
        both None is the reference-free variant.
      beta: β, reward units per nat: of the KL that the optimum is held by (sigmoid,
        ipo), or the inverse of the lead that is enough (hinge).
      kind: which loss.
      label_smoothing: ε, the chance that the preference is the wrong way round: a
        number from 0 to below 0.5, or f32[B], a chance from 0 to 1 for each pair (soft
        labels). Sigmoid alone.
      num_pairs: f32[], N of the whole minibatch when this is a micro-batch; None
        counts mask.
      mask: bool[B], the pairs that are there; None is all.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `chosen_logprobs` and
      `rejected_logprobs` only. `loss/dpo`: the loss. Means over pairs:
      `dpo/chosen_reward`, `dpo/rejected_reward`, `dpo/margin`: the implicit rewards and
      their difference βh, reward units. `dpo/accuracy`: share with h > 0; a tie is a
      miss. `dpo/chosen_logprob`, `dpo/rejected_logprob`: nats per response, or
      per token where means were passed.

    Raises:
      ValueError: shapes differ. TypeError: floats are not f32 or mask is not bool.
      InputError: as `check_dpo`, or one half of the reference without the other.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; cDPO is Mitchell 2023, "A
    note on DPO with noisy preferences & relationship to IPO"; IPO is Azar et al. 2023,
    arXiv:2310.12036, eq. 17, its mean over tokens Rasul et al. 2024, "Preference tuning
    LLMs with direct preference optimization methods"; the hinge is Zhao et al. 2023,
    arXiv:2305.10425, eq. 1, on ratios as Liu et al. 2023, arXiv:2309.06657, eq. 7.
    """
    checks.shape((None,), chosen_logprobs=chosen_logprobs)
    if (ref_chosen_logprobs is None) != (ref_rejected_logprobs is None):
        missing = "chosen" if ref_chosen_logprobs is None else "rejected"
        raise InputError(
            f"expected ref_chosen_logprobs and ref_rejected_logprobs together, got no "
            f"ref_{missing}_logprobs; give both, or neither for no reference"
        )
    check_dpo(
        beta=beta,
        kind=kind,
        label_smoothing=label_smoothing,
        reference_free=ref_chosen_logprobs is None,
    )
    given = {"chosen_logprobs": chosen_logprobs, "rejected_logprobs": rejected_logprobs}
    if ref_chosen_logprobs is not None and ref_rejected_logprobs is not None:
        given["ref_chosen_logprobs"] = ref_chosen_logprobs
        given["ref_rejected_logprobs"] = ref_rejected_logprobs
    if not isinstance(label_smoothing, int | float):
        given["label_smoothing"] = label_smoothing
    if mask is None:
        mask = jnp.ones(chosen_logprobs.shape, jnp.bool_)
    checks.same_shape(**given, mask=mask)
    checks.float32(**given)
    checks.boolean(mask=mask)
    given = {name: jnp.where(mask, array, 0.0) for name, array in given.items()}
    chosen, rejected = given["chosen_logprobs"], given["rejected_logprobs"]
    smoothing = given.get("label_smoothing", label_smoothing)
    chosen_ratio, rejected_ratio = chosen, rejected
    if "ref_chosen_logprobs" in given:
        chosen_ratio -= jax.lax.stop_gradient(given["ref_chosen_logprobs"])
        rejected_ratio -= jax.lax.stop_gradient(given["ref_rejected_logprobs"])
    lead = chosen_ratio - rejected_ratio
    match kind:
        case "sigmoid":
            # log σ(-x) = log σ(x) - x: exactly log 2 at 0, whatever the smoothing.
            margin = beta * lead
            smoothing = jax.lax.stop_gradient(smoothing)
            losses = smoothing * margin - jax.nn.log_sigmoid(margin)
        case "ipo":
            losses = jnp.square(lead - 1 / (2 * beta))
        case "hinge":
            losses = jax.nn.relu(1.0 - beta * lead)
    stats = masked.sum_stats(
        {
            "loss/dpo": losses,
            "dpo/chosen_reward": beta * chosen_ratio,
            "dpo/rejected_reward": beta * rejected_ratio,
            "dpo/margin": beta * lead,
            "dpo/accuracy": (lead > 0).astype(jnp.float32),
            "dpo/chosen_logprob": chosen,
            "dpo/rejected_logprob": rejected,
        },
        mask=mask,
    )
    return _per_pair(losses, mask, num_pairs), stats


def check_dpo(
    *,
    beta: float,
    kind: DPOKind,
    label_smoothing: float | Array = 0.0,
    reference_free: bool = False,
) -> None:
    """What no DPO loss can be made of; arrays pass unread.

    Raises:
      InputError: beta is not positive, there is no such kind, label_smoothing is not in
        [0, 0.5) or would not be read, or IPO has no reference.
    """
    checks.positive(beta=beta)
    if kind not in get_args(DPOKind):
        raise InputError(
            f"kind: expected one of {', '.join(get_args(DPOKind))}, got {kind!r}; "
            f"choose one"
        )
    number = isinstance(label_smoothing, int | float)
    if number and not 0 <= label_smoothing < 0.5:
        raise InputError(
            f"label_smoothing: expected a chance from 0 to below 0.5, as from there on "
            f"the rejected answer would be the better one, got {label_smoothing}; "
            f"choose another"
        )
    if kind != "sigmoid" and not (number and label_smoothing == 0):
        got = label_smoothing if number else "an array"
        raise InputError(
            f"label_smoothing: expected 0 with kind {kind!r}, which does not read it, "
            f"got {got}; leave it out, or choose sigmoid"
        )
    if kind == "ipo" and reference_free:
        raise InputError(
            "kind: expected sigmoid or hinge without a reference, got 'ipo', which "
            "holds every pair to one lead over the reference: over none, that is a "
            "claim about the lengths of answers; choose another, or give the reference"
        )


def _per_pair(losses: Array, mask: Array, num_pairs: Array | None) -> Array:
    """Σ m·loss / N, N counted where None."""
    if num_pairs is None:
        return masked.masked_mean(losses, mask=mask)
    checks.shape((), num_pairs=num_pairs)
    count = jnp.asarray(num_pairs, jnp.float32)
    return masked.masked_sum(losses, mask=mask) / jnp.maximum(count, 1.0)
