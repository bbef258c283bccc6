"""SimPO and ORPO: losses over pairs of responses without a reference.

They are here for comparison with DPO. Nothing in them measures how far the policy has
moved, so β is not the coefficient of any KL, and there is no target policy π*. Both
read the mean log-probability of a response's tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.preference_losses.bradley_terry import per_pair

Array = jax.Array
Stats = masked.Stats

SURE = -1e-6  # nats per token; the odds of a certain response are infinite


def simpo_loss(
    *,
    chosen_logprobs: Float32[Array, " B"],
    rejected_logprobs: Float32[Array, " B"],
    beta: checks.Scalar,
    target_margin: checks.Scalar = 0.0,
    num_pairs: Shaped[Array, ""] | None = None,
    mask: Bool[Array, " B"] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """SimPO, -(1/N) Σ log σ(β(c - r) - γ), without a reference.

        c, r   mean over the response's tokens of log π(token), chosen and rejected

    Args:
      chosen_logprobs, rejected_logprobs: f32[B], nats per token, means over the tokens
        of a response, EOS included.
      beta: β, reward units per nat per token: the scale of the reward. It is not a KL
        coefficient.
      target_margin: γ, reward units by which the chosen response should lead.

    Returns:
      f32[] loss and {name: (sum, weight)} with the names of `dpo_loss`; the rewards are
      β·c and β·r. The gradient reaches both arrays of log-probs, β and γ.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    >>> chosen, rejected = jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0])
    >>> pairs = {"chosen_logprobs": chosen, "rejected_logprobs": rejected}
    >>> loss, stats = simpo_loss(**pairs, beta=2.0, target_margin=1.0)
    >>> print(loss)  # (log(1 + 1/e) + log(1 + e)) / 2
    0.813
    >>> print(masked.mean_stats(stats)["dpo/margin"])
    1.0
    """
    checks.positive(beta=beta)
    checks.non_negative(target_margin=target_margin)
    chosen, rejected, mask = _checked(chosen_logprobs, rejected_logprobs, mask)
    losses = -jax.nn.log_sigmoid(beta * (chosen - rejected) - target_margin)
    stats = _stats(losses, beta * chosen, beta * rejected, chosen, rejected, mask)
    return per_pair(losses, mask=mask, num_pairs=num_pairs), stats


def orpo_loss(
    *,
    chosen_logprobs: Float32[Array, " B"],
    rejected_logprobs: Float32[Array, " B"],
    odds_weight: checks.Scalar,
    num_pairs: Shaped[Array, ""] | None = None,
    mask: Bool[Array, " B"] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """ORPO, (1/N) Σ [-c - λ log σ(log odds(c) - log odds(r))], without a reference.

        c, r      mean over the response's tokens of log π(token), chosen and rejected
        odds(c)   exp(c) / (1 - exp(c))

    The first term is the language-model loss of the chosen response, as in supervised
    fine-tuning. TRL instead takes the mean over all tokens of the batch, prompts
    included; its odds-ratio term is the same.

    Args:
      chosen_logprobs, rejected_logprobs: f32[B], nats per token, means over the tokens
        of a response, EOS included. In the odds they are capped at -1e-6, without
        gradient above.
      odds_weight: λ, weight of the odds-ratio term, dimensionless.

    Returns:
      f32[] loss and {name: (sum, weight)} with the names of `dpo_loss`; the rewards are
      the log-odds, nats. `dpo/nll`: the first term, nats per token. The gradient
      reaches both arrays of log-probs and λ.

    Source: Hong et al. 2024, arXiv:2403.07691, eqs. 3, 6 and 7.

    >>> even = jnp.log(jnp.array([0.5]))  # odds of 1
    >>> rare = jnp.log(jnp.array([0.25]))  # odds of 1/3
    >>> pairs = {"chosen_logprobs": even, "rejected_logprobs": rare}
    >>> loss, stats = orpo_loss(**pairs, odds_weight=1.0)
    >>> print(loss)  # log 2 + log(1 + 1/3)
    0.981
    >>> print(masked.mean_stats(stats)["dpo/margin"])  # log 3
    1.099
    """
    checks.positive(odds_weight=odds_weight)
    chosen, rejected, mask = _checked(chosen_logprobs, rejected_logprobs, mask)
    chosen_odds, rejected_odds = _log_odds(chosen), _log_odds(rejected)
    losses = -chosen - odds_weight * jax.nn.log_sigmoid(chosen_odds - rejected_odds)
    stats = _stats(losses, chosen_odds, rejected_odds, chosen, rejected, mask)
    stats |= masked.sum_stats({"dpo/nll": -chosen}, mask=mask)
    return per_pair(losses, mask=mask, num_pairs=num_pairs), stats


def _log_odds(logprobs: Array) -> Array:
    """log(p / (1 - p)), from log p."""
    # log(1 - p) of a certain response is -inf, with an infinite slope.
    logprobs = jnp.minimum(logprobs, SURE)
    return logprobs - jnp.log(-jnp.expm1(logprobs))


def _checked(
    chosen: Array, rejected: Array, mask: Array | None
) -> tuple[Array, Array, Array]:
    """Checks the arrays; returns them with -1 outside the mask, and the mask."""
    checks.shape((None,), chosen_logprobs=chosen)
    if mask is None:
        mask = jnp.ones(chosen.shape, jnp.bool_)
    checks.masked_floats(mask, chosen_logprobs=chosen, rejected_logprobs=rejected)
    return jnp.where(mask, chosen, -1.0), jnp.where(mask, rejected, -1.0), mask


def _stats(
    losses: Array,
    chosen_reward: Array,
    rejected_reward: Array,
    chosen: Array,
    rejected: Array,
    mask: Array,
) -> Stats:
    return masked.sum_stats(
        {
            "loss/dpo": losses,
            "dpo/chosen_reward": chosen_reward,
            "dpo/rejected_reward": rejected_reward,
            "dpo/margin": chosen_reward - rejected_reward,
            "dpo/accuracy": (chosen_reward > rejected_reward).astype(jnp.float32),
            "dpo/chosen_logprob": chosen,
            "dpo/rejected_logprob": rejected,
        },
        mask=mask,
    )
