"""A decoded token has the sums of its layers as exchanges, and adapters add none."""

import dataclasses
import functools

import gate
import jax
import numpy as np
import pytest
import toys

from rlhf_jax import config, decode, lora
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.planning import decoding

MODEL = config.llama(
    vocab_size=256,
    hidden_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    intermediate_size=256,
    max_positions=24,
)
OTHERS = {
    "DeltaNets": dataclasses.replace(
        MODEL,
        delta_net=config.DeltaNet(4, 8, key_dim=16, value_dim=16),
        recurrent_layers=(True, False),
    ),
    "embeddings of each layer": dataclasses.replace(MODEL, per_layer_width=16),
}
LORA = lora.LoRA(rank=4)
ROWS, PROMPT, NEW = 16, 4, 4
FEW = 4  # gathers of tokens that were drawn, which XLA:CPU does not combine


def responses(base, adapters, model=MODEL):
    params = lora.attach(base, adapters, lora=LORA) if adapters else base
    tokens = 1 + np.arange(ROWS * PROMPT, dtype=np.int32).reshape(ROWS, PROMPT)
    return decode.generate(
        params,
        model=model,
        tokens=tokens,
        mask=np.ones_like(tokens, bool),
        keys=jax.random.split(jax.random.key(2), ROWS),
        max_new_tokens=NEW,
        stop_ids=(0,),
    )


def compiled(shape, adapters, model=MODEL):
    """The program and its inputs; adapters are sharded like those of a large model."""
    mesh = shape.make()
    placed = tuple(
        sharding.place(tree, mesh=mesh, small=2 * MODEL.hidden_size)
        for tree in (toys.params(model), adapters)
    )
    function = sharding.on(mesh, functools.partial(responses, model=model))
    return jax.jit(function).lower(*placed).compile(), placed


def exchanges(program):
    reader = gate.Reader(program.as_text())
    [body] = reader.token_loops()
    return [kind for kind, _ in gate.collectives(reader, reader.inside(body))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [MeshShape(data=2, tensor=4), MeshShape(tensor=8)], ids=str
)
def test_a_token_of_adapters_takes_the_exchanges_of_its_base(shape):
    made = lora.init(jax.random.key(1), model=MODEL, lora=LORA)
    adapters = toys.perturbed(made, seed=4, scale=0.1)
    program, placed = compiled(shape, adapters)
    of_base, placed_base = compiled(shape, {})
    query = placed[1]["layers"]["attention"]["query"]
    assert not query["lora_a"].is_fully_replicated  # else the base's count is no news
    kinds = exchanges(program)
    assert kinds == exchanges(of_base)
    token = decoding.token(MODEL, mesh=shape, rows=ROWS, columns=PROMPT, weight_bytes=4)
    assert token.collectives <= len(kinds) <= token.collectives + FEW
    expected = jax.jit(responses)(toys.params(MODEL), adapters)
    output = program(*placed)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    plain = of_base(*placed_base)
    assert np.abs(plain.logprobs - expected.logprobs).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_token_of_other_layers_takes_two_sums_per_layer(name):
    model, shape = OTHERS[name], MeshShape(data=2, tensor=4)
    program, placed = compiled(shape, {}, model)
    kinds = exchanges(program)
    token = decoding.token(model, mesh=shape, rows=ROWS, columns=PROMPT, weight_bytes=4)
    # One more sum of embeddings, from a second table.
    least = token.collectives + (model.per_layer_width is not None)
    assert least <= len(kinds) <= least + FEW, kinds
    plain = functools.partial(responses, model=model)
    expected, output = jax.jit(plain)(toys.params(model), {}), program(*placed)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
