"""Experts on several devices give one device's numbers; rows travel to them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import config, decoder
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import cached_decoder
from rlhf_jax.models.experts import dispatch, grouped

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = dataclasses.replace(
    tiny.LLAMA,
    experts=config.Experts(8, 2, router_bias=True, gate_limit=1.0),
    mlp_bias=True,
    sinks=True,
)
# Beside an MLP, in local and global layers with heads of their own.
BESIDE = dataclasses.replace(
    tiny.SHARED,
    num_layers=2,
    local_layers=(True, False),
    shared_layers=0,
    wide_shared_mlp=False,
    per_layer_width=None,
    post_norms=True,
    experts=config.Experts(8, 2, beside_width=8),
)
TOKENS = np.arange(48, dtype=np.int32).reshape(8, 6) % 13
MESHES = {
    "expert": MeshShape(expert=8),
    "all": MeshShape(data=2, expert=2, tensor=2),
    "none": MeshShape(data=2, fsdp=2, tensor=2),
    "columns": MeshShape(context=2, expert=4),
}


@functools.cache
def params(model=MODEL):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype),
        decoder.init(jax.random.key(0), model=model),
    )


def total(params, tokens, *, model=MODEL):
    hidden, routing = decoder.hidden_and_routing(
        params, model=model, tokens=tokens, mask=tokens >= 0
    )
    return 10 * (hidden**2).mean(), (hidden, routing.chosen, routing.entropy)


gradient = jax.value_and_grad(total, has_aux=True)
of_beside = jax.value_and_grad(functools.partial(total, model=BESIDE), has_aux=True)


@functools.cache
def of_one_device():
    return jax.jit(gradient)(params(), TOKENS)


def on(shape, function=gradient, *, model=MODEL):
    mesh = shape.make()
    arguments = (
        sharding.place(params(model), mesh=mesh),
        row_sharding.put_rows(TOKENS, mesh=mesh),
    )
    return jax.jit(sharding.on(mesh, function)), arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mixture_on_eight_devices_is_that_of_one(name):
    function, arguments = on(MESHES[name])
    (value, output), of_params = function(*arguments)
    assert_equal(((value, output), of_params), of_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert=4", "all"])
def test_experts_beside_an_mlp_on_eight_devices_are_those_of_one(name):
    shape = {"expert=4": MeshShape(data=2, expert=4), **MESHES}[name]
    function, arguments = on(shape, of_beside, model=BESIDE)
    kernel = arguments[0]["layers"]["experts"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[1] == 8 // shape.expert
    expected = jax.jit(of_beside)(params(BESIDE), TOKENS)
    assert_equal(function(*arguments), expected)


def assert_equal(output, expected):
    """Values, hidden states, routing and gradients of two runs."""
    ((value, aux), of_params), ((other_value, other_aux), of_others) = output, expected
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    for mine, other in zip(aux, other_aux, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=2e-5)
    for mine, other in zip(
        jax.tree.leaves(of_params), jax.tree.leaves(of_others), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=2e-6)


def as_documented(rows, output, start, count, place, coming, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA:CPU lacks."""
    every = jax.lax.all_gather((rows, start, count, place), axis_name)
    own = jax.lax.axis_index(axis_name)
    for sent, start, count, place in zip(*every, strict=True):
        number = jnp.arange(len(sent), dtype=jnp.int32) - start[own]
        taken = (number >= 0) & (number < count[own])
        at = jnp.where(taken, place[own] + number, len(output))
        output = output.at[at].set(sent, mode="drop")
    agreed = (coming == every[2][:, own]).all()
    return jnp.where(agreed, output, jnp.nan)


def mixture(x, shares, weights, chosen):
    def gate(up, gate):
        return up * jax.nn.sigmoid(gate)

    y = dispatch.mixed(x, chosen, shares, weights=weights, gate=gate)
    return (y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["all_to_all", "ragged"])
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_rows_beyond_the_room_arrive_in_further_turns(
    devices, room, engine, monkeypatch
):
    """Random routing, an even one, and one to the experts of a single device."""
    monkeypatch.setattr(dispatch, "LEAST", 1)
    monkeypatch.setattr(dispatch, "ROOM", room)
    rng = np.random.default_rng(0)
    tokens, width, inner = 24, 8, 4
    normal = functools.partial(rng.normal, size=(8, width, inner))
    weights = {
        "up": {"kernel": normal(), "bias": normal()[:, 0]},
        "gate": {"kernel": normal(), "bias": normal()[:, 0]},
        "down": {"kernel": normal().swapaxes(1, 2), "bias": normal()[..., 0]},
    }
    x, shares = rng.normal(size=(tokens, width)), rng.uniform(size=(tokens, 1))
    x, shares, weights = jax.tree.map(jnp.float32, (x, shares, weights))
    run = jax.value_and_grad(mixture, argnums=(0, 1, 2), has_aux=True)
    of_one = jax.jit(run)
    routings = rng.integers(8, size=tokens), np.arange(tokens) % 8, np.full(tokens, 7)
    routings = [routing.astype(np.int32)[:, None] for routing in routings]
    expected = [of_one(x, shares, weights, routing) for routing in routings]
    if engine == "ragged":
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", as_documented)
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *args, default, **_: default(*args)
        )
    mesh = MeshShape(data=8 // devices, expert=devices).make()
    on_mesh = jax.jit(sharding.on(mesh, run))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, shares, weights = jax.device_put((x, shares, weights), everywhere)
    routings = jax.device_put(routings, everywhere)
    for routing, of_device in zip(routings, expected, strict=True):
        chex.assert_trees_all_close(
            on_mesh(x, shares, weights, routing), of_device, rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert", "all"])
def test_padding_on_eight_devices_is_that_on_one(name):
    lengths = np.array([6, 1, 4, 0, 3, 6, 2, 5])
    tokens = np.where(np.arange(6)[None] < lengths[:, None], TOKENS, -1)

    def padded(params, tokens):
        hidden, routing = decoder.hidden_and_routing(
            params, model=MODEL, tokens=tokens, mask=tokens >= 0
        )
        hidden = jnp.where((tokens >= 0)[..., None], hidden, 0)
        return 10 * (hidden**2).mean(), (hidden, routing.chosen, routing.load)

    padded = jax.value_and_grad(padded, has_aux=True)
    expected = jax.jit(padded)(params(), tokens)
    assert expected[0][1][2].sum() == 2 * 2 * lengths.sum()  # layers, experts, tokens
    function, (placed, _) = on(MESHES[name], padded)
    rows = row_sharding.put_rows(tokens, mesh=MESHES[name].make())
    assert_equal(function(placed, rows), expected)


@pytest.mark.slow
def test_padding_takes_no_room(monkeypatch):
    """All tokens go to the first of eight devices, which has room for three.

    Three rows are added to 21, so that every device has as many.
    """
    monkeypatch.setattr(dispatch, "LEAST", 1)
    monkeypatch.setattr(dispatch, "ROOM", 1)
    turns, summed = [], dispatch._summed

    def counted(turn, count, *others):
        jax.debug.callback(lambda n: turns.append(int(n)), count)
        return summed(turn, count, *others)

    monkeypatch.setattr(dispatch, "_summed", counted)
    square = {"kernel": jnp.ones((8, 4, 4)) / 4}
    weights = dict.fromkeys(("up", "gate", "down"), square)
    mesh = MeshShape(expert=8).make()
    run = jax.jit(sharding.on(mesh, mixture))
    x, shares = jnp.ones((21, 4)), jnp.ones((21, 1))
    chosen = np.zeros((21, 1), np.int32)
    padded = np.where(np.arange(21)[:, None] < 18, 8, chosen)  # 8 is no expert
    found = {}
    for name, routing in {"all": chosen, "padded": padded}.items():
        _, y = run(*sharding.place((x, shares, weights, routing), mesh=mesh))
        jax.effects_barrier()
        found[name] = {*turns}
        turns.clear()
        of_tokens = (np.asarray(y) != 0).all(axis=1)
        np.testing.assert_array_equal(of_tokens, routing[:, 0] < 8)
    assert found == {"all": {7}, "padded": {1}}


def test_other_parameters_are_sharded_over_the_devices_of_experts():
    mesh = MeshShape(fsdp=2, expert=4).make()
    whole = jax.eval_shape(params.__wrapped__)  # a cache would keep tracers
    found = sharding.shardings(whole, mesh=mesh)
    both = ("fsdp", "expert")
    spec = jax.sharding.PartitionSpec
    assert found["embed"]["tokens"].spec == spec(None, both)
    attention, experts = (found["layers"][name] for name in ("attention", "experts"))
    assert attention["query"]["kernel"].spec == spec(None, both)
    assert attention["output"]["kernel"].spec == spec(None, None, both)
    assert experts["up"]["kernel"].spec == spec(None, "expert", "fsdp")


@jax.custom_vjp
def undefined_beyond(x, count):
    return jnp.where((jnp.arange(len(x)) < count)[:, None], x, jnp.nan)


undefined_beyond.defvjp(
    lambda x, count: (undefined_beyond(x, count), count),
    lambda count, gradient: (undefined_beyond(gradient, count), None),
)


@pytest.mark.slow
def test_places_without_a_row_may_hold_anything(monkeypatch):
    """TPU kernels leave them unwritten, in products and in gradients."""

    def product(x, w, *, sizes, load):
        count = sizes.sum()
        x = undefined_beyond(x, count)
        x = jnp.where((jnp.arange(len(x)) < count)[:, None], x, 0.0)
        y = grouped.grouped_product(x, w, sizes=sizes, load=load)
        there = (jnp.arange(len(y)) < count)[:, None]
        return jnp.where(there, y, jnp.nan)

    monkeypatch.setattr(dispatch, "grouped_product", product)
    function, arguments = on(MESHES["all"])
    (value, _), of_params = function(*arguments)
    (expected, _), of_one = of_one_device()
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for mine, other in zip(
        jax.tree.leaves(of_params), jax.tree.leaves(of_one), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [total, pytest.param(gradient, marks=pytest.mark.slow)],
    ids=["forward", "gradient"],
)
def test_rows_are_exchanged_and_the_weights_of_experts_are_not_gathered(run):
    function, arguments = on(MESHES["expert"], run)
    kernel = arguments[0]["layers"]["experts"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[1] == 1
    text = function.lower(*arguments).compile().as_text()
    assert "all-to-all(" in text
    whole = f"[8,{MODEL.hidden_size},{MODEL.intermediate_size}]"
    gathered = [line for line in text.splitlines() if "all-gather(" in line]
    assert not any(whole in line for line in gathered)


@pytest.mark.slow
def test_a_router_is_whole_on_every_device_that_decodes():
    """Stored by parts, as a large one is, it would cost a sum per layer and token."""
    mesh = MeshShape(data=2, tensor=4).make()
    stored = jax.device_put(
        params(), sharding.shardings(params(), mesh=mesh, small=MODEL.hidden_size * 8)
    )
    parts = stored["layers"]["experts"]["router"]["weight"].sharding
    assert parts.spec == jax.sharding.PartitionSpec(None, "tensor")
    ready = functools.partial(cached_decoder.layers_to_decode, model=MODEL, rows=8)
    for layer in jax.jit(sharding.on(mesh, ready))(stored):
        experts = layer["experts"]
        assert experts["router"]["weight"].sharding.is_fully_replicated
        assert not experts["up"]["kernel"].sharding.is_fully_replicated


def test_a_mesh_without_experts_to_share_has_no_axis_for_them():
    assert MeshShape(data=8).make().axis_names == ("data", "fsdp", "context", "tensor")
    assert "expert" in MeshShape(expert=8).make().axis_names
    assert str(MeshShape.parse("expert=4,data=2")) == "data=2,fsdp=1,tensor=1,expert=4"
