"""DPO and its variants: losses of the implicit rewards of pairs of responses."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.preference_losses.bradley_terry import per_pair

Array = jax.Array
Stats = masked.Stats

DPOKind = Literal["sigmoid", "robust", "ipo", "hinge"]
"""Loss of the implicit rewards of a pair.

sigmoid maximises the likelihood of the preference. robust does so too, corrected for
labels that are flipped at a known rate. ipo regresses the lead of the chosen response
to 1/(2β) nats. hinge asks for a difference of the implicit rewards of at least 1.
"""


def dpo_loss(
    *,
    chosen_logprobs: Float32[Array, " B"],
    rejected_logprobs: Float32[Array, " B"],
    ref_chosen_logprobs: Float32[Array, " B"] | None,
    ref_rejected_logprobs: Float32[Array, " B"] | None,
    beta: checks.Scalar,
    kind: DPOKind = "sigmoid",
    label_smoothing: checks.Scalar | Float32[Array, " B"] = 0.0,
    num_pairs: Shaped[Array, ""] | None = None,
    mask: Bool[Array, " B"] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Direct preference optimisation: the mean over pairs of a loss of h.

        h        = log π(c)/π_ref(c) - log π(r)/π_ref(r)     c chosen, r rejected
        sigmoid  -(1-ε) log σ(βh) - ε log σ(-βh)             DPO; ε > 0 is cDPO
        robust   (-(1-ε) log σ(βh) + ε log σ(-βh)) / (1-2ε)  robust DPO
        ipo      (h - 1/(2β))²                               IPO
        hinge    max(0, 1 - βh)                              SLiC

    log π(y) is the sum over the tokens of a response, for IPO too, as in its eq. 17: h
    grows with the length, and 1/(2β) is a lead in nats of whole responses. The authors
    of IPO have since confirmed that they meant the mean over tokens. For that, pass
    means and a β in reward units per nat per token (`dpo.DPORecipe.token_mean`).

    cDPO and robust DPO are two remedies for labels that are flipped with probability ε.
    cDPO asks for a lead of (1/β) log((1-ε)/ε) nats and no more. Robust DPO is an
    unbiased estimate of the loss on labels that are not flipped, so on average its
    optimum is that of DPO on clean labels; for a single pair it has no minimum.

    The implicit reward β·log π(y)/π_ref(y) is the reward for which π is optimal, up to
    a constant of each prompt. So the loss needs the reference. Without a reference
    (both None, for comparison) h = log π(c) - log π(r): π is not kept near any policy,
    and long responses start with a lower log-probability.

    Args:
      chosen_logprobs, rejected_logprobs: f32[B], nats, sums over the response tokens;
        for IPO also their means.
      ref_chosen_logprobs, ref_rejected_logprobs: f32[B], nats, the reference's sums;
        both None is the reference-free variant.
      beta: β, reward units per nat: the KL coefficient of the objective that is solved
        (sigmoid, robust, ipo), or the inverse of the sufficient lead in nats (hinge).
      label_smoothing: ε, the probability that the preference is reversed: a number in
        [0, 0.5), or f32[B], a probability in [0, 1] for each pair (soft labels), which
        only sigmoid takes. robust needs a number above 0; ipo and hinge read none.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `chosen_logprobs`,
      `rejected_logprobs` and `beta`. `loss/dpo`: the loss. Means over pairs:
      `dpo/chosen_reward`, `dpo/rejected_reward`, `dpo/margin`: the implicit rewards and
      their difference βh, reward units. `dpo/accuracy`: share with h > 0; a tie counts
      as wrong. `dpo/chosen_logprob`, `dpo/rejected_logprob`: nats per response, or per
      token where means were passed.

    Raises:
      InputError: `check_dpo` refuses an option, or only one of the reference's two
      arrays is None.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; cDPO is Mitchell 2023, "A
    note on DPO with noisy preferences & relationship to IPO"; robust DPO is
    Chowdhury et al. 2024, arXiv:2403.00409, its rDPO loss; IPO is Azar et al. 2023,
    arXiv:2310.12036, eq. 17, its mean over tokens Rasul et al. 2024, "Preference tuning
    LLMs with direct preference optimization methods"; the hinge is Zhao et al. 2023,
    arXiv:2305.10425, eq. 1, on ratios as Liu et al. 2023, arXiv:2309.06657, eq. 7.

    >>> arrays = {"chosen_logprobs": jnp.array([-4.0, -6.0])}
    >>> arrays |= {"rejected_logprobs": jnp.array([-7.0, -5.0])}
    >>> arrays |= {"ref_chosen_logprobs": jnp.array([-5.0, -6.0])}
    >>> arrays |= {"ref_rejected_logprobs": jnp.array([-6.0, -5.0])}  # h is 2 and 0
    >>> loss, stats = dpo_loss(**arrays, beta=0.5)
    >>> print(loss)  # (log(1 + 1/e) + log 2) / 2
    0.503
    >>> print(masked.mean_stats(stats)["dpo/margin"])
    0.5
    >>> print(dpo_loss(**arrays, beta=0.5, kind="ipo")[0])  # (1² + 1²) / 2
    1.0
    >>> print(dpo_loss(**arrays, beta=0.5, kind="robust", label_smoothing=0.25)[0])
    0.253
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
    floats = {
        "chosen_logprobs": chosen_logprobs,
        "rejected_logprobs": rejected_logprobs,
    }
    if ref_chosen_logprobs is not None and ref_rejected_logprobs is not None:
        floats["ref_chosen_logprobs"] = ref_chosen_logprobs
        floats["ref_rejected_logprobs"] = ref_rejected_logprobs
    if jnp.ndim(label_smoothing):
        floats["label_smoothing"] = jnp.asarray(label_smoothing)
    if mask is None:
        mask = jnp.ones(chosen_logprobs.shape, jnp.bool_)
    checks.masked_floats(mask, **floats)
    # A row without a pair may hold NaN; 0 keeps every branch finite.
    floats = {name: jnp.where(mask, array, 0.0) for name, array in floats.items()}
    chosen, rejected = floats["chosen_logprobs"], floats["rejected_logprobs"]
    smoothing = floats.get("label_smoothing", label_smoothing)
    chosen_ratio, rejected_ratio = chosen, rejected
    if "ref_chosen_logprobs" in floats:
        chosen_ratio -= jax.lax.stop_gradient(floats["ref_chosen_logprobs"])
        rejected_ratio -= jax.lax.stop_gradient(floats["ref_rejected_logprobs"])
    lead = chosen_ratio - rejected_ratio
    match kind:
        case "sigmoid":
            # log σ(-x) = log σ(x) - x: exactly log 2 at 0, whatever the smoothing.
            margin = beta * lead
            losses = jax.lax.stop_gradient(smoothing) * margin
            losses -= jax.nn.log_sigmoid(margin)
        case "robust":
            margin = beta * lead
            losses = -jax.nn.log_sigmoid(margin)
            losses -= (
                jax.lax.stop_gradient(smoothing / (1.0 - 2.0 * smoothing)) * margin
            )
        case "ipo":
            # A regression to a finite lead: unlike -log σ it has a minimum for a single
            # pair.
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
    return per_pair(losses, mask=mask, num_pairs=num_pairs), stats


def check_dpo(
    *,
    beta: checks.Scalar,
    kind: DPOKind,
    label_smoothing: checks.Scalar | Float32[Array, " B"] = 0.0,
    reference_free: bool = False,
) -> None:
    """Checks the options of `dpo_loss`; arrays are not checked.

    Raises:
      InputError: beta is not positive, kind is unknown, label_smoothing is not in
        [0, 0.5), not read, or missing for robust, or IPO has no reference.

    >>> print(check_dpo(beta=0.1, kind="sigmoid", label_smoothing=0.1))
    None
    >>> check_dpo(beta=-1.0, kind="sigmoid")
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: beta: expected a finite number above
        0, got -1.0; choose beta > 0
    """
    checks.positive(beta=beta)
    checks.one_of(kind=kind, among=get_args(DPOKind))
    soft = jnp.ndim(label_smoothing) > 0
    checks.within(
        least=0,
        below=0.5,
        advice="choose another: from 0.5 on the rejected response would be better",
        label_smoothing=None if soft else label_smoothing,
    )
    number = checks.number(label_smoothing)
    got = number if number is not None else "one for each pair" if soft else "an array"
    faults: list[str] = []
    if kind == "robust" and (soft or (number is not None and number <= 0)):
        faults.append(
            f"label_smoothing: expected a number above 0 with kind 'robust', the rate "
            f"at which labels are flipped, got {got}; give it, or choose sigmoid"
        )
    if kind in ("ipo", "hinge") and number != 0:
        faults.append(
            f"label_smoothing: expected 0 with kind {kind!r}, which does not read it, "
            f"got {got}; leave it out, or choose sigmoid"
        )
    if kind == "ipo" and reference_free:
        faults.append(
            "kind: expected sigmoid, robust or hinge without a reference, got 'ipo', "
            "whose target is one lead over the reference for all pairs: without it, "
            "the lead would depend on the lengths of responses; choose another kind, "
            "or give the reference"
        )
    refuse(faults)
