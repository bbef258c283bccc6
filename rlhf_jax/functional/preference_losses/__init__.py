"""Losses over preferences: pairs of responses, or single responses with a label.

A loss is a sum over pairs (or texts) divided by their number. With the number of the
whole minibatch (`num_pairs`, `num_texts`), the losses of its micro-batches add up to
its loss; None counts `mask`. `mask` is True at pairs (or texts) and False at padding;
None is no padding. `losses` offers these functions too.
"""

from rlhf_jax.functional.preference_losses.bradley_terry import pairwise_loss, per_pair
from rlhf_jax.functional.preference_losses.dpo import DPOKind, check_dpo, dpo_loss
from rlhf_jax.functional.preference_losses.kto import kto_kl, kto_loss
from rlhf_jax.functional.preference_losses.reference_free import orpo_loss, simpo_loss

__all__ = [
    "DPOKind",
    "check_dpo",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "pairwise_loss",
    "per_pair",
    "simpo_loss",
]
