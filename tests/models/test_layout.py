"""Layouts change only speed: unrolled layers, growing caches, fewer columns."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import traverse_util

from rlhf_jax import config, decode, decoder, logprobs, lora, policy
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import cached_decoder, caches, layout
from rlhf_jax.models.layers import unstack
from rlhf_jax.roles.reference import storage

Array = jax.Array
PROMPT, NEW = 5, 4


def batch(rows: int = 3, columns: int = PROMPT + NEW) -> tuple[Array, Array]:
    """Left-padded prompts, responses of uneven length, and garbage at padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, toys.GPT2.vocab_size, (rows, columns))
    column = np.arange(columns)[None, :]
    start, end = np.array([[0], [2], [3]]), np.array([[9], [7], [8]])
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(
        (column >= start) & (column < end)
    )


# Every model, layout and place once.
QUICK = [(toys.GPT2, False, PROMPT + NEW - 1), (toys.LLAMA, True, PROMPT - 1)]


in_int8 = toys.jit(functools.partial(storage.store, dtype="int8"))


def unrolled(model: config.ModelConfig) -> config.ModelConfig:
    return dataclasses.replace(model, unroll=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "remat"),
    [
        (toys.LLAMA, "full"),
        pytest.param(toys.GPT2, "none", marks=pytest.mark.slow),
        *(
            pytest.param(model, remat, marks=pytest.mark.long)
            for model in (toys.GPT2, toys.LLAMA)
            for remat in ("dots", "full" if model is toys.GPT2 else "none")
        ),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_layers_one_by_one_are_the_loop(model, remat):
    params = toys.params(model)
    tokens, mask = batch()
    shape = (*tokens.shape, model.hidden_size)
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    weights *= np.asarray(mask)[..., None]

    def loss(params, model):
        hidden = decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)
        return (hidden * weights).sum(), hidden

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    looped, hidden = gradient(params, model)
    apart, same = gradient(params, unrolled(dataclasses.replace(model, remat=remat)))
    mask_of_tokens = np.asarray(mask)
    np.testing.assert_allclose(
        hidden[mask_of_tokens], same[mask_of_tokens], rtol=0, atol=1e-5
    )
    chex.assert_trees_all_close(looped, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "unroll", "first"),
    [
        pytest.param(
            model,
            unroll,
            first,
            id=f"{model.family}-{unroll}-{first}",
            marks=[pytest.mark.long] * ((model, unroll, first) not in QUICK),
        )
        for model in (toys.GPT2, toys.LLAMA)
        for unroll in (False, True)
        for first in (0, 1, PROMPT - 1, PROMPT + NEW - 1)
    ],
)
def test_earlier_columns_are_zero_and_the_others_as_they_were(model, unroll, first):
    params = toys.params(model)
    model = dataclasses.replace(model, unroll=unroll)
    tokens, mask = batch()
    prefill = jax.jit(decoder.prefill, static_argnames=("model", "first_column"))
    run = functools.partial(prefill, params, model=model)
    whole, cache, _ = run(tokens=tokens, mask=mask)
    part, part_cache, _ = run(tokens=tokens, mask=mask, first_column=first)
    np.testing.assert_array_equal(part[:, :first], 0.0)
    np.testing.assert_allclose(part[:, first:], whole[:, first:], rtol=0, atol=1e-5)
    chex.assert_trees_all_close(cache, part_cache, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_last_layer_leaves_out_what_nobody_wants():
    model = unrolled(toys.GPT2)
    params = toys.params()
    tokens, mask = batch()

    def flops(first: int) -> float:
        run = functools.partial(decoder.hidden_states, model=model, first_column=first)
        lowered = jax.jit(run).lower(params, tokens=tokens, mask=mask)
        cost = lowered.compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    rows, columns = tokens.shape
    wide, mlp = model.hidden_size, model.intermediate_size
    # Query and output projections and both of the MLP, at the columns left out.
    saved = 2 * rows * PROMPT * (2 * wide * wide + 2 * wide * mlp)
    assert flops(0) - flops(PROMPT) >= saved
    assert flops(0) - flops(PROMPT) <= 1.5 * saved
    assert columns > PROMPT


@pytest.mark.slow
def test_stored_layers_are_looped_over_whatever_the_layout():
    model = toys.GPT2
    params = toys.params(model)
    stored = in_int8(params)
    tokens, mask = batch()
    hidden = jax.jit(decoder.hidden_states, static_argnames="model")
    looped, apart = (
        hidden(stored, model=one, tokens=tokens, mask=mask)
        for one in (model, unrolled(model))
    )
    np.testing.assert_array_equal(looped, apart)
    text = hidden.lower(stored, model=unrolled(model), tokens=tokens, mask=mask)
    assert "while" in text.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right"), [((6, 3), (3, 5)), ((2, 3, 6, 4), (2, 3, 4, 2))]
)
def test_a_product_and_its_gradients(left, right):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=left), rng.normal(size=right)
    g = rng.normal(size=(*left[:-1], right[-1]))
    single = [jnp.asarray(array, jnp.float32) for array in (x, w, g)]
    y, back = jax.vjp(jax.jit(layout.product), *single[:2])
    np.testing.assert_allclose(y, np.einsum("...nk,...km->...nm", x, w), atol=1e-5)
    of_x, of_w = back(single[2])
    np.testing.assert_allclose(of_x, np.einsum("...nm,...km->...nk", g, w), atol=1e-5)
    np.testing.assert_allclose(of_w, np.einsum("...nk,...nm->...km", x, g), atol=1e-5)
    mapped = jax.vmap(jax.grad(lambda w, x: layout.product(x, w).sum(), 0), (None, 0))
    gradients_of_both = mapped(single[1], jnp.stack([single[0], 2 * single[0]]))
    ones = np.ones_like(g)
    summed = np.einsum("...nk,...nm->...km", x, ones)
    np.testing.assert_allclose(gradients_of_both[1], 2 * summed, atol=1e-5)


def test_a_product_of_other_shapes_and_in_shard_map():
    """In these cases it has no custom gradient."""
    x, w = jnp.arange(48.0).reshape(4, 4, 3), jnp.arange(6.0).reshape(3, 2)
    gradient = jax.grad(lambda w: layout.product(x, w).sum())(w)
    np.testing.assert_allclose(gradient, np.full((3, 2), x.sum((0, 1))[:, None]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("rows",))
    rows = jax.sharding.PartitionSpec("rows")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), rows),
        out_specs=rows,
    )
    def of_rows(w: Array, x: Array) -> Array:
        return layout.product(x, w)

    flat = x.reshape(16, 3)
    same = jax.jit(jax.grad(lambda w: of_rows(w, flat).sum()))(w)
    np.testing.assert_allclose(same, gradient)


def test_what_is_laid_out_for_a_cpu_is_so_there_alone():
    def of_w(w: Array) -> Array:
        return jax.grad(lambda w: layout.product(jnp.ones((4, 3)), w).sum())(w)

    traced = jax.jit(of_w).trace(jnp.ones((3, 2)))
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    laid_out = {
        platform: "optimization_barrier" in text for platform, text in texts.items()
    }
    assert laid_out == {"cpu": True, "tpu": False, "cuda": False}


def test_windows_cover_every_column_and_grow_slowly():
    for first in (1, 16, 127, 128, 500):
        for new in (1, 48, 128, 512, 1000):
            size = first + new
            widths = caches.growing_widths(size, first=first)
            assert widths[-1] == size
            assert widths == tuple(sorted(set(widths)))
            for before, after in itertools.pairwise(widths):
                assert before % caches.FIRST_WIDTH == 0
                assert after <= 2.5 * before
            assert widths[0] > first


@pytest.mark.parametrize(
    ("model", "stop_ids"),
    [
        # Quick: test_architectures.py samples in caches that grow.
        pytest.param(toys.GPT2, (), marks=pytest.mark.slow),
        pytest.param(toys.LLAMA, (3,), marks=pytest.mark.long),
    ],
    ids=["gpt2", "llama"],
)
def test_windows_change_no_sample(model, stop_ids, monkeypatch):
    model = dataclasses.replace(model, max_positions=64)
    params = toys.params(model)
    tokens, mask = batch(columns=PROMPT)
    keys = decode.row_keys(
        jax.random.key(2), index=jnp.arange(3), sample=jnp.zeros(3, jnp.int32)
    )

    def sample() -> decode.Generated:
        generate = functools.partial(
            decode.generate, model=model, max_new_tokens=20, stop_ids=stop_ids
        )
        return jax.jit(generate)(
            params, tokens=tokens, mask=mask.at[:, -1].set(True), keys=keys
        )

    assert len(caches.growing_widths(PROMPT + 20, first=PROMPT)) == 1
    whole = sample()
    monkeypatch.setattr(caches, "FIRST_WIDTH", 8)
    assert caches.growing_widths(PROMPT + 20, first=PROMPT) == (8, 16, 25)
    narrow = sample()
    assert (whole.response_mask.sum() == 3 * 20) == (stop_ids == ())
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(narrow, name))
    np.testing.assert_allclose(whole.logprobs, narrow.logprobs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(whole.entropy, narrow.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_turned_product_and_its_gradients(dtype):
    rng = np.random.default_rng(0)
    x, w, g = (
        np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64)
        for shape in ((5, 3), (7, 3), (5, 7))
    )
    y, back = jax.vjp(
        jax.jit(layout.transposed_product), jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    )
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, x @ w.T, atol=1e-5)
    text = jax.jit(layout.transposed_product).lower(x, w).as_text()
    assert "optimization_barrier" in text  # else it would be x @ w.T
    of_x, of_w = back(jnp.asarray(g, jnp.float32))
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == "bfloat16" else {"atol": 1e-5}
    np.testing.assert_allclose(of_x.astype(jnp.float32), g @ w, **tolerance)
    np.testing.assert_allclose(of_w.astype(jnp.float32), g.T @ x, **tolerance)


def test_matrices_are_cast_once_before_tokens_are_decoded():
    """A GPU's compiler would cast at every token; norms stay in float32."""
    model = dataclasses.replace(toys.LLAMA, num_layers=2, dtype="bfloat16")
    params = toys.params(model)
    layers = cached_decoder.layers_to_decode(params, model=model, rows=5)
    for layer in layers:
        for path, leaf in traverse_util.flatten_dict(layer).items():
            expected = "bfloat16" if path[-1] == "kernel" else "float32"
            assert leaf.dtype == expected, path
    up = params["layers"]["mlp"]["up"]["kernel"][1].astype(jnp.bfloat16)
    np.testing.assert_array_equal(layers[1]["mlp"]["up"]["kernel"], up)
    for tied, table in ((True, ("embed", "tokens")), (False, ("head", "kernel"))):
        model = dataclasses.replace(model, tied_head=tied)
        params = toys.params(model)
        ready = cached_decoder.params_to_decode(params, model=model)
        assert ready[table[0]][table[1]].dtype == jnp.bfloat16
        assert ready["final_norm"]["scale"].dtype == jnp.float32
        if not tied:  # an embedding's rows are cast as they are taken
            assert ready["embed"]["tokens"] is params["embed"]["tokens"]
    stored = in_int8(params)
    assert cached_decoder.params_to_decode(stored, model=model) is stored


@pytest.mark.slow
def test_kernels_of_few_rows_are_turned_once_and_what_is_stored_is_not():
    model = dataclasses.replace(toys.LLAMA, num_layers=2, transposed_rows=4)
    params = toys.params(model)
    stored = in_int8(params)
    layers = toys.jit(
        cached_decoder.layers_to_decode, static_argnames=("model", "rows")
    )
    many = layers(params, model=model, rows=5)
    few = layers(params, model=model, rows=4)
    for number in range(2):
        up = np.asarray(params["layers"]["mlp"]["up"]["kernel"])[number]
        np.testing.assert_array_equal(many[number]["mlp"]["up"]["kernel"], up)
        np.testing.assert_array_equal(few[number]["mlp"]["up"]["transposed"], up.T)
        assert set(few[number]["mlp"]["up"]) == {"transposed"}
        scale = np.asarray(params["layers"]["mlp_norm"]["scale"])[number]
        np.testing.assert_array_equal(few[number]["mlp_norm"]["scale"], scale)
    few_rows = layers(stored, model=model, rows=4)
    apart = toys.jit(functools.partial(unstack, model=model))
    chex.assert_trees_all_equal(few_rows, apart(stored["layers"]), strict=True)


@pytest.mark.cases(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"),
    [
        (toys.LLAMA, "plain"),
        *(
            pytest.param(model, how, marks=pytest.mark.slow)
            for model, how in (
                *((toys.GPT2, "continuous_batching"), (toys.GPT2, "lora")),
                *((toys.LLAMA, "bfloat16"), (toys.LLAMA, "mesh")),
            )
        ),
        *(
            pytest.param(model, how, marks=pytest.mark.long)
            for model, how in (
                *((toys.GPT2, "plain"), (toys.GPT2, "bfloat16"), (toys.GPT2, "mesh")),
                *((toys.LLAMA, "continuous_batching"), (toys.LLAMA, "lora")),
            )
        ),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_turned_weights_change_no_sample(model, how, monkeypatch):
    params = toys.params(model)
    if how == "bfloat16":
        model = dataclasses.replace(model, dtype=how)
    if how == "lora":
        adapters_config = lora.LoRA(rank=2)
        adapters = lora.init(jax.random.key(3), model=model, lora=adapters_config)
        moved = toys.perturbed(adapters, seed=4, scale=0.3)
        params = lora.attach(params, moved, lora=adapters_config)
    on_mesh = functools.partial  # of a function
    if how == "mesh":
        mesh = MeshShape.parse("fsdp=4,tensor=2").make()
        params = sharding.place(params, mesh=mesh)
        on_mesh = functools.partial(sharding.on, mesh)
    tokens, mask = batch(columns=PROMPT)
    products, plain = [], layout.transposed_product

    def counted(x: Array, w: Array) -> Array:
        products.append(w.shape)
        return plain(x, w)

    monkeypatch.setattr(layout, "transposed_product", counted)

    def sample(transposed_rows: int) -> decode.Generated:
        products.clear()
        drawing = functools.partial(
            decode.generate,
            model=dataclasses.replace(model, transposed_rows=transposed_rows),
            max_new_tokens=12,
            stop_ids=(3,),
            continuous_batching=2 if how == "continuous_batching" else None,
        )
        return jax.jit(on_mesh(drawing))(
            params,
            tokens=tokens,
            mask=mask.at[:, -1].set(True),
            keys=decode.row_keys(
                jax.random.key(2), index=jnp.arange(3), sample=jnp.zeros(3, jnp.int32)
            ),
        )

    expected = sample(0)
    assert not products
    samples = sample(3)
    width, words = model.hidden_size, model.padded_vocab_size
    assert {(words, width), (width, model.intermediate_size)} <= set(products)
    tolerance = 2e-2 if how == "bfloat16" else 1e-5
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(samples, name), getattr(expected, name))
    np.testing.assert_allclose(samples.logprobs, expected.logprobs, atol=tolerance)
    np.testing.assert_allclose(samples.entropy, expected.entropy, atol=tolerance)


def test_fastest_knows_the_backend_and_the_layers():
    deep = dataclasses.replace(toys.GPT2, num_layers=layout.UNROLLED["cpu"] + 1)
    assert layout.fastest(toys.GPT2, backend="cpu") == unrolled(toys.GPT2)
    assert layout.fastest(toys.GPT2) == unrolled(toys.GPT2)  # tests run on a CPU
    assert layout.fastest(unrolled(deep), backend="cpu") == deep
    assert layout.fastest(unrolled(toys.GPT2), backend="tpu") == toys.GPT2
    wide = dataclasses.replace(deep, hidden_size=layout.TRANSPOSED_SIZE)
    transposed = dataclasses.replace(wide, transposed_rows=layout.TRANSPOSED_ROWS)
    assert layout.fastest(wide, backend="cpu") == transposed
    for backend in ("gpu", "tpu"):
        assert layout.fastest(transposed, backend=backend) == wide


def on_other_platforms(*args, cpu, default):
    return default(*args)


@pytest.mark.parametrize("way", ["jit", "vmap", "plain", "accelerator"])
def test_change_if_changes_all_or_nothing(way, monkeypatch):
    """Checked to the bit."""
    if way == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", on_other_platforms)
    tree = {"a": jnp.array([1.5, -0.0, 3.0]), "b": jnp.arange(3)}

    def change(tree):
        return {"a": tree["a"] / 0.0, "b": tree["b"] + 1}

    def run(flag):
        return layout.change_if(flag, change, tree)

    flags = jnp.array([True, False])
    if way == "vmap":
        both = jax.jit(jax.vmap(run))(flags)
        changed, unchanged = (
            jax.tree.map(lambda leaf, i=i: leaf[i], both) for i in (0, 1)
        )
    else:
        changed, unchanged = map(run if way == "plain" else jax.jit(run), flags)
    np.testing.assert_array_equal(changed["a"], [np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(changed["b"], [1, 2, 3])
    chex.assert_trees_all_equal(unchanged, tree)
    np.testing.assert_array_equal(np.signbit(unchanged["a"]), [False, True, False])


def test_change_if_within_shard_map_changes_what_each_device_says():
    mesh = MeshShape.parse("data=8").make()
    part, whole = jax.P("data"), jax.P()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(part, part, whole), out_specs=part
    )
    def run(flag, step, tree):
        return layout.change_if(flag[0], lambda tree: tree + step, tree)

    flags, steps = jnp.arange(8) % 2 == 0, 1.0 + jnp.arange(8)
    output = jax.jit(run)(flags, steps, jnp.ones(1))
    np.testing.assert_array_equal(output, [2, 1, 4, 1, 6, 1, 8, 1])


def test_change_if_branches_on_a_cpu_alone():
    def run(flag, tree):
        return layout.change_if(flag, lambda tree: tree * 2.0, tree)

    traced = jax.jit(run).trace(jnp.bool_(True), jnp.ones(3))
    for platform, selects in {"cpu": False, "cuda": True, "tpu": True}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.select" in text) == selects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "times"), [("tensor=8", 8), ("data=2,tensor=4", 8), ("data=8", 8)]
)
def test_chunks_of_words_are_as_many_times_larger_as_devices_share_them(
    shape, times, monkeypatch
):
    sizes, plain = [], logprobs.token_logprobs_from_hidden

    def computed(*args, max_logits, **options):
        sizes.append(max_logits)
        return plain(*args, max_logits=max_logits, **options)

    monkeypatch.setattr(policy, "token_logprobs_from_hidden", computed)
    model, (tokens, mask) = toys.GPT2, batch()
    tokens, mask = (jnp.tile(array[:1], (8, 1)) for array in (tokens, mask))
    compute = functools.partial(policy.logprobs, model=model, tokens=tokens, mask=mask)
    params = toys.params(model)
    mesh = MeshShape.parse(shape).make()
    jax.eval_shape(compute, params)
    jax.eval_shape(sharding.on(mesh, compute), params)
    assert sizes == [logprobs.MAX_LOGITS, times * logprobs.MAX_LOGITS]


def test_parameters_are_made_and_counted_without_the_kernel():
    """The attention engine has no parameters, so that no machine needs cuDNN here."""
    model = dataclasses.replace(toys.LLAMA, dtype="bfloat16", attention="cudnn")
    plain = dataclasses.replace(model, attention="xla")
    key, adapter = jax.random.key(0), lora.LoRA(rank=2)
    for init in (decoder.init, functools.partial(lora.init, lora=adapter)):
        output, expected = (
            jax.eval_shape(functools.partial(init, model=one), key)
            for one in (model, plain)
        )
        assert output == expected
    # By hand: embedding and head, then a layer's projections, MLP and norms.
    kernels = 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert decoder.num_parameters(model) == 2 * 13 * 16 + kernels + 16


@pytest.mark.slow
def test_attention_by_cudnn_is_asked_for_and_needs_a_gpu(monkeypatch):
    with pytest.raises(
        ValueError, match=r"bfloat16 with attention cudnn, .* got 'float32'"
    ):
        dataclasses.replace(toys.GPT2, attention="cudnn")
    with pytest.raises(
        ValueError,
        match="attention: expected one of 'auto', 'xla', 'blockwise'",
    ):
        dataclasses.replace(toys.GPT2, attention="flash")
    model = dataclasses.replace(toys.GPT2, dtype="bfloat16", attention="cudnn")
    with pytest.raises(ValueError, match="expected a GPU for attention cudnn, got the"):
        layout.fastest(model)
    assert layout.fastest(model, backend="gpu") == model
    toy = dataclasses.replace(toys.LLAMA, num_heads=4, num_kv_heads=2)
    model = dataclasses.replace(toy, dtype="bfloat16", attention="cudnn")
    implementations, plain = [], jax.nn.dot_product_attention

    def attention(*args, implementation, **options):
        implementations.append(implementation)
        return plain(*args, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    params = toys.params(toy)
    implementations.clear()
    tokens, mask = batch()
    inputs = {"tokens": tokens, "mask": mask}
    hidden = jax.jit(decoder.hidden_states, static_argnames="model")
    output = hidden(params, model=model, **inputs)
    assert set(implementations) == {"cudnn"}
    implementations.clear()
    model = dataclasses.replace(model, attention="xla")
    expected = hidden(params, model=model, **inputs)
    assert not implementations
    output, expected = (np.asarray(x, np.float32)[mask] for x in (output, expected))
    np.testing.assert_allclose(output, expected, rtol=0.05, atol=0.05)  # bfloat16's
