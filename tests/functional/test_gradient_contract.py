"""For every public function: the arguments a gradient reaches, and traced options.

`CASES` is the contract of the package's docstring, with a row per array function.
"""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import functional
from rlhf_jax.functional import logprob_chunks, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import passes
from rlhf_jax.functional.kl.choices import IN_LOSS, UNBIASED_K3, Penalty
from rlhf_jax.functional.kl.penalty import kl_loss
from rlhf_jax.functional.off_policy.importance import Weights

ROWS, COLUMNS, WIDTH, VOCAB = 4, 5, 3, 6
RNG = np.random.default_rng(11)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def per(names, *shape):
    return {name: normal(*shape) for name in names.split()}


MASK = jnp.asarray(np.arange(COLUMNS)[None, :] < np.array([[5], [3], [2], [4]]))
HALF = jnp.asarray(RNG.uniform(0.1, 0.4, ROWS), jnp.float32)
ARRAYS = {
    **per("logprobs old_logprobs ref_logprobs sampler_logprobs", ROWS, COLUMNS),
    **per("values old_values returns rewards advantages", ROWS, COLUMNS),
    **per("entropy kl exact weights x ratio log_ratio log_weights", ROWS, COLUMNS),
    **per("turn_rewards", ROWS, COLUMNS),
    **per("scores chosen rejected margin losses among", ROWS),
    **per("chosen_logprobs rejected_logprobs", ROWS),
    **per("ref_chosen_logprobs ref_rejected_logprobs", ROWS),
    **per("logits ref_logits", ROWS, COLUMNS, VOCAB),
    **per("hidden ref_hidden", ROWS, COLUMNS, WIDTH),
    **per("head ref_head", VOCAB, WIDTH),
    "below": HALF,
    "equal": 0.5 * HALF,
    "probabilities": HALF,
    "mask": MASK,
    "score_mask": MASK,
    "row_mask": jnp.array([True, True, True, False]),
    "desirable": jnp.array([True, False, True, False]),
    "tokens": jnp.asarray(RNG.integers(0, VOCAB, (ROWS, COLUMNS)), jnp.int32),
    "lengths": jnp.arange(ROWS),
    "ids": jnp.arange(VOCAB),
}
SCALARS = {
    "temperature": 0.7,
    "negative_temperature": 1.05,
    "beta": 0.3,
    "kl_coef": 0.2,
    "clip_range": 0.2,
    "clip_range_high": 0.3,
    "dual_clip": 3.0,
    "eps": 0.1,
    "gamma": 0.9,
    "lam": 0.8,
    "cap": 2.0,
    "floor": 0.5,
    "threshold": 0.1,
    "threshold_high": 0.2,
    "power": 2.0,
    "decay": 3.0,
    "negative_power": 3.0,
    "negative_decay": 2.0,
    "target_margin": 0.2,
    "label_smoothing": 0.1,
    "odds_weight": 0.4,
    "loss_scale_factor": None,
    "desirable_weight": 1.1,
    "undesirable_weight": 0.9,
    "number": 2.0,
    "share": 0.5,
    "target": 0.4,
    "increment": 0.01,
    "largest": 1.0,
    "num_tokens": 20.0,
    "num_responses": None,
    "num_pairs": 9.0,
    "num_texts": 9.0,
}
ROW = {"mask": jnp.ones(ROWS, bool)}
CONSTANT = {"aggregation": "constant", "loss_scale_factor": 3.0}
CONSTANT |= {"num_tokens": None, "num_responses": 5.0}
FLAT = {"hidden": normal(ROWS, WIDTH), "tokens": jnp.arange(ROWS)}
PLAN = logprob_chunks.plan(vocab_size=VOCAB, rows=VOCAB, positions=ROWS, max_logits=8)
EXACT = passes.Plan(vocab_size=VOCAB, chunk=4, forward=False, k=None)
FEW = {"max_logits": 2 * ROWS * COLUMNS * 4}  # two chunks of the vocabulary
MODELS = "hidden head temperature"
HEAD_OF = {"tokens": jnp.ones((ROWS, COLUMNS), jnp.int32)}
TEXTS = {
    "logprobs": normal(ROWS),
    "ref_logprobs": normal(ROWS),
    "kl": jnp.float32(0.1),
    **ROW,
}
PAIRS = "chosen_logprobs rejected_logprobs"
BELOW_0 = {name: -jnp.exp(ARRAYS[name]) for name in PAIRS.split()}
WEIGHTS = Weights(jnp.exp(normal(ROWS, COLUMNS)), MASK, MASK)

# The arguments that a gradient reaches, and what is passed beside `ARRAYS`, `SCALARS`.
CASES = {
    "advantages.decoupled": (
        "rewards weights eps",
        {"rewards": normal(2, ROWS), "weights": jnp.array([1.0, 0.5])}
        | {"group_size": 4},
    ),
    "advantages.equal_groups": ("", {"group_size": 2}),
    "advantages.gae": ("rewards values gamma lam", {}),
    "advantages.group_relative": ("scores eps", {"group_size": 4}),
    "advantages.leave_one_out": ("scores", {"group_size": 4}),
    # The last row is the greedy one, without which there are no advantages.
    "advantages.over_greedy": (
        "scores",
        {"group_size": 4, "row_mask": jnp.array([True, False, True, True])},
    ),
    "advantages.length_weighted": (
        "scores",
        {"group_size": 4, "lengths": jnp.arange(1.0, 1.0 + ROWS)},
    ),
    "aggregation.aggregate": ("x", {"name": "loss", "aggregation": "token_mean"}),
    "aggregation.aggregate constant": ("x", {"name": "loss", **CONSTANT}),
    "aggregation.check_scale": ("", CONSTANT),
    "aggregation.prompt_scale": ("", {"group_size": 2}),
    "aggregation.token_weights": ("", {}),
    "aggregation.token_weights constant": ("", CONSTANT),
    "best_of_n.estimated_log_ratio": ("", {"n": 2}),
    "best_of_n.exact_kl": ("probabilities", {"n": 2}),
    "best_of_n.expected_best": ("scores", {"n": 2}),
    "best_of_n.finite_or_lowest": ("scores", {}),
    "best_of_n.log_ratio": ("below equal", {"n": 3}),
    "best_of_n.selection_weights": ("", {"n": 2}),
    "kl.chunks.divergence": (MODELS, {"plan": EXACT, "beta": None}),
    "kl.chunks.head_and_inside": (
        "hidden head",
        {"plan": EXACT._replace(k=2, head=True), **HEAD_OF},
    ),
    "kl.chunks.divergence mixture": (f"{MODELS} beta", {"plan": EXACT}),
    "kl.control.fixed": ("kl_coef", {}),
    "kl.controllers.scalar": ("number", {}),
    "kl.estimators.exact": ("logits temperature", {}),
    "kl.estimators.exact forward": ("logits temperature", {"direction": "forward"}),
    "kl.estimators.k1": ("logprobs", {}),
    "kl.estimators.k2": ("logprobs", {}),
    "kl.estimators.k3": ("logprobs", {}),
    "kl.estimators.top_k": ("logits temperature", {"k": 2}),
    "kl.estimators.top_k forward": (
        "logits temperature",
        {"k": 2, "direction": "forward"},
    ),
    "kl.hidden_states.exact_from_hidden": (MODELS, FEW),
    "kl.hidden_states.exact_from_hidden top_k": (MODELS, {"k": 2, **FEW}),
    "kl.hidden_states.head_from_hidden": ("hidden head", {"k": 2, **FEW, **HEAD_OF}),
    "kl.hidden_states.jensen_shannon_from_hidden": (f"{MODELS} beta", FEW),
    "kl.mixtures.jensen_shannon": ("logits beta temperature", {}),
    "kl.mixtures.mixture_log_ratios": ("log_ratio beta", {}),
    "kl.penalty.kl_loss": ("logprobs", {"penalty": UNBIASED_K3}),
    "kl.penalty.kl_loss exact": (
        "exact",
        {"penalty": Penalty("exact", placement="loss")},
    ),
    "kl.penalty.reward_kl": ("", {"penalty": Penalty("k3")}),
    "kl.penalty.weighted_estimates": (
        "log_ratio",
        {"penalty": IN_LOSS, "estimator": "k2"},
    ),
    "kl.penalty.weighted_estimates exact": (
        "exact",
        {"penalty": IN_LOSS, "estimator": "exact"},
    ),
    "kl.penalty.with_sampled_tail": (
        "head logprobs",
        {"head": normal(ROWS, COLUMNS), "inside": MASK & (normal(ROWS, COLUMNS) > 0)},
    ),
    "logprob_chunks.logprobs_and_entropy": (MODELS, {"plan": PLAN, **FLAT}),
    "logprobs.entropy": ("logits temperature", {}),
    "logprobs.log_softmax": ("logits temperature", {}),
    "logprobs.token_logprobs": ("logits temperature", {}),
    "logprobs.token_logprobs_from_hidden": (MODELS, FEW),
    "losses.entropy_bonus": ("entropy", {}),
    "losses.language_model_loss": ("logprobs", {}),
    "losses.policy_loss": ("logprobs clip_range clip_range_high dual_clip", {}),
    "masked.centred": ("x", {}),
    "masked.last_true": ("", {}),
    "masked.lengths_to_mask": ("", {"size": 5}),
    "masked.masked_mean": ("x", {}),
    "masked.masked_sum": ("x", {}),
    "masked.masked_var": ("x", {}),
    "masked.masked_whiten": ("x", {}),
    "off_policy.importance.check_bounds": ("", {"correction": "token_mask"}),
    "off_policy.importance.importance_weights": ("", {"correction": "token_mask"}),
    "off_policy.mismatch.sampler_kl": ("", {}),
    "off_policy.mismatch.weight_stats": (
        "",
        {"output": WEIGHTS, "correction": "token_mask"},
    ),
    "preference_losses.bradley_terry.pairwise_loss": ("chosen rejected", {}),
    "preference_losses.bradley_terry.per_pair": ("losses", ROW),
    "preference_losses.dpo.check_dpo": ("", {"kind": "sigmoid"}),
    "preference_losses.dpo.dpo_loss": (f"{PAIRS} beta", ROW),
    "preference_losses.dpo.dpo_loss soft": (
        f"{PAIRS} beta",
        {"label_smoothing": HALF, **ROW},
    ),
    "preference_losses.dpo.dpo_loss robust": (
        f"{PAIRS} beta",
        {"kind": "robust", **ROW},
    ),
    "preference_losses.dpo.dpo_loss ipo": (
        f"{PAIRS} beta",
        {"kind": "ipo", "label_smoothing": 0, **ROW},
    ),
    "preference_losses.kto.kto_kl": ("", TEXTS),
    "preference_losses.kto.kto_loss": (
        "logprobs beta desirable_weight undesirable_weight",
        TEXTS,
    ),
    "preference_losses.reference_free.orpo_loss": (
        f"{PAIRS} odds_weight",
        {**ROW, **BELOW_0},
    ),
    "preference_losses.reference_free.simpo_loss": (
        f"{PAIRS} beta target_margin",
        ROW,
    ),
    "policy_losses.advantage_regression.dar_loss": ("logprobs", {}),
    "policy_losses.divergence_masks.dppo_loss": ("logprobs", {"divergence": "kl"}),
    "policy_losses.geometric_mean.gmpo_loss": (
        "logprobs clip_range clip_range_high",
        {},
    ),
    "policy_losses.response_weights.topr_loss": ("logprobs", {}),
    "policy_losses.score_centring.centred_loss": (
        "logprobs top_logprobs",
        {
            name: jax.nn.log_softmax(normal(ROWS, COLUMNS, VOCAB))[..., :3]
            for name in ("top_logprobs", "old_top_logprobs")
        },
    ),
    "policy_losses.response_weights.vespo_loss": ("logprobs", {}),
    "policy_losses.sequence_mask.off_policy_mask": ("", {}),
    "policy_losses.token_choice.covariances": ("", {}),
    "policy_losses.token_choice.kl_cov_loss": ("logprobs", {"chosen": MASK}),
    "policy_losses.token_choice.top_share": ("", {"among": MASK}),
    "surrogates.masked_inputs": ("logprobs", {}),
    "surrogates.at_level": ("log_ratio", {"ratio_level": "sequence_token"}),
    "surrogates.capped_exp": ("x", {}),
    "masked.sum_stats": ("", {"columns": {"kl": ARRAYS["kl"]}}),
    "surrogates.cispo_loss": ("logprobs", {}),
    "surrogates.ratio_stats": ("", {}),
    "surrogates.sapo_loss": ("logprobs temperature negative_temperature", {}),
    "token_rewards.kl_reward": ("kl kl_coef", {}),
    "token_rewards.token_rewards": ("scores kl kl_coef turn_rewards", {}),
    "entropy_control.controlled": (
        "",
        {"coef": jnp.float32(0.1), "entropy": jnp.float32(0.3)},
    ),
    "unused_ids.contain": ("", {"ranges": ((1, 2),)}),
    "unused_ids.masked": ("logits", {"ranges": ((1, 2),)}),
    "losses.explained_variance": ("", {}),
    "losses.value_loss": ("values clip_range", {}),
}


# The passes are parts of `kl.chunks.divergence`.
LEFT_OUT = ("checks", "kl.passes")


def functions():
    """The public functions of arrays or traceable options, by dotted name."""
    table = {}
    for module in pkgutil.walk_packages(functional.__path__, "rlhf_jax.functional."):
        place = module.name.removeprefix("rlhf_jax.functional.")
        for name, function in vars(importlib.import_module(module.name)).items():
            signature = inspect.isfunction(function) and inspect.signature(function)
            if not signature or name.startswith("_") or place in LEFT_OUT:
                continue
            kinds = [str(p.annotation) for p in signature.parameters.values()]
            if function.__module__ == module.name and any(
                "Array" in k or "Scalar" in k for k in kinds
            ):
                table[f"{place}.{name}"] = function
    return table


FUNCTIONS = functions()


def scalars(function):
    """The names of the traceable options."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if "Scalar" in str(p.annotation)]


def arguments(name):
    """The arguments of a case, with options as f32[]."""
    table, values = ARRAYS | SCALARS | CASES[name][1], {}
    signature = inspect.signature(FUNCTIONS[name.split(" ")[0]])
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:  # those of `aggregate`
            continue
        value = table.get(parameter.name)
        value = jnp.float32(value) if isinstance(value, float) else value
        if value is not None or parameter.default is parameter.empty:
            values[parameter.name] = value
    return values


def test_every_public_function_has_a_case():
    assert {name.split(" ")[0] for name in CASES} == set(FUNCTIONS)


def test_every_array_and_scalar_is_passed():
    """In at least one case; losses pass on the options of an aggregation."""
    passed = {name.split(" ")[0]: set() for name in CASES}
    for name in CASES:
        passed[name.split(" ")[0]] |= set(arguments(name))
    for name, function in FUNCTIONS.items():
        for parameter in inspect.signature(function).parameters.values():
            kind = str(parameter.annotation)
            handed_on = "aggregation." not in name and parameter.name in CONSTANT
            if not handed_on and any(k in kind for k in ("Array", "Scalar", "Scale")):
                assert parameter.name in passed[name], (name, parameter.name)


@pytest.mark.cases(quick=10)
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_reaches_what_the_contract_says(name):
    function, values = FUNCTIONS[name.split(" ")[0]], arguments(name)
    with_path, structure = jax.tree.flatten_with_path(values)
    floats = {
        number: leaf
        for number, (_, leaf) in enumerate(with_path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }

    def total(floats):
        leaves = [floats.get(i, leaf) for i, (_, leaf) in enumerate(with_path)]
        output = jax.tree.leaves(function(**jax.tree.unflatten(structure, leaves)))
        rng = np.random.default_rng(0)  # weights, as the sum of a softmax has no slope
        return sum(
            jnp.sum(x * rng.normal(size=x.shape).astype(np.float32), where=x > -jnp.inf)
            for x in output
            if jnp.issubdtype(x.dtype, jnp.floating)
        ) + jnp.zeros(())

    gradients = jax.jit(jax.grad(total))(floats)
    reached = {
        with_path[number][0][0].key
        for number, gradient in gradients.items()
        if np.any(np.asarray(gradient) != 0)
    }
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert reached == set(CASES[name][0].split())


def is_number(value):
    return isinstance(value, jax.Array) and value.shape == ()


SCALAR_CASES = [
    (name, scalar)
    for name in CASES
    for scalar in scalars(FUNCTIONS[name.split(" ")[0]])
    if "chunks" not in name and is_number(arguments(name).get(scalar))
]


@pytest.mark.cases(quick=24)
@pytest.mark.parametrize(("name", "scalar"), SCALAR_CASES)
def test_a_number_is_checked_and_a_traced_one_is_not(name, scalar):
    function, values = FUNCTIONS[name.split(" ")[0]], arguments(name)
    for wrong in (-1, -1.0, np.float32(-1), np.float64(-1), np.array(-1.0)):
        with pytest.raises(InputError, match=f"{scalar}: expected"):
            function(**{**values, scalar: wrong})
    jax.eval_shape(lambda x: function(**{**values, scalar: x}), jnp.float32(-1))


@pytest.mark.slow
def test_a_grid_of_options_is_one_program():
    """A grid of β and clip ranges gives the results of separate calls."""
    arrays = {name: ARRAYS[name] for name in ("logprobs", "old_logprobs", "mask")}

    def loss(kl_coef, clip_range):
        policy, _ = losses.policy_loss(
            **arrays, advantages=ARRAYS["advantages"], clip_range=clip_range
        )
        kl, _ = kl_loss(
            **arrays,
            penalty=IN_LOSS,
            ref_logprobs=ARRAYS["ref_logprobs"],
            weights=losses.token_weights(MASK),
        )
        return policy + kl_coef * kl

    kl_coefs, clip_ranges = [0.02, 0.1], [0.1, 0.2, 0.3]
    over_clips = jax.vmap(loss, (None, 0))
    grid = jax.jit(jax.vmap(over_clips, (0, None)))
    values = grid(jnp.array(kl_coefs), jnp.array(clip_ranges))
    alone = jax.jit(lambda: loss(kl_coefs[1], clip_ranges[0]))()
    assert float(values[1, 0]) == pytest.approx(float(alone), rel=1e-6)
    assert np.unique(values).size == values.size
