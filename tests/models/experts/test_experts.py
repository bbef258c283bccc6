"""Mixtures against every expert on every token; recorded and replayed routing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import decode, decoder
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import blocks, config, experts
from rlhf_jax.models.experts import block

pytestmark = pytest.mark.usefixtures("quick_compilation")
PLAIN = dataclasses.replace(tiny.LLAMA, experts=config.Experts(6, 2))
UNEVEN = dataclasses.replace(
    PLAIN,
    mlp_bias=True,
    experts=config.Experts(5, 3, False, True, gate_limit=0.5, gate_scale=1.3),
)
# Beside an MLP, in local and global layers with heads of their own.
BESIDE = dataclasses.replace(
    tiny.SHARED,
    shared_layers=0,
    wide_shared_mlp=False,
    per_layer_width=None,
    layer_scale=False,
    experts=config.Experts(6, 2, beside_width=5),
)
MODELS = {"plain": PLAIN, "uneven": UNEVEN, "beside": BESIDE}
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 13, (3, 9)).astype(np.int32)
MASK = np.arange(9)[None] < np.array([9, 4, 7])[:, None]


def noisy(model):
    return tiny.params(dataclasses.replace(model, unroll=False, prefill_chunk=None))


def linear(x, leaf, expert):
    y = x @ leaf["kernel"][expert]
    return y + leaf["bias"][expert] if "bias" in leaf else y


def every_expert(x, routed, params, *, model):
    """float64: p, its k largest, and the sum over all experts, of which k count."""
    how = model.experts
    params = jax.tree.map(lambda leaf: np.asarray(leaf, float), params)
    router, of_experts = params["router"], np.ones(how.count)
    if how.beside_width is not None:
        routed = routed * router["scale"] / np.sqrt(x.shape[1])
        of_experts = params["scale"]
    logits = routed @ router["weight"] + router.get("bias", 0.0)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    y = np.zeros(x.shape)
    for row in range(len(x)):
        largest = np.argsort(-p[row], kind="stable")[: how.per_token]
        total = p[row, largest].sum() if how.normalised else 1.0
        for expert in largest:
            up, gate = (linear(x[row], params[name], expert) for name in ("up", "gate"))
            if how.gate_limit is None:
                hidden = up * gate / (1 + np.exp(-gate))
            else:
                gate = np.minimum(gate, how.gate_limit)
                up = np.clip(up, -how.gate_limit, how.gate_limit)
                hidden = (up + 1) * gate / (1 + np.exp(-how.gate_scale * gate))
            share = p[row, expert] / total * of_experts[expert]
            y[row] += share * linear(hidden, params["down"], expert)
    return y


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_is_the_weighted_sum_of_its_experts(name):
    model = MODELS[name]
    layer = jax.tree.map(lambda leaf: leaf[1], noisy(model)["layers"]["experts"])
    module = block.Mixture(model, blocks.ACTIVATIONS["silu"], 0.02, 0.02)
    x = RNG.normal(size=(40, model.hidden_size)).astype(np.float32)
    # Beside an MLP the router reads something else than the experts.
    beside = model.experts.beside_width is not None
    routed = 5 * RNG.normal(size=x.shape).astype(np.float32) if beside else x
    y = jax.jit(lambda p, *x: module.apply({"params": p}, *x))(layer, x, routed)
    expected = every_expert(x, routed, layer, model=model)
    np.testing.assert_allclose(y, expected, atol=1e-4)


@functools.partial(jax.jit, static_argnames=("model", "first"))
def forward(params, tokens, mask, chosen=None, *, model, first=0):
    return decoder.hidden_and_routing(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        experts=chosen,
        first_column=first,
    )


@functools.partial(jax.jit, static_argnames="model")
def run(params, tokens, mask, chosen=None, *, model):
    def total(params):
        hidden, routing = forward(params, tokens, mask, chosen, model=model)
        return (jnp.where(mask[..., None], hidden, 0) ** 2).sum(), (hidden, routing)

    (_, output), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return *output, gradient


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "options", [{"unroll": True}, {"remat": "full"}, {"remat": "dots"}], ids=str
)
@pytest.mark.slow
def test_loops_remat_and_a_replay_of_itself_change_nothing(model, options):
    params = noisy(model)
    hidden, routing, gradient = run(params, TOKENS, MASK, model=model)
    of_layers = jax.tree.leaves(gradient["layers"])
    assert all(np.abs(leaf).max() > 0 for leaf in of_layers)
    shape = (3, 9, model.num_layers, model.experts.per_token)
    assert routing.chosen.shape == shape
    load = [20.0 * model.experts.per_token] * model.num_layers
    assert routing.load.sum(1).tolist() == load
    other = dataclasses.replace(model, **options)
    same, _, of_other = run(params, TOKENS, MASK, routing.chosen, model=other)
    np.testing.assert_allclose(same, hidden, atol=1e-5)
    chex.assert_trees_all_close(of_other, gradient, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", [PLAIN, BESIDE], ids=["plain", "beside"])
def test_experts_of_another_pass_are_met_and_weighed_by_this_router(model):
    params = noisy(model)
    hidden, routing, _ = run(params, TOKENS, MASK, model=model)
    others = jnp.asarray((np.asarray(routing.chosen) + 1) % 6)
    moved, again, gradient = run(params, TOKENS, MASK, others, model=model)
    np.testing.assert_array_equal(
        again.chosen, np.where(MASK[..., None, None], others, experts.OWN)
    )
    assert np.abs(np.asarray(moved - hidden))[MASK].max() > 0.01
    router = gradient["layers"]["experts"]["router"]["weight"]
    assert np.abs(router).max() > 0
    # Where nothing is recorded the router chooses.
    own = jnp.full_like(others, experts.OWN)
    same, _, _ = run(params, TOKENS, MASK, own, model=model)
    np.testing.assert_array_equal(same, hidden)


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.slow
def test_columns_that_are_not_computed_have_no_record_and_need_none(unroll):
    model = dataclasses.replace(PLAIN, unroll=unroll)
    params = noisy(model)
    hidden, whole = forward(params, TOKENS, MASK, model=model)
    later, part = forward(params, TOKENS, MASK, model=model, first=4)
    np.testing.assert_allclose(later[:, 4:], hidden[:, 4:], atol=1e-5)
    np.testing.assert_array_equal(part.chosen[:, 4:], whole.chosen[:, 4:])
    assert (np.asarray(part.chosen[:, :4, -1] == experts.OWN) == unroll).all()
    again, _ = forward(params, TOKENS, MASK, part.chosen, model=model, first=4)
    np.testing.assert_allclose(again[:, 4:], hidden[:, 4:], atol=1e-5)


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("plain", [UNEVEN, BESIDE], ids=["uneven", "beside"])
@pytest.mark.cases(quick=1)
def test_a_sampler_records_what_the_trainer_chooses(plain, chunk):
    model = dataclasses.replace(plain, prefill_chunk=chunk)
    params = noisy(model)
    rows = np.arange(3, dtype=np.int32)
    keys = decode.row_keys(jax.random.key(0), index=rows, sample=rows)
    draw = functools.partial(
        decode.generate,
        model=model,
        max_new_tokens=7,
        stop_ids=(1, 2),
        record_experts=True,
    )
    tokens, mask = TOKENS[:, ::-1].copy(), MASK[:, ::-1].copy()
    samples = jax.jit(draw)(params, tokens=tokens, mask=mask, keys=keys)
    _, routing = forward(params, samples.tokens, samples.mask, model=plain)
    recorded, expected = np.asarray(samples.experts), np.asarray(routing.chosen)
    # All but padding and each row's last token, which was not run.
    last = samples.mask.shape[1] - 1 - np.argmax(samples.mask[:, ::-1], axis=1)
    ran = np.array(samples.mask)
    ran[np.arange(3), last] = False
    np.testing.assert_array_equal(recorded[ran], expected[ran])
    assert (recorded[~ran] == experts.OWN).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 3}, {"cache_pages": 8, "page_size": 4}],
    ids=str,
)
@pytest.mark.parametrize("model", [UNEVEN, BESIDE], ids=["uneven", "beside"])
def test_continuous_batching_records_what_a_plain_batch_does(model, options):
    """Two places for three rows; one waits for a finished row's place."""
    params = noisy(model)
    rows = jnp.arange(3)
    draw = functools.partial(
        decode.generate,
        keys=decode.row_keys(jax.random.key(3), index=rows, sample=rows),
        max_new_tokens=7,
        stop_ids=(1, 2),
        record_experts=True,
    )
    tokens, mask = TOKENS[:, ::-1].copy(), MASK[:, ::-1].copy()
    of_places = dataclasses.replace(model, **options)
    plain, batched = (
        jax.jit(functools.partial(draw, model=model, continuous_batching=places))(
            params, tokens=tokens, mask=mask
        )
        for model, places in ((model, None), (of_places, 2))
    )
    np.testing.assert_array_equal(batched.tokens, plain.tokens)
    np.testing.assert_array_equal(batched.experts, plain.experts)
    assert (np.asarray(batched.experts) >= 0).any(axis=(1, 2, 3)).all()


def test_records_that_do_not_fit_are_named():
    params = noisy(PLAIN)
    right = np.zeros((3, 9, 2, 2), np.int32)
    for wrong in (right[:, :8], right[:, :, :1], right[..., :1], right.astype(float)):
        with pytest.raises(InputError, match=r"routing record int32\[3, 9, 2, 2\]"):
            forward(params, TOKENS, MASK, jnp.asarray(wrong), model=PLAIN)
    with pytest.raises(InputError, match="expected a mixture of experts to record or"):
        run(tiny.params(tiny.LLAMA), TOKENS, MASK, model=tiny.LLAMA)
    with pytest.raises(InputError, match="as many experts per token as there are, 2"):
        config.Experts(2, 3)


def test_the_balance_loss_is_1_where_all_is_even_and_its_formula_elsewhere():
    load = np.array([[3.0, 1.0, 2.0], [2.0, 2.0, 2.0]], np.float32)
    probability = np.array([[1.5, 0.5, 1.0], [1.0, 1.0, 1.0]], np.float32)
    routing = experts.Routing(
        chosen=jnp.zeros((2, 3, 2), jnp.int32),
        entropy=jnp.asarray([1.0, 2.0]),
        probability=jnp.asarray(probability),
        load=jnp.asarray(load),
        tokens=jnp.asarray([3.0, 3.0]),
    )
    first = 3 / 2 * sum(load[0] / 3 * probability[0] / 3)
    np.testing.assert_allclose(
        experts.balance_loss(routing), (first + 1) / 2, rtol=1e-6
    )
    stats = experts.router_stats(routing)
    means = {name: float(total / weight) for name, (total, weight) in stats.items()}
    expected = {
        "router/entropy": 0.5,
        "router/load_max": (1.5 + 1) / 2,
        "router/unused": 0,
    }
    assert means == pytest.approx(expected)
