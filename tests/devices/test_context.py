"""Rows with columns sharded over devices give the numbers of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from rlhf_jax import config, decoder
from rlhf_jax.devices import placement, row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes, layout
from rlhf_jax.models.config import GlobalHeads
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles import critic, policy, rewards
from rlhf_jax.runs import command_line
from rlhf_jax.train.methods import grpo

LLAMA = config.llama(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    max_positions=40,
)
MODELS = {
    "gpt2": config.gpt2(
        vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, max_positions=30
    ),
    "llama": LLAMA,
    "windows and soft caps": dataclasses.replace(
        LLAMA,
        sliding_window=6,
        local_layers=(True, False),
        attention_softcap=2.0,
        logit_softcap=3.0,
        query_scale=0.3,
    ),
}
ROWS, COLUMNS = 8, 29  # which no mesh divides


def texts():
    """Tokens and mask, padded left and right."""
    rng = np.random.default_rng(0)
    column = np.arange(COLUMNS)
    left, right = rng.integers(0, 14, ROWS), rng.integers(0, 8, ROWS)
    mask = (column >= left[:, None]) & (column < COLUMNS - right[:, None])
    tokens = np.where(mask, rng.integers(0, 50, mask.shape), 0)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(mask)


def computed(params, tokens, mask, *, model):
    """Every number computed from hidden states, and the gradient of their sum."""
    score = {"kernel": jnp.linspace(-1, 1, 32), "bias": jnp.float32(0.3)}
    weights = jnp.sin(jnp.arange(mask.size, dtype=jnp.float32)).reshape(mask.shape)

    def numbers(params):
        options = {"model": model, "tokens": tokens, "mask": mask}
        texts = texts_of(tokens, mask, first_column=3)
        reference = jax.tree.map(lambda x: 1.1 * x, params)
        hidden = decoder.hidden_states(params, **options)
        ref_hidden = decoder.hidden_states(reference, **options, first_column=2)
        logprobs, entropy = policy.logprobs_and_entropy(
            params, **options, first_column=3, temperature=0.7
        )
        kl = {
            k: policy.exact_kl(
                *(params, hidden, reference, ref_hidden),
                texts=texts,
                model=model,
                top_k=k,
            )
            for k in (None, 4)
        }
        head, inside = policy.exact_kl(
            *(params, hidden, reference, ref_hidden),
            texts=texts,
            model=model,
            top_k=4,
            sampled_tail=True,
        )
        assert inside.dtype == bool
        scorer = {"trunk": params, "score": score}
        return {
            "log-probs": logprobs,
            "entropy": entropy,
            "exact KL": kl[None],
            "KL of four": kl[4],
            "of the four alone": head,
            "whose token is of the four": jnp.where(inside, 1.0, 0.0),
            "values": critic.values(scorer, **options, first_column=3),
            "scores": rewards.sequence_scores(scorer, **options),
        }

    def total(params):
        outputs = numbers(params)
        per_token = sum(x for x in outputs.values() if x.ndim == 2)
        return (per_token * weights).sum() + outputs["scores"].sum(), outputs

    gradient, outputs = jax.grad(total, has_aux=True)(params)
    return outputs, gradient


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        (MeshShape(fsdp=2, context=4), "xla"),
        (MeshShape(data=2, context=2, tensor=2), "blockwise"),
        (MeshShape(fsdp=2, context=2, tensor=2), "ring"),
        (MeshShape(context=8), "ring"),
    ],
)
def test_numbers_and_gradients_are_those_of_one_device(name, shape, engine):
    model = dataclasses.replace(MODELS[name], attention=engine, remat="full")
    params, mesh = toys.params(model), shape.make()
    run = jax.jit(computed, static_argnames="model")
    expected = run(params, *texts(), model=model)
    on_mesh = jax.jit(sharding.on(mesh, computed), static_argnames="model")
    output = on_mesh(
        sharding.place(params, mesh=mesh),
        *row_sharding.put_rows(texts(), mesh=mesh),
        model=model,
    )
    for mine, other in zip(
        jax.tree.leaves(output), jax.tree.leaves(expected), strict=True
    ):
        scale = max(1, np.abs(other).max())
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_no_device_holds_a_row_of_hidden_states_or_its_logits():
    """Asserted on the compiled program, where the number of columns is unique."""
    model = dataclasses.replace(LLAMA, attention="blockwise", max_positions=400)
    mesh = MeshShape(fsdp=2, context=4).make()
    columns = 8 * 47
    shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    where = sharding.shardings(shapes, mesh=mesh)
    params = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        shapes,
        where,
    )
    rows = jax.ShapeDtypeStruct((2, columns), jnp.int32)
    [at] = jax.tree.leaves(row_sharding.row_shardings([rows], mesh=mesh))
    tokens = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=at)

    def loss(params, tokens):
        mask = tokens > 0
        return policy.logprobs(params, model=model, tokens=tokens, mask=mask).sum()

    program = jax.jit(sharding.on(mesh, jax.grad(loss))).lower(params, tokens)
    text = program.compile().as_text()
    assert f"f32[{columns // 4},32]" in text  # what a device has, its columns
    assert f"{columns},32]" not in text
    assert f"{columns - 1},32]" not in text


def test_columns_are_balanced():
    """The queries of every device see the same number of keys."""
    columns = axes.balanced(48, count=4).reshape(4, -1)
    assert sorted(columns.reshape(-1)) == list(range(48))
    assert len(set((columns + 1).sum(axis=1).tolist())) == 1
    assert (np.diff(columns, axis=1) > 0).all()


def test_what_cannot_share_columns_is_refused():
    assert str(MeshShape.parse("fsdp=2,context=4")).endswith("context=4")
    sampler = placement.Place.parse("data=2,context=4")
    with pytest.raises(InputError, match="no columns to share"):
        placement.Placement(sampler=sampler)
    with pytest.raises(
        InputError, match="expected attention xla, blockwise, splash or ring"
    ):
        layout.refuse_context("cudnn", context=2)
    with pytest.raises(InputError, match="axis, whose devices pass keys round, for"):
        layout.refuse_context("ring", context=1)
    layout.refuse_context("auto", context=2)
    words = ("--out=o", "--model=m", "--prompts=p", "--verifier=exact")
    message = "--packing cannot be combined with --placement.policy context=N"
    with pytest.raises(InputError, match=message):
        command_line.parse(
            grpo.Config,
            description="",
            argv=[*words, "--packing=auto", "--placement.policy=context=4"],
        )


def test_auto_leaves_an_engine_that_has_no_context_axis():
    model = dataclasses.replace(LLAMA, dtype="bfloat16", attention="auto")
    options = {"columns": 4096, "backend": "gpu"}
    assert layout.choose(model, **options).engine == "cudnn"
    choice = layout.choose(model, **options, context=4)
    assert choice == ("blockwise", "as cudnn has no context axis")


def test_auto_passes_keys_round_that_are_too_many_to_gather():
    """256k tokens of two heads of 512 numbers take 1 GiB in bfloat16."""
    model = dataclasses.replace(LLAMA, head_dim=512, dtype="bfloat16", attention="auto")
    options = {"backend": "tpu", "context": 4}
    assert layout.choose(model, columns=2**18, **options).engine == "splash"
    choice = layout.choose(model, columns=2**18 + 8, **options)
    assert choice == ("ring", "as keys and values of a row take 1.0 GiB per layer")
    alone = layout.choose(model, columns=2**19, backend="tpu", context=1)
    assert alone.engine == "splash"
    # Devices that share the heads gather those of their own, and one at the least.
    for tensor, most in ((2, 2**19), (4, 2**19), (3, 2**18)):
        shared = {**options, "tensor": tensor}
        assert layout.choose(model, columns=most, **shared).engine == "splash"
        assert layout.choose(model, columns=most + 8, **shared).engine == "ring"


def test_auto_counts_the_largest_kind_of_layer():
    """Of layers with two heads of 64 numbers, and of 512 in those that see all."""
    model = dataclasses.replace(
        LLAMA,
        dtype="bfloat16",
        attention="auto",
        head_dim=64,
        sliding_window=4,
        local_layers=(True, False),
        global_heads=GlobalHeads(head_dim=512, num_kv_heads=2),
    )
    options = {"backend": "tpu", "context": 4}
    assert layout.choose(model, columns=2**18, **options).engine == "splash"
    assert layout.choose(model, columns=2**18 + 8, **options).engine == "ring"


def test_rows_that_no_devices_share_have_no_ring():
    """Prompts to sample from, and a reference on its own mesh."""
    model = dataclasses.replace(LLAMA, attention="ring")
    options = {"columns": 4096, "backend": "cpu"}
    assert layout.choose(model, **options, context=4) == ("ring", "as asked")
    assert layout.choose(model, **options, context=1).engine == "blockwise"
