"""The gradient of every public function, against finite differences."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import one_in

from rlhf_jax import functional
from rlhf_jax.functional import (
    advantages,
    aggregation,
    best_of_n,
    kl,
    logprob_chunks,
    logprobs,
    losses,
    masked,
    policy_losses,
    preference_losses,
    surrogates,
    token_rewards,
    unused_ids,
)
from rlhf_jax.functional.kl import chunks, mixtures, passes, penalty
from rlhf_jax.functional.kl.choices import Penalty

ROWS, COLUMNS, WIDTH, VOCAB = 4, 5, 6, 11
MASK = jnp.asarray(np.arange(COLUMNS)[None, :] < np.array([[5], [3], [1], [4]]))
TOKENS = jnp.asarray(
    np.random.default_rng(5).integers(0, VOCAB, (ROWS, COLUMNS)), jnp.int32
)
PER_TOKEN, PER_ROW = (ROWS, COLUMNS), (ROWS,)
LOGITS, HIDDEN = (ROWS, COLUMNS, VOCAB), (ROWS, COLUMNS, WIDTH)
HEAD, FLAT = (VOCAB, WIDTH), (ROWS, WIDTH)
APART = 2.0 * jnp.arange(VOCAB)  # so that small steps change no token of a top k
OTHERS = jnp.cos(jnp.arange(220.0)).reshape(LOGITS)  # of a reference
FEW = 64  # logits at a time: chunks that overlap

PLAN = logprob_chunks.plan(vocab_size=10, rows=VOCAB, positions=ROWS, max_logits=8)
CAPPED = PLAN._replace(softcap=1.5)
EXACT = passes.Plan(vocab_size=10, chunk=4, forward=False, k=None)


def warm(x):
    """A positive temperature."""
    return jnp.exp(x / 4)


def probabilities(x):
    return jax.nn.softmax(x)


# Functions of floats alone, with the shapes that they take. Options that stop a
# gradient on purpose (importance weights, values in the reward) are left out: there the
# slope is not that of the value.
CASES = {
    "advantages.gae": (
        lambda r, v: advantages.gae(rewards=r, values=v, mask=MASK, gamma=0.9, lam=0.8),
        (PER_TOKEN, PER_TOKEN),
    ),
    "advantages.group_relative": (
        lambda s: advantages.group_relative(s, group_size=2, normalise=False),
        (PER_ROW,),
    ),
    "advantages.over_greedy": (
        lambda s: advantages.over_greedy(s, group_size=2),
        (PER_ROW,),
    ),
    "advantages.length_weighted": (
        lambda s: advantages.length_weighted(
            s, lengths=jnp.arange(1.0, 1.0 + PER_ROW[0]), group_size=2
        ),
        (PER_ROW,),
    ),
    "advantages.decoupled": (
        lambda r: advantages.decoupled(
            r, weights=jnp.array([1.0, 0.5, -0.3, 2.0]), group_size=5
        ),
        (PER_TOKEN,),
    ),
    "advantages.leave_one_out": (
        lambda s: advantages.leave_one_out(s, group_size=2),
        (PER_ROW,),
    ),
    "aggregation.aggregate": (
        lambda x: aggregation.aggregate(
            "loss",
            x,
            MASK,
            aggregation="sequence_mean",
            loss_scale_factor=None,
            num_tokens=None,
            num_responses=None,
        )[0],
        (PER_TOKEN,),
    ),
    "best_of_n.log_ratio": (
        lambda x: best_of_n.log_ratio(
            below=jax.nn.sigmoid(x), equal=0.1 * jax.nn.sigmoid(2 * x), n=3
        ),
        (PER_ROW,),
    ),
    "best_of_n.exact_kl": (
        lambda x: best_of_n.exact_kl(
            probabilities(x), scores=jnp.array([0.0, 1.0, 1.0, 2.0]), n=3
        ),
        (PER_ROW,),
    ),
    "best_of_n.expected_best": (
        lambda s: best_of_n.expected_best(s, n=2),
        (PER_ROW,),
    ),
    "best_of_n.finite_or_lowest": (best_of_n.finite_or_lowest, (PER_ROW,)),
    "kl.chunks.divergence": (
        lambda h, w, t: chunks.divergence(
            h,
            w,
            0.5 * jnp.ones(HIDDEN),
            jnp.ones(HEAD),
            temperature=warm(t),
            plan=EXACT,
        ),
        (HIDDEN, HEAD, ()),
    ),
    **{
        f"kl.estimators.{name}": (
            lambda x, f=f: f(x, jnp.cos(jnp.arange(20.0)).reshape(PER_TOKEN)),
            (PER_TOKEN,),
        )
        for name, f in {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}.items()
    },
    "kl.estimators.exact": (
        lambda x, t: kl.exact(x, OTHERS, temperature=warm(t), direction="forward"),
        (LOGITS, ()),
    ),
    "kl.estimators.top_k": (
        lambda x, t: kl.top_k(APART[None, None] + x, OTHERS, k=3, temperature=warm(t)),
        (LOGITS, ()),
    ),
    **{
        f"kl.hidden_states.{name} {direction}{' capped' * (cap is not None)}": (
            lambda h, w, t, f=f, direction=direction, cap=cap: f(
                h,
                w,
                jnp.cos(jnp.arange(120.0)).reshape(HIDDEN),
                jnp.sin(jnp.arange(66.0)).reshape(HEAD),
                temperature=warm(t),
                vocab_size=10,
                direction=direction,
                softcap=cap,
                max_logits=FEW,
            ),
            (HIDDEN, HEAD, ()),
        )
        for name, f in {
            "exact_from_hidden": kl.exact_from_hidden,
            "exact_from_hidden top_k": lambda *a, **k: kl.exact_from_hidden(
                *a, k=3, **k
            ),
        }.items()
        for direction, cap in (("reverse", None), ("forward", 1.5))
    },
    **{
        f"kl.hidden_states.jensen_shannon_from_hidden{' bucket' * (k is not None)}": (
            lambda h, w, t, b, k=k: kl.jensen_shannon_from_hidden(
                h,
                w,
                jnp.cos(jnp.arange(120.0)).reshape(HIDDEN),
                jnp.sin(jnp.arange(66.0)).reshape(HEAD),
                beta=jax.nn.sigmoid(b),
                k=k,
                temperature=warm(t),
                vocab_size=10,
                softcap=1.5,
                max_logits=FEW,
            ),
            (HIDDEN, HEAD, (), ()),
        )
        for k in (None, 3)
    },
    "kl.mixtures.jensen_shannon": (
        lambda x, t, b: kl.jensen_shannon(
            x, OTHERS, beta=jax.nn.sigmoid(b), temperature=warm(t)
        ),
        (LOGITS, (), ()),
    ),
    "kl.mixtures.mixture_log_ratios": (
        lambda x: mixtures.mixture_log_ratios(x, beta=0.3),
        (LOGITS,),
    ),
    "kl.penalty.kl_loss": (
        lambda x: penalty.kl_loss(
            penalty=Penalty(value_estimator="k3", placement="loss"),
            logprobs=x,
            old_logprobs=jnp.zeros(PER_TOKEN),
            ref_logprobs=0.3 * jnp.ones(PER_TOKEN),
            mask=MASK,
            weights=MASK / 13.0,
        )[0],
        (PER_TOKEN,),
    ),
    "logprob_chunks.logprobs_and_entropy": (
        lambda h, w, t: logprob_chunks.logprobs_and_entropy(
            h, w, TOKENS[:, 0] % 10, temperature=2 + t, plan=PLAN
        ),
        (FLAT, HEAD, ()),
    ),
    "logprob_chunks.logprobs_and_entropy capped": (
        lambda h, w, t: logprob_chunks.logprobs_and_entropy(
            h, w, TOKENS[:, 0] % 10, temperature=2 + t, plan=CAPPED
        ),
        (FLAT, HEAD, ()),
    ),
    "logprobs.token_logprobs": (
        lambda x: logprobs.token_logprobs(x, TOKENS, temperature=0.7),
        (LOGITS,),
    ),
    "logprobs.log_softmax": (
        lambda x: logprobs.log_softmax(x, temperature=0.7),
        (LOGITS,),
    ),
    "logprobs.entropy": (lambda x: logprobs.entropy(x, temperature=0.7), (LOGITS,)),
    "logprobs.token_logprobs_from_hidden": (
        lambda h, w: logprobs.token_logprobs_from_hidden(
            h, w, TOKENS, temperature=0.7, max_logits=FEW
        ),
        (HIDDEN, HEAD),
    ),
    "losses.policy_loss": (
        lambda x: losses.policy_loss(
            logprobs=0.02 * x,
            old_logprobs=jnp.zeros(PER_TOKEN),
            advantages=jnp.cos(jnp.arange(20.0)).reshape(PER_TOKEN),
            mask=MASK,
            clip_range=0.2,
        )[0],
        (PER_TOKEN,),
    ),
    "losses.entropy_bonus": (
        lambda x: losses.entropy_bonus(entropy=x, mask=MASK)[0],
        (PER_TOKEN,),
    ),
    "losses.language_model_loss": (
        lambda x: losses.language_model_loss(logprobs=x, mask=MASK)[0],
        (PER_TOKEN,),
    ),
    "unused_ids.masked": (
        lambda x: jnp.where(
            jnp.arange(x.shape[-1]) == 1, 0.0, unused_ids.masked(x, ((1, 2),))
        ),
        (PER_TOKEN,),
    ),
    "masked.masked_sum": (lambda x: masked.masked_sum(x, mask=MASK), (PER_TOKEN,)),
    "masked.masked_mean": (lambda x: masked.masked_mean(x, mask=MASK), (PER_TOKEN,)),
    "masked.masked_var": (lambda x: masked.masked_var(x, mask=MASK), (PER_TOKEN,)),
    "masked.masked_whiten": (
        lambda x: masked.masked_whiten(x, mask=MASK),
        (PER_TOKEN,),
    ),
    "preference_losses.bradley_terry.pairwise_loss": (
        lambda c, r: preference_losses.pairwise_loss(chosen=c, rejected=r)[0],
        (PER_ROW, PER_ROW),
    ),
    "preference_losses.bradley_terry.per_pair": (
        lambda x: preference_losses.per_pair(x, mask=jnp.ones(PER_ROW, bool)),
        (PER_ROW,),
    ),
    "preference_losses.dpo.dpo_loss": (
        lambda c, r: preference_losses.dpo_loss(
            chosen_logprobs=c,
            rejected_logprobs=r,
            ref_chosen_logprobs=jnp.zeros(PER_ROW),
            ref_rejected_logprobs=jnp.ones(PER_ROW),
            beta=0.3,
        )[0],
        (PER_ROW, PER_ROW),
    ),
    "preference_losses.kto.kto_loss": (
        lambda x: preference_losses.kto_loss(
            logprobs=x,
            ref_logprobs=jnp.ones(PER_ROW),
            desirable=jnp.arange(PER_ROW[0]) % 2 == 0,
            kl=jnp.float32(0.1),
            beta=0.3,
        )[0],
        (PER_ROW,),
    ),
    "preference_losses.reference_free.orpo_loss": (
        lambda c, r: preference_losses.orpo_loss(
            chosen_logprobs=-0.1 - jnp.square(c),
            rejected_logprobs=-0.1 - jnp.square(r),
            odds_weight=0.4,
        )[0],
        (PER_ROW, PER_ROW),
    ),
    "preference_losses.reference_free.simpo_loss": (
        lambda c, r: preference_losses.simpo_loss(
            chosen_logprobs=c, rejected_logprobs=r, beta=0.5, target_margin=0.2
        )[0],
        (PER_ROW, PER_ROW),
    ),
    "policy_losses.geometric_mean.gmpo_loss": (
        lambda x: policy_losses.gmpo_loss(
            logprobs=0.1 * x,
            old_logprobs=jnp.zeros(PER_TOKEN),
            advantages=jnp.cos(jnp.arange(20.0)).reshape(PER_TOKEN),
            mask=MASK,
            clip_range=5.0,
            clip_range_high=5.0,
        )[0],
        (PER_TOKEN,),
    ),
    "policy_losses.token_choice.kl_cov_loss": (
        lambda x: policy_losses.kl_cov_loss(
            logprobs=x, old_logprobs=jnp.full(PER_TOKEN, 9.0), chosen=MASK, mask=MASK
        )[0],
        (PER_TOKEN,),
    ),
    "surrogates.masked_inputs": (
        lambda x: surrogates.masked_inputs(x, jnp.zeros(PER_TOKEN), x, MASK)[0],
        (PER_TOKEN,),
    ),
    "surrogates.capped_exp": (surrogates.capped_exp, (PER_TOKEN,)),
    "surrogates.at_level": (
        lambda x: surrogates.at_level(x, mask=MASK, ratio_level="sequence"),
        (PER_TOKEN,),
    ),
    "surrogates.sapo_loss": (
        lambda x: surrogates.sapo_loss(
            logprobs=0.1 * x,
            old_logprobs=jnp.zeros(PER_TOKEN),
            advantages=jnp.cos(jnp.arange(20.0)).reshape(PER_TOKEN),
            mask=MASK,
            temperature=1.0,
            negative_temperature=1.05,
        )[0],
        (PER_TOKEN,),
    ),
    "token_rewards.token_rewards": (
        lambda s, x: token_rewards.token_rewards(
            scores=s, kl=x, mask=MASK, kl_coef=0.2
        ),
        (PER_ROW, PER_TOKEN),
    ),
    "losses.value_loss": (
        lambda v: losses.value_loss(
            values=v,
            old_values=jnp.zeros(PER_TOKEN),
            returns=2 * jnp.ones(PER_TOKEN),
            mask=MASK,
            clip_range=None,
        )[0],
        (PER_TOKEN,),
    ),
}
WITHOUT_A_SLOPE = {
    "advantages.equal_groups": "bool",
    "aggregation.prompt_scale": "reads a mask",
    "aggregation.token_weights": "reads a mask",
    "best_of_n.estimated_log_ratio": "counts scores",
    "best_of_n.selection_weights": "counts scores",
    "kl.chunks.head_and_inside": "stops the gradient of its log-ratios",
    "kl.controllers.scalar": "a number",
    "kl.hidden_states.head_from_hidden": "stops the gradient of its log-ratios",
    "kl.penalty.reward_kl": "stops the gradient",
    "kl.penalty.weighted_estimates": "stops the gradient of values",
    "kl.penalty.with_sampled_tail": "stops the gradient of its log-ratio",
    "masked.centred": "a number that has no gradient, and what is left",
    "masked.last_true": "bool",
    "masked.lengths_to_mask": "bool",
    "unused_ids.contain": "bool",
    "off_policy.importance.importance_weights": "stops the gradient",
    "off_policy.mismatch.sampler_kl": "statistics",
    "off_policy.mismatch.weight_stats": "statistics",
    "policy_losses.advantage_regression.dar_loss": "stops the gradient of its weight",
    "policy_losses.divergence_masks.dppo_loss": "stops the gradient of its weight",
    "policy_losses.response_weights.topr_loss": "stops the gradient of its weight",
    "policy_losses.score_centring.centred_loss": "stops the gradient of its weight",
    "policy_losses.response_weights.vespo_loss": "stops the gradient of its weight",
    "entropy_control.controlled": "stops the gradient",
    "policy_losses.sequence_mask.off_policy_mask": "bool",
    "policy_losses.token_choice.covariances": "stops the gradient",
    "policy_losses.token_choice.top_share": "bool",
    "surrogates.cispo_loss": "stops the gradient of its weight",
    "surrogates.ratio_stats": "statistics",
    "masked.sum_stats": "a dictionary of masked sums",
    "preference_losses.dpo.check_dpo": "checks",
    "preference_losses.kto.kto_kl": "stops the gradient",
    "token_rewards.kl_reward": "of a kl that has no gradient",
    "losses.explained_variance": "a statistic",
}


def direction(shapes, seed):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def flat(tree):
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def inner(left, right):
    return float(flat(left) @ flat(right))


STEP = 5e-3
STENCIL = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}  # of fourth order


# Each has a case beside it, capped or not, that is not slow; or its slope is quick.
TWICE = (
    "kl.hidden_states.jensen_shannon_from_hidden",
    "kl.hidden_states.jensen_shannon_from_hidden bucket",
    "kl.hidden_states.exact_from_hidden top_k forward capped",
    "logprob_chunks.logprobs_and_entropy",
)


@pytest.mark.cases(quick=3, slow=8)
@pytest.mark.parametrize(
    "name",
    one_in(2, [name for name in CASES if name not in TWICE])
    + [pytest.param(name, marks=pytest.mark.slow) for name in TWICE],
)
def test_gradients_are_finite_differences(name):
    function, shapes = CASES[name]
    x = direction(shapes, seed=1)
    v = tuple(0.3 * array for array in direction(shapes, seed=2))
    rng = np.random.default_rng(3)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        jax.eval_shape(function, *x),
    )

    @jax.jit
    def evaluate(x, v, weights):
        line = jnp.asarray([STEP * offset for offset in STENCIL], jnp.float32)
        points = jax.lax.map(
            lambda t: function(*(a + t * b for a, b in zip(x, v, strict=True))), line
        )
        _, pull = jax.vjp(function, *x)
        return points, pull(weights)

    points, pulled = evaluate(x, v, weights)
    slope = jax.tree.map(
        lambda leaf: np.einsum(
            "p,p...->...", [offset / STEP for offset in STENCIL.values()], leaf
        ),
        points,
    )
    # Rounding of every slope, as it counts in their sum.
    error = 2e-3 * np.linalg.norm(flat(weights))
    assert inner(pulled, v) == pytest.approx(inner(weights, slope), rel=2e-3, abs=error)


def public_functions():
    for module in pkgutil.walk_packages(functional.__path__, "rlhf_jax.functional."):
        loaded = importlib.import_module(module.name)
        short = module.name.removeprefix("rlhf_jax.functional.")
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            if name.startswith("_") or function.__module__ != module.name:
                continue
            signature = inspect.signature(function)
            kinds = [str(p.annotation) for p in signature.parameters.values()]
            if short not in ("checks", "kl.passes") and any(
                "Array" in kind for kind in kinds
            ):
                yield f"{short}.{name}"


def test_every_public_function_of_arrays_is_a_case():
    cases = {name.split(" ")[0] for name in CASES}
    missing = set(public_functions()) - cases - set(WITHOUT_A_SLOPE)
    assert not missing, f"add a case, or say why it has no slope: {sorted(missing)}"
    assert cases | set(WITHOUT_A_SLOPE) <= set(public_functions())


def both(hidden, head, temperature):
    output = logprob_chunks.logprobs_and_entropy(
        hidden, head, TOKENS[:, 0] % 10, temperature=2 + temperature, plan=PLAN
    )
    return output[0] + 0.3 * output[1]


def divergence(hidden, head, temperature):
    return CASES["kl.hidden_states.exact_from_hidden reverse"][0](
        hidden[:, None] * jnp.ones((1, COLUMNS, 1)), head, temperature
    ).sum(1)


custom = pytest.mark.parametrize("function", one_in(2, [divergence, both]))


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@custom
def test_it_composes_with_vmap_scan_and_rematerialisation(function):
    x = direction((FLAT, HEAD, ()), 1)
    ways = {
        "remat": jax.checkpoint(function),
        "scan": lambda *x: jax.lax.scan(lambda c, _: (c, function(*x)), 0, None, 1)[1][
            0
        ],
        "vmap": lambda h, *x: jax.vmap(function, (0, None, None))(h[None], *x)[0],
    }

    @jax.jit
    def evaluate(x):
        return [
            jax.grad(lambda *x, way=way: way(*x).sum(), (0, 1, 2))(*x)
            for way in ways.values()
        ], jax.jacrev(function)(*x)

    expected = jax.grad(lambda *x: function(*x).sum(), (0, 1, 2))(*x)
    gradients, rows = evaluate(x)
    for gradient in gradients:
        np.testing.assert_allclose(flat(gradient), flat(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows.sum(axis=0), expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@custom
def test_products_with_the_hessian(function):
    """Forward or reverse mode over a gradient; forward mode itself has no gradient."""
    x, v = direction((FLAT, HEAD, ()), 1), direction((FLAT, HEAD, ()), 2)

    def loss(*x):
        return function(*x).sum()

    def gradient(*x):
        return jax.grad(loss, (0, 1, 2))(*x)

    @jax.jit
    def evaluate(x, v):
        line = jnp.asarray([STEP * offset for offset in STENCIL], jnp.float32)
        points = jax.lax.map(
            lambda t: gradient(*(a + t * b for a, b in zip(x, v, strict=True))), line
        )
        return points, [
            jax.jvp(gradient, x, v)[1],
            jax.vjp(gradient, *x)[1](v),
        ]

    points, products = evaluate(x, v)
    slope = jax.tree.map(
        lambda leaf: np.einsum(
            "p,p...->...", [offset / STEP for offset in STENCIL.values()], leaf
        ),
        points,
    )
    for product in products:
        np.testing.assert_allclose(flat(product), flat(slope), rtol=5e-3, atol=5e-3)


@custom
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_gradients_lower_for_every_platform(function, platform):
    x = direction((FLAT, HEAD, ()), 1)
    gradient = jax.jit(jax.grad(lambda *x: function(*x).sum(), (0, 1)))
    lowered = gradient.trace(*x).lower(lowering_platforms=(platform,))
    assert "stablehlo.dot_general" in lowered.as_text()


def test_the_work_of_an_output_that_no_loss_reads_is_left_out():
    x = direction((FLAT, HEAD, ()), 1)

    def products(reads):
        def loss(hidden, head, temperature):
            return sum(
                output.sum()
                for output in reads(
                    logprob_chunks.logprobs_and_entropy(
                        hidden, head, TOKENS[:, 0], temperature=2.0, plan=PLAN
                    )
                )
            )

        return str(jax.make_jaxpr(jax.grad(loss))(*x)).count("= mul ")

    assert products(lambda outputs: outputs[:1]) < products(lambda outputs: outputs)


def test_the_slope_of_a_temperature_is_computed_only_where_it_is_read():
    x = direction((FLAT, HEAD, ()), 1)

    def sums(arguments):
        gradient = jax.grad(lambda *x: divergence(*x).sum(), arguments)
        return str(jax.make_jaxpr(gradient)(*x)).count("= reduce_sum")

    assert sums((0, 1)) < sums((0, 1, 2))


@pytest.mark.slow
def test_within_shard_map_and_on_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    x = direction((FLAT, HEAD), 1)

    def rows(hidden, head, tokens):
        return logprob_chunks.logprobs_and_entropy(
            hidden, head, tokens, temperature=2.0, plan=PLAN
        )[0]

    tokens = TOKENS[:, 0] % 10
    split = jax.shard_map(
        rows,
        mesh=mesh,
        in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    gradient = jax.jit(jax.grad(lambda h, w: split(h, w, tokens).sum(), (0, 1)))
    whole = jax.grad(lambda h, w: rows(h, w, tokens).sum(), (0, 1))(*x)
    np.testing.assert_allclose(flat(gradient(*x)), flat(whole), atol=1e-5)
