"""Rematerialisation: the same gradients, in less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy_files

from rlhf_jax import config, decoder, frozen, hf, lora, sft
from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import adapted_params

REMATS = ["dots", "full"]
ROWS, SIZE, WIDTH = 8, 64, 64
GPT2 = config.gpt2(
    vocab_size=64, hidden_size=WIDTH, num_layers=8, num_heads=2, max_positions=SIZE
)
LLAMA = config.llama(
    vocab_size=64,
    hidden_size=WIDTH,
    num_layers=8,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=3 * WIDTH,
    max_positions=SIZE,
)


def texts(lengths, size):
    tokens, mask = tiny.batch(lengths, size, side="right")
    return Sequences(tokens=tokens, mask=mask, response_mask=mask)


def value_and_grad(trained, batch, *, model, base=None, adapters=None):
    """Value and gradient of the language-model loss per token."""

    def loss(trained):
        params = adapted_params(trained, base=base, lora=adapters)
        num_tokens = sft.predicted(batch).sum(dtype=jnp.float32)
        return sft.loss(params, batch, model=model, num_tokens=num_tokens)[0]

    return jax.value_and_grad(loss)(trained)


def assert_near(output, expected):
    """Asserts equality within 1e-6 of the largest entry of each leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-6 * np.abs(np.asarray(b)).max()
        ),
        output,
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [pytest.param(tiny.GPT2, marks=pytest.mark.long), tiny.LLAMA],
    ids=tiny.NAMES,
)
def test_remat_changes_no_number(model):
    batch, params = texts((7, 4, 1), 7), tiny.params(model)
    compute = jax.jit(value_and_grad, static_argnames="model")
    expected = compute(params, batch, model=model)
    for remat in REMATS:
        again = dataclasses.replace(model, remat=remat)
        assert_near(compute(params, batch, model=again), expected)


def temporaries(model):
    """Temporary bytes of the gradient's program."""
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    compute = jax.jit(functools.partial(value_and_grad, model=model))
    program = compute.lower(params, texts([SIZE] * ROWS, SIZE)).compile()
    return program.memory_analysis().temp_size_in_bytes


def temporaries_in_arrays(model, *, remat, num_layers):
    """The temporary bytes in units of an f32[ROWS, SIZE, WIDTH]."""
    model = dataclasses.replace(model, remat=remat, num_layers=num_layers)
    return temporaries(model) / (4 * ROWS * SIZE * WIDTH)


def kept_of_a_layer(model, *, remat):
    """The temporaries that one more layer adds."""
    need = functools.partial(temporaries_in_arrays, model, remat=remat)
    return (need(num_layers=16) - need(num_layers=8)) / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dots"),
    [
        # input, query, key, value, output and up (4); down's is only added.
        (GPT2, 1 + 3 + 1 + 4),
        # Half a key, half a value; up and gate (3 each).
        pytest.param(LLAMA, 1 + 2 + 1 + 6, marks=pytest.mark.long),
    ],
    ids=["gpt2", "llama"],
)
def test_what_a_gradient_keeps_of_a_layer(model, dots):
    assert kept_of_a_layer(model, remat="full") == pytest.approx(1, rel=0.01)
    assert kept_of_a_layer(model, remat="dots") == pytest.approx(dots, rel=0.01)
    # And the attention's weights, a head's being [ROWS, SIZE, SIZE]; what attention
    # returns, both norms (what they return and what they scale) and the activation.
    least = dots + 2 * SIZE / WIDTH + 1 + 4 + model.intermediate_size / WIDTH
    everything = temporaries_in_arrays(model, remat="none", num_layers=16)
    assert least < everything / 16 < 4 * least


@pytest.mark.long
def test_a_stored_base_is_not_kept_as_it_was_read():
    """A gradient by adapters reads the base's layers in float32 one at a time."""
    adapters = lora.LoRA(rank=2)
    small = dataclasses.replace(GPT2, num_layers=32, max_positions=8)
    params = tiny.params(small)
    base = frozen.freeze(params, dtype="int8")
    trained = jax.tree.map(
        lambda leaf: leaf + 0.1,
        lora.init(jax.random.key(1), model=small, lora=adapters),
    )
    batch = texts((8,), 8)
    memory_of = {}
    for remat in ["none", "dots"]:
        model = dataclasses.replace(small, remat=remat)
        compute = jax.jit(
            functools.partial(value_and_grad, model=model, adapters=adapters)
        )
        program = compute.lower(trained, batch, base=base).compile()
        room = program.memory_analysis().temp_size_in_bytes
        assert room < storage.nbytes(params["layers"]) / 4
        memory_of[remat] = program(trained, batch, base=base)
    assert_near(memory_of["dots"], memory_of["none"])


def test_a_name_that_is_none():
    expected = r"remat: expected one of 'none', 'dots', 'full', got 'all'"
    with pytest.raises(InputError, match=expected):
        dataclasses.replace(GPT2, remat="all")


@pytest.mark.slow
def test_remat_is_of_a_run_and_not_of_a_checkpoint(tmp_path):
    folder = str(toy_files.checkpoint(tmp_path / "model"))
    start = pretrained.load(folder, remat="full")
    expected = dataclasses.replace(toy_files.MODEL, remat="full")
    assert start.model == layout.fastest(expected)
    hf.save(tmp_path / "again", start.model, start.params, tokenizer=start.tokenizer)
    assert hf.model_config(tmp_path / "again") == toy_files.MODEL
    # The reference has no gradient; a critic may begin as the reward model.
    loader, copy = Loader(start), frozen_models.COPY
    loader.reference(str(tmp_path / "again"), storage=copy)
    trunk = {name: start.params[name] for name in ("embed", "layers", "final_norm")}
    score = {"kernel": np.zeros(16, np.float32), "bias": np.float32(0)}
    hf.save_reward(
        *(tmp_path / "reward", start.model, {"trunk": trunk, "score": score}),
        tokenizer=start.tokenizer,
    )
    reward = loader.reward_model(str(tmp_path / "reward"), storage=copy)
    assert reward.model == start.model
