"""Published recipes of policy gradients over groups.

Presets of `rlhf-jax grpo` add the options of a run: β, learning rate, batch, length.
"""

from __future__ import annotations

import dataclasses

from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.grpo.recipe import GroupRecipe
from rlhf_jax.algorithms.policy_gradient import options, recipe
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty

DEEPSEEK_MATH = GroupRecipe(
    penalty=Penalty(value_estimator="k3", placement="loss"),
    temperature=1.0,
    group_size=64,
    baseline="group",
    normalise="group",
    aggregation="sequence_mean",
)
"""GRPO as in DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), with
`kl.control.fixed(0.04)`: k3 in the loss, whose gradient is that of the *forward* KL.
The std, and the mean over each response's own length, bias the direction."""

RLOO = GroupRecipe(
    penalty=IN_REWARD,
    group_size=4,
    baseline="leave_one_out",
    normalise=None,
)
"""Ahmadian et al. 2024, arXiv:2402.14740: KL in the reward, the mean of the others as
baseline. Unbiased with aggregation "constant", or responses of one length."""

RLOO_MASKED = GroupRecipe(
    penalty=IN_REWARD,
    temperature=1.0,
    group_size=4,
    baseline="leave_one_out",
    normalise=None,
    overlong_mask="group",
)
"""RLOO as used in production: a response cut off at the largest length is neither
trained on nor in the baseline of the others. The expected gradient is that of the
objective among responses that end."""

GSPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="group",
    aggregation="sequence_mean",
    surrogate=recipe.Clip(
        ratio_level="sequence", clip_range=3e-4, clip_range_high=4e-4
    ),
    num_minibatches=4,
)
"""Zheng et al. 2025, arXiv:2507.18071, section 5.1: the ratio of a whole response, to
the power of 1/length, and no KL. Groups are as large as in verl's example."""

CISPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="group",
    surrogate=recipe.CISPO(clip_range=1.0, clip_range_high=4.0),
    num_minibatches=16,
)
"""MiniMax-M1 (2025), arXiv:2506.13585: the ratio as a bounded weight of log-probs, with
no lower bound, and no KL. The upper bound, which that paper does not give, is the 5 of
ScaleRL (Khatri et al. 2025, arXiv:2510.13786)."""

SAPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="group",
    aggregation="sequence_mean",
    surrogate=recipe.SAPO(),
    num_minibatches=4,
)
"""Gao et al. 2025, arXiv:2511.20347: a soft gate in place of the clip, of temperature 1
above and 1.05 below, and no KL. Groups are as large as in verl's example."""

DAPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="group",
    surrogate=recipe.Clip(clip_range=0.2, clip_range_high=0.28),
    equal_groups="leave_out",
    overlong_mask="loss",
    scores=ScoreShaping(
        overlong_penalty=1.0, overlong_after=16_384, overlong_buffer=4096
    ),
    num_minibatches=16,
)
"""Yu et al. 2025, arXiv:2503.14476, section 4.1: clip-higher, the mean over tokens,
groups of equal rewards left out (`rlhf-jax grpo` draws them again), unfinished
responses left out of the loss, a soft overlong penalty, and no KL."""

TOP_ENTROPY = dataclasses.replace(DAPO, token_choice=options.TopEntropy(0.2))
"""Wang et al. 2025, arXiv:2506.01939: DAPO, trained on the fifth of the tokens with the
largest entropies."""

CLIP_COV = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise="group",
    surrogate=recipe.Clip(clip_range=1.0),
    token_choice=options.ClipCov(),
    num_minibatches=8,
)
"""Cui et al. 2025, arXiv:2505.22617, the numbers of the authors' scripts: ratios up
to 2, and no KL. Groups and minibatches are ours."""

KL_COV = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise="group",
    surrogate=recipe.Clip(clip_range=1.0, clip_range_high=1e6),
    token_choice=options.KLCov(),
    num_minibatches=8,
)
"""Cui et al. 2025, as above, with the share for a model of 7B (2e-4 for 32B): no clip,
and no other KL. Groups and minibatches are ours."""

REMAX = GroupRecipe(
    penalty=IN_REWARD,
    temperature=1.0,
    group_size=2,
    baseline="greedy",
    normalise=None,
    aggregation="constant",
)
"""Li et al. 2023, arXiv:2310.10505: one sample, and a greedy response whose reward is
the baseline. Unbiased."""

SKYWORK_OR1 = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="group",
    equal_groups="leave_out",
    entropy_control=options.EntropyTarget(0.2),
)
"""He et al. 2025, arXiv:2505.22312: GRPO with the mean over tokens, groups of equal
rewards left out, an entropy bonus where the entropy is at most 0.2 nats per token, and
no KL. Groups are ours."""

GDPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise="each",
    aggregation="sequence_mean",
)
"""Liu et al. 2026, arXiv:2601.05242: each of several rewards divided by the deviation
of its group, and their sum by that of the batch. Groups are ours."""

DR_GRPO = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise=None,
    aggregation="constant",
    num_minibatches=8,
)
"""Liu et al. 2025, arXiv:2503.20783, section 3.2: GRPO without the std, sums over
responses divided by max_new_tokens, and no KL."""

REINFORCE_BASELINE = GroupRecipe(
    penalty=Penalty(value_estimator="k2", placement="loss"),
    temperature=1.0,
    group_size=8,
    normalise="rollout",
)
"""REINFORCE++-baseline (Hu et al. 2025, arXiv:2501.03262): the mean of the group is
subtracted, the deviation is that of all tokens of the batch, and k2 is in the loss."""

LUSPO = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise="group",
    aggregation="constant",
    loss_scale_factor=1.0,
    surrogate=recipe.Clip(
        ratio_level="sequence", clip_range=2e-3, clip_range_high=2.5e-3
    ),
    num_minibatches=4,
)
"""Liu et al. 2026, arXiv:2602.05261, section 5.1: GSPO with the loss of each response
summed over its tokens, and no KL. The group size is ours."""

GMPO = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise="group",
    aggregation="sequence_mean",
    surrogate=options.GMPO(),
    num_minibatches=8,
)
"""Zhao et al. 2025, arXiv:2507.20673: the geometric mean of clipped ratios, and no KL.
Groups and minibatches are ours."""

DPPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise=None,
    aggregation="constant",
    surrogate=options.DPPO(),
    num_minibatches=8,
)
"""Qi et al. 2026, arXiv:2602.04879: masks tokens with a total variation above 0.15, as
in the authors' script for verl, and no KL. Groups and minibatches are ours."""

VESPO = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise=None,
    surrogate=options.VESPO(),
    num_minibatches=8,
)
"""Shen et al. 2026, arXiv:2602.10693, sections 3.5 and 4.1: a soft weight by the ratio
of the whole response, eight minibatches, the group's mean, and no KL. The group size is
ours."""

TOPR = GroupRecipe(
    temperature=1.0,
    group_size=16,
    normalise=None,
    aggregation="constant",
    surrogate=options.TOPR(),
)
"""Le Roux et al. 2025, arXiv:2503.14286: worse responses are weighted by their ratio up
to 1, and no KL. The paper's rewards are 1 and -1; the baseline here is the group's
mean."""

EMA_PG = GroupRecipe(
    penalty=Penalty(
        value_estimator="exact",
        placement="loss",
        top_k=32,
        tail="sampled",
        importance_weights="token",
    ),
    temperature=1.0,
    group_size=5,
    normalise="group",
    surrogate=recipe.Clip(clip_range=0.2, clip_range_high=0.28),
    num_minibatches=2,
)
"""Zhang and Ba 2026, arXiv:2602.04417, as in the authors' script for search: KL over
the top 32 tokens with a sampled tail, to a reference that is a moving average of the
policy."""

GRADIENT_PENALTY = GroupRecipe(
    temperature=1.0,
    group_size=8,
    normalise=None,
    aggregation="sequence_mean",
    gradient_penalty=options.GradientPenalty(strength=0.01),
)
"""Ackermann et al. 2026, arXiv:2602.18037, as in the authors' script for RLHF: gradient
regularisation of strength 0.01, and no KL."""

DAR = GroupRecipe(
    penalty=Penalty(placement=None),
    temperature=1.0,
    group_size=4,
    baseline="leave_one_out",
    normalise="rollout",
    aggregation="constant",
    loss_scale_factor=1.0,
    surrogate=options.DAR(),
)
"""He et al. 2026, arXiv:2602.11523: regression onto a mixture of the reference and the
policy that sampled, tilted by advantages that are normalised over the batch (here over
its tokens). Groups are ours."""

CENTRED = GroupRecipe(
    temperature=1.0,
    group_size=8,
    surrogate=options.Centred(top_k=128),
)
"""Marek and Ryabinin 2026, arXiv:2609.20807: score centring alone, advantages without a
deviation. Groups are ours; the 128 tokens are vime's."""

OPO = GroupRecipe(
    temperature=1.0,
    group_size=8,
    baseline="length_weighted",
    normalise=None,
    aggregation="constant",
)
"""Hao et al. 2025, arXiv:2505.23585: one update on a batch, a baseline weighted by the
lengths of responses, and no KL."""
