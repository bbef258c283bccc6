"""Shardings on a mesh, which do not change a program's numbers."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_files
import toys
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax import (
    config,
    critic,
    decoder,
    frozen,
    hf,
    kl_control,
    lora,
    masked,
    policy,
    ppo,
    rewards,
    state,
)
from rlhf_jax.checkpoints import frozen_models, mapping, pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.data import batches
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes
from rlhf_jax.models.families import registry
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import FrozenModels

MODELS = {
    "gpt2": config.gpt2(
        vocab_size=13, hidden_size=32, num_layers=2, num_heads=8, max_positions=24
    ),
    "llama": config.llama(
        vocab_size=13,
        hidden_size=32,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=48,
        max_positions=24,
    ),
}
GPT2 = MODELS["gpt2"]
MESHES = [
    MeshShape(data, fsdp, tensor)
    for data, fsdp, tensor in itertools.product((1, 2, 4, 8), repeat=3)
    if data * fsdp * tensor == 8
]
KEY = jax.random.key(9)


def shapes_of(model):
    return jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))


# --- logical axes -----------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_parameter_has_axes_of_its_rank(model):
    scored = {"trunk": shapes_of(model), "score": rewards_head(model)}
    made = jax.eval_shape(
        lambda: lora.init(jax.random.key(0), model=model, lora=lora.LoRA(rank=2))
    )
    for tree in (shapes_of(model), scored, made):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names = axes.of(tuple(key.key for key in path))
            assert names is not None, path
            assert len(names) == leaf.ndim, path


def rewards_head(model):
    return {
        "kernel": jax.ShapeDtypeStruct((model.hidden_size,), jnp.float32),
        "bias": jax.ShapeDtypeStruct((), jnp.float32),
    }


def test_adapters_and_int8_have_the_axes_of_their_kernel():
    at = ("policy", "layers", "mlp", "down")
    assert axes.of((*at, "kernel")) == ("layers", "mlp", "embed")
    assert axes.of((*at, "lora_a")) == ("layers", "mlp", None)
    assert axes.of((*at, "lora_b")) == ("layers", None, "embed")
    assert axes.of((*at, "kernel", "held", "scales")) == ("layers", "mlp", "embed")
    assert axes.of(("kl", "kl_coef")) is None
    assert axes.of(()) is None


def test_rows_lie_on_as_many_axes_as_divide_them():
    sizes = {"data": 2, "fsdp": 4, "tensor": 3}
    assert axes.row_axes(sizes, rows=16) == ("data", "fsdp")
    assert axes.row_axes(sizes, rows=6) == ("data",)
    assert axes.row_axes(sizes, rows=3) == ()
    assert axes.row_axes({"data": 1, "fsdp": 4}, rows=4) == ("fsdp",)


# Compiled: an operation at a time has a hundred programs.
init = jax.jit(decoder.init, static_argnames=("model",))

# --- where things lie -------------------------------------------------------------


def fresh(model=GPT2, *, optimizer=None, policy=None):
    policy = init(jax.random.key(0), model=model) if policy is None else policy
    optimizer = optax.adamw(1e-2) if optimizer is None else optimizer
    return state.ppo_state(
        policy=policy,
        critic=critic.from_policy(policy, model=model),
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
        kl=kl_control.fixed(0.1),
    )


@pytest.mark.slow
def test_a_training_state_lies_as_the_rules_say():
    mesh = MeshShape(fsdp=2, tensor=4).make()
    made = sharding.create(fresh, mesh=mesh, small=64)
    query = ("layers", "attention", "query", "kernel")

    def spec(tree, path):
        for name in path:
            tree = tree[name]
        return tree.sharding.spec

    expected = PartitionSpec(None, "fsdp", "tensor")
    assert spec(made.policy, query) == expected
    assert spec(made.critic["trunk"], query) == expected
    assert spec(made.policy_opt[0].mu, query) == expected
    assert spec(made.critic_opt[0].nu["trunk"], query) == expected
    assert spec(made.policy, ("embed", "tokens")) == PartitionSpec("tensor", "fsdp")
    assert made.step.sharding.is_fully_replicated
    table = made.policy["embed"]["tokens"]
    assert {shard.data.size for shard in table.addressable_shards} == {table.size // 8}
    placed = sharding.place(fresh(), mesh=mesh, small=64)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7),
        placed.policy,
        made.policy,
    )
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding == b.sharding, placed, made)
    )


@pytest.mark.slow
def test_frozen_models_stored_in_int8_lie_as_their_parameters():
    mesh = MeshShape(fsdp=2, tensor=4).make()
    params = init(jax.random.key(0), model=GPT2)
    in_int8 = jax.jit(functools.partial(storage.store, dtype="int8"))
    stored = sharding.place(in_int8(params), mesh=mesh, small=64)
    kernel = stored["layers"]["mlp"]["down"]["kernel"]
    assert kernel.values.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
    assert kernel.scales.sharding.spec == PartitionSpec(None, None, "fsdp")


@pytest.mark.cases(quick=8)
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nothing_large_is_on_every_device_unsaid(model, shape):
    """A leaf larger than `small` is sharded, or the rules are refused."""
    mesh = shape.make()
    tree = jax.eval_shape(lambda: fresh(model))
    small = 16 * model.hidden_size
    placed = sharding.shardings(tree, mesh=mesh, small=small)
    for leaf, where in zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True):
        shard_size = np.prod(where.shard_shape(leaf.shape))
        if shape.fsdp * shape.tensor > 1 and leaf.size > small:
            assert shard_size < leaf.size


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embed": "tensor"}, r"embed/\w+: expected one dimension on mesh axis 'te"),
        (
            {"mlp": "rows"},
            "rules: expected an axis of the mesh, data, fsdp, context, t",
        ),
        (
            dict.fromkeys(sharding.RULES),
            r"embed/\w+: expected at most 64 numbers on every device, got",
        ),
    ],
)
def test_rules_that_are_refused(rules, message):
    mesh = MeshShape(fsdp=2, tensor=4).make()
    with pytest.raises(InputError, match=message):
        sharding.shardings(
            shapes_of(GPT2), mesh=mesh, rules={**sharding.RULES, **rules}, small=64
        )


@functools.cache
def shapes_of_known_models():
    """{name: (shapes of its parameters, of adapters of rank 16)}."""
    shapes, key = {}, jax.random.key(0)
    for name, model in registry.KNOWN.items():
        rank = lora.LoRA(rank=16)
        shapes[name] = (
            jax.eval_shape(functools.partial(decoder.init, model=model), key),
            jax.eval_shape(functools.partial(lora.init, model=model, lora=rank), key),
        )
    return shapes


@pytest.mark.parametrize(
    "shape",
    [
        *(MeshShape(fsdp=8), MeshShape(fsdp=4, tensor=2), MeshShape(fsdp=2, tensor=4)),
        *(MeshShape(tensor=8), MeshShape(fsdp=4, context=2)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_adapters_lie_on_every_mesh_that_their_base_takes(shape):
    """At the real shapes of all known models, no adapter of rank 16 is replicated."""
    mesh, refused = shape.make(), []
    for name, (base, adapters) in shapes_of_known_models().items():
        try:
            sharding.shardings(base, mesh=mesh)
        except InputError:  # 14 heads have no eight devices
            refused.append(name)
            continue
        placed = sharding.shardings(adapters, mesh=mesh)
        for leaf, where in zip(
            jax.tree.leaves(adapters), jax.tree.leaves(placed), strict=True
        ):
            if leaf.size > sharding.SMALL:
                assert np.prod(where.shard_shape(leaf.shape)) < leaf.size, name
    assert len(refused) < len(registry.KNOWN) / 2, refused


def test_an_adapter_lies_where_its_mesh_has_an_axis():
    down = jax.ShapeDtypeStruct((32, 4096, 16), np.float32)
    up = jax.ShapeDtypeStruct((32, 16, 4096), np.float32)
    query = {"query": {"lora_a": down, "lora_b": up}}
    for shape, of_down, of_up in (
        (MeshShape(fsdp=8), (None, "fsdp"), (None, None, "fsdp")),
        (MeshShape(tensor=8), (None, "tensor"), (None, None, "tensor")),
        (MeshShape(fsdp=2, tensor=4), (None, "fsdp"), (None, None, "tensor")),
        (MeshShape(data=8), (), ()),
    ):
        tree = {"layers": {"attention": query}}
        placed = sharding.shardings(tree, mesh=shape.make())
        leaves = placed["layers"]["attention"]["query"]
        assert leaves["lora_a"].spec == PartitionSpec(*of_down)
        assert leaves["lora_b"].spec == PartitionSpec(*of_up)


@pytest.mark.parametrize(
    "shape", [MeshShape(data=4, tensor=2), MeshShape(fsdp=8)], ids=str
)
@pytest.mark.slow
def test_spread_adapters_give_the_same_logprobs_and_gradients(shape):
    adapted = lora.LoRA(rank=4)
    base = fresh(GPT2).policy
    adapters = lora.init(jax.random.key(1), model=GPT2, lora=adapted)
    adapters = jax.tree.map(lambda leaf: leaf + 0.01, adapters)  # B is 0 at the start
    tokens = jax.random.randint(jax.random.key(2), (8, 6), 0, GPT2.vocab_size)

    def mean(adapters, base):
        of_both = lora.attach(base, adapters, lora=adapted)
        mask = jnp.ones_like(tokens, dtype=bool)
        return policy.logprobs(of_both, model=GPT2, tokens=tokens, mask=mask).mean()

    mesh = shape.make()
    placed = [sharding.place(one, mesh=mesh, small=64) for one in (adapters, base)]
    for leaf in jax.tree.leaves(placed[0]):
        assert leaf.size <= 64 or not leaf.is_fully_replicated
    expected = jax.jit(jax.value_and_grad(mean))(adapters, base)
    got = jax.jit(sharding.on(mesh, jax.value_and_grad(mean)))(*placed)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6),
        got,
        expected,
    )


def test_scales_of_a_kernel_that_is_sharded_along_them_are_on_every_device():
    """70B's MLP in int8 has 80 x 28,672 scales, and 8,192 times as many weights."""
    shape = jax.ShapeDtypeStruct((80, 1, 28_672), np.float32)
    kernel = jax.ShapeDtypeStruct((80, 8192, 28_672), jnp.int8)
    stored = {"mlp": {"gate": {"kernel": {"values": kernel, "scales": shape}}}}
    for mesh, of_scales in (
        (MeshShape(fsdp=8), PartitionSpec()),
        (MeshShape(fsdp=2, tensor=4), PartitionSpec(None, None, "tensor")),
    ):
        placed = sharding.shardings({"layers": stored}, mesh=mesh.make())
        leaves = placed["layers"]["mlp"]["gate"]["kernel"]
        assert leaves["scales"].spec == of_scales
        assert leaves["values"].spec[1] == "fsdp"
    with pytest.raises(InputError, match=r"expected at most 1048576 numbers on every"):
        sharding.shardings({"other": shape}, mesh=MeshShape(fsdp=8).make())


def test_an_axis_that_does_not_divide_names_the_parameter():
    model = dataclasses.replace(GPT2, intermediate_size=36)
    mesh = MeshShape(tensor=8).make()
    with pytest.raises(
        InputError,
        match=r"layers/mlp/down/bias|layers/mlp/(down|up)/\w+: expected mesh axis "
        r"'tensor' to divide its 'mlp' dimension, got 8 devices and 36 of",
    ):
        sharding.shardings(shapes_of(model), mesh=mesh)


def test_a_rule_that_is_missing():
    mesh = MeshShape(fsdp=8).make()
    with pytest.raises(InputError, match=r"rules: expected an axis .* got no rule;"):
        sharding.shardings(shapes_of(GPT2), mesh=mesh, rules={"embed": "fsdp"})


def test_meshes_that_are_refused():
    with pytest.raises(
        InputError, match=r"multiply to the 8 devices, got data=2 · fsdp=2 · tensor=1 ="
    ):
        MeshShape(data=2, fsdp=2).make()
    with pytest.raises(InputError, match="mesh fsdp: expected at least 1 device"):
        MeshShape(fsdp=0)
    with pytest.raises(InputError, match=r"mesh data: .*\nmesh dcn: .* got -1; leave"):
        MeshShape(data=0, dcn=-1)
    with pytest.raises(
        InputError,
        match="8 devices of the axes dcn, data, fsdp and expert divide, got 3; change",
    ):
        row_sharding.put_rows(toys.prompts((4, 2, 3)), mesh=MeshShape(data=8).make())


def test_a_mesh_is_one_option_of_a_command_line():
    assert MeshShape.parse("fsdp=4, tensor=2") == MeshShape(fsdp=4, tensor=2)
    shape = MeshShape(data=2, fsdp=3, tensor=5)
    assert MeshShape.parse(str(shape)) == shape
    slices = MeshShape(dcn=2, fsdp=4)
    assert MeshShape.parse(str(slices)) == slices
    assert slices.rows == 8
    for text in ("", "fsdp", "fsdp=2,fsdp=2", "rows=2", "data=-1", "data=2.0"):
        with pytest.raises(
            InputError, match="expected sizes of dcn, data, fsdp, expert, context"
        ):
            MeshShape.parse(text)
    with pytest.raises(InputError, match="at least 1 device"):
        MeshShape.parse("data=0")


@dataclasses.dataclass(frozen=True)
class OfSlice:
    """The attributes of a device that a mesh of slices reads."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "a chip"


def test_a_slice_is_a_place_on_dcn():
    """In any order of the devices, also for devices without a slice index."""
    devices = [OfSlice(id, slice_index=id // 4) for id in (0, 4, 1, 5, 2, 6, 3, 7)]
    mesh = MeshShape(dcn=2, fsdp=2, tensor=2).make(devices)
    assert mesh.shape["dcn"] == 2
    for number, laid in enumerate(mesh.devices):
        assert {device.slice_index for device in laid.flat} == {number}
    ids = np.vectorize(lambda device: device.id)(
        MeshShape(dcn=2, fsdp=4).make().devices
    )
    assert ids.reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(InputError, match="expected the 2 slices of the devices, got 4"):
        MeshShape(dcn=4, fsdp=2).make(devices)


@pytest.mark.slow
def test_a_model_in_pinned_host_memory_stays_there():
    params = init(jax.random.key(0), model=GPT2)
    reference = jax.jit(functools.partial(frozen.freeze, memory="pinned_host"))(params)
    placed = sharding.place(
        reference, mesh=MeshShape(fsdp=2, tensor=4).make(), small=64
    )
    kinds = {
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(placed.stored["layers"])
    }
    assert kinds == {"pinned_host"}


def test_meshes_and_batches_that_are_not_ours():
    explicit = jax.make_mesh((8,), ("data",))
    if any(kind != AxisType.Auto for kind in explicit.axis_types):
        with pytest.raises(InputError, match=r"expected axes of AxisType\.Auto, got"):
            row_sharding.put_rows(toys.prompts(LENGTHS), mesh=explicit)
    with pytest.raises(
        InputError, match="expected one as an argument or set, got none"
    ):
        sharding.shardings(shapes_of(GPT2))
    with pytest.raises(InputError, match=r"expected arrays .* got the scalar 3"):
        row_sharding.put_rows({"step": 3}, mesh=MeshShape(data=8).make())
    other = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    rules = {**dict.fromkeys(sharding.RULES), "embed": "model"}
    specs = sharding.shardings(shapes_of(GPT2), mesh=other, rules=rules)
    assert specs["embed"]["tokens"].spec == PartitionSpec(None, "model")


# --- the same numbers -------------------------------------------------------------

ALGORITHM = ppo.PPO(
    model=GPT2,
    critic_model=GPT2,
    policy_optimizer=optax.sgd(0.1),
    critic_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=2,
    num_minibatches=2,
)
PARAMS = toys.params(GPT2)
REFERENCE = toys.params(GPT2, seed=3)
SCORER = toys.scorer(GPT2, seed=1)
LENGTHS = (4, 2, 3, 1) * 4


def iterate(settings, *, mesh=None):
    """One iteration: (scored rollout, means, parameters after it)."""
    prompts = toys.prompts(LENGTHS)
    train = fresh(optimizer=settings.policy_optimizer, policy=PARAMS)
    reference, scorer = toys.freeze(REFERENCE), toys.freeze(SCORER)
    if mesh is not None:
        place = functools.partial(sharding.place, mesh=mesh)
        train, reference, scorer = place(train), place(reference), place(scorer)
        prompts = row_sharding.put_rows(prompts, mesh=mesh)
    after, stats, scored = toys.jit(functools.partial(ppo.iteration, recipe=settings))(
        train,
        prompts=prompts,
        frozen=FrozenModels(reference=reference),
        reward=rewards.from_model(scorer, model=GPT2),
        key=KEY,
    )
    return scored, masked.mean_stats(stats), (after.policy, after.critic)


@functools.cache
def alone(optimizer):
    return iterate(SETTINGS[optimizer])


SETTINGS = {
    "sgd": ALGORITHM,
    "adam": dataclasses.replace(
        ALGORITHM,
        policy_optimizer=optax.adam(1e-3, eps=1e-5),
        critic_optimizer=optax.adam(1e-3, eps=1e-5),
    ),
}


IN_CI = [MeshShape(data=2, fsdp=2, tensor=2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "shape"),
    [
        pytest.param(
            *(optimizer, shape),
            marks=[pytest.mark.long] * (shape not in IN_CI or optimizer == "adam"),
        )
        for optimizer in SETTINGS
        for shape in MESHES
    ],
    ids=str,
)
def test_an_iteration_is_that_of_one_device(optimizer, shape):
    mesh = shape.make()
    with jax.set_mesh(mesh):
        scored, means, params = iterate(SETTINGS[optimizer], mesh=mesh)
    expected_scored, expected_means, expected_params = alone(optimizer)
    np.testing.assert_array_equal(scored.rollout.tokens, expected_scored.rollout.tokens)
    np.testing.assert_allclose(scored.scores, expected_scored.scores, atol=1e-5)
    assert means.keys() == expected_means.keys()
    for name, value in expected_means.items():
        # Scores in standard deviations are of rounding alone.
        near = 1e-2 if name.endswith("_z") else 1e-5
        np.testing.assert_allclose(
            means[name], value, rtol=1e-5, atol=near, err_msg=name
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        params,
        expected_params,
    )


@pytest.mark.slow
def test_devices_do_not_change_a_prompt_s_samples():
    """Compares eight prompts alone on one device with the same among 16 on eight."""
    mesh = MeshShape(data=4, fsdp=2).make()
    few = toys.sampled(PARAMS, model=GPT2, lengths=LENGTHS[:8])
    with jax.set_mesh(mesh):
        many = toys.sample(
            sharding.place(PARAMS, mesh=mesh),
            model=GPT2,
            prompts=row_sharding.put_rows(toys.prompts(LENGTHS), mesh=mesh),
            key=jax.random.key(5),
            max_new_tokens=toys.SIZE,
            stop_ids=toys.STOP,
            temperature=0.7,
        )
    # The prompts of `toys` depend on how many there are: compare those that are equal.
    same = np.flatnonzero(
        (np.asarray(few.tokens)[:, :4] == np.asarray(many.tokens)[:8, :4]).all(axis=1)
    )
    assert len(same)
    np.testing.assert_array_equal(
        np.asarray(few.tokens)[same], np.asarray(many.tokens)[same]
    )


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("shape", [MeshShape(fsdp=4, tensor=2), MeshShape(tensor=8)])
@pytest.mark.parametrize("family", MODELS)
def test_a_checkpoint_is_read_in_parts_to_where_they_lie(
    family, shape, tmp_path, monkeypatch
):
    """GPT-2 has fused tensors in our orientation; both have a padded vocabulary."""
    model = MODELS[family]
    whole = toys.params(model)
    hf.save(tmp_path / "model", model, whole)
    parts = []
    read = mapping.Unread.__getitem__

    def counted(leaf, index):
        part = read(leaf, index)
        parts.append((part.size, np.prod(leaf.shape)))
        return part

    monkeypatch.setattr(mapping.Unread, "__getitem__", counted)
    small = 24 * model.hidden_size
    where = functools.partial(sharding.shardings, mesh=shape.make(), small=small)
    _, params = hf.load(tmp_path / "model", sharding=where)
    chex.assert_trees_all_equal(params, without_padding(whole, model))
    assert all(part < size for part, size in parts if size > small)
    table = params["embed"]["tokens"]
    assert table.sharding.spec[0] == "tensor"


@pytest.mark.slow
def test_models_and_batches_of_an_experiment_lie_on_the_mesh(tmp_path):
    toy_files.checkpoint(tmp_path / "model")
    scorer = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    hf.save_reward(
        tmp_path / "reward", toy_files.MODEL, scorer, tokenizer=toy_files.tokenizer()
    )
    mesh = MeshShape(data=4, tensor=2).make()
    where = functools.partial(sharding.shardings, mesh=mesh)
    policy = pretrained.load(str(tmp_path / "model"), sharding=where)
    loader, copy = Loader(policy, mesh), frozen_models.COPY
    reference = loader.reference(str(tmp_path / "model"), storage=copy)
    reward = loader.reward_model(str(tmp_path / "reward"), storage=copy)
    for params in (
        policy.params,
        reference.stored,
        loader.reference(None, storage=copy).stored,
        reward.frozen.stored["trunk"],
    ):
        kernel = params["layers"]["mlp"]["up"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec(None, None, "tensor")
    plain = batches.prompt_batches([[3], [4, 5], [6]], batch_size=8, seed=0, pad_id=0)
    placed = plain.map(functools.partial(row_sharding.put_rows, mesh=mesh))
    assert placed.steps_per_epoch == plain.steps_per_epoch
    chex.assert_trees_all_equal(placed[2], plain[2])
    assert placed[2].tokens.sharding.spec == PartitionSpec(("data",))


def without_padding(params, model):
    """Sets the vocabulary's padding rows to zero: they are not saved."""
    copied = jax.tree.map(jnp.copy, params)
    copied["embed"]["tokens"] = copied["embed"]["tokens"].at[model.vocab_size :].set(0)
    if not model.tied_head:
        copied["head"]["kernel"] = (
            copied["head"]["kernel"].at[model.vocab_size :].set(0)
        )
    return copied


@pytest.mark.slow
def test_a_frozen_model_has_one_fingerprint_wherever_it_lies():
    mesh = MeshShape(fsdp=4, tensor=2).make()
    reference = toys.freeze(PARAMS)
    apart = frozen.freeze(sharding.place(PARAMS, mesh=mesh))
    assert frozen.fingerprint_of(apart).root == frozen.fingerprint_of(reference).root
    frozen.verify(apart)
