"""Adapters of experts, and experts in int8."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import FIXTURES
from tiers import one_in

from rlhf_jax import decoder, frozen, hf, lora
from rlhf_jax.checkpoints import peft
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.leaves import Int8

pytestmark = pytest.mark.usefixtures("quick_compilation")
HOW = lora.LoRA(rank=2, alpha=4.0)
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)


@functools.cache
def loaded(name):
    return hf.load(FIXTURES / name, dtype="float32")


@functools.partial(jax.jit, static_argnames="model")
def hidden(params, *, model):
    mask = jnp.ones(TOKENS.shape, bool)
    return decoder.hidden_states(params, model=model, tokens=TOKENS, mask=mask)


def adapters_of(model):
    shapes = jax.eval_shape(
        functools.partial(lora.init, model=model, lora=HOW), jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), shapes
    )


@pytest.mark.slow
def test_every_expert_has_an_adapter_which_is_merged_and_written(tmp_path):
    model, params = loaded("mixtral")
    adapters = adapters_of(model)
    assert "router" not in adapters["layers"]["experts"]
    up = adapters["layers"]["experts"]["up"]
    assert up["lora_a"].shape == (3, 4, 32, 2)
    assert up["lora_b"].shape == (3, 4, 2, 24)
    beside = hidden(lora.attach(params, adapters, lora=HOW), model=model)
    merged = hidden(lora.merge(params, adapters, lora=HOW), model=model)
    assert np.abs(beside - hidden(params, model=model)).max() > 0.1
    np.testing.assert_allclose(beside, merged, atol=1e-3)
    base = jax.jit(frozen.freeze)(params)
    root = frozen.source_fingerprint_of(base).root
    peft.save(
        tmp_path / "out",
        model=model,
        adapters=adapters,
        lora=HOW,
        base_fingerprint=root,
    )
    _, again = peft.load(tmp_path / "out", model=model, base=base)
    chex.assert_trees_all_equal(again, adapters)


@pytest.mark.parametrize("name", one_in(2, ["gpt_oss", "gemma4_moe"]))
def test_adapters_of_one_tensor_of_all_experts_have_no_name(tmp_path, name):
    model, _ = loaded(name)
    with pytest.raises(InputError, match=r"experts/down, .* of g\w+, each one "):
        peft.save(
            tmp_path / "out",
            model=model,
            adapters=adapters_of(model),
            lora=HOW,
            base_fingerprint="",
        )


@pytest.mark.slow
def test_adapters_of_experts_beside_an_mlp_are_merged():
    model, params = loaded("gemma4_moe")
    adapters = adapters_of(model)
    assert adapters["layers"]["experts"]["up"]["lora_b"].shape == (4, 8, 2, 12)
    assert adapters["layers"]["mlp"]["up"]["lora_b"].shape == (4, 2, 48)
    attached = hidden(lora.attach(params, adapters, lora=HOW), model=model)
    merged = hidden(lora.merge(params, adapters, lora=HOW), model=model)
    assert np.abs(attached - hidden(params, model=model)).max() > 0.1
    np.testing.assert_allclose(attached, merged, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scales"), [("mixtral", (3, 4, 1, 24)), ("gemma4_moe", (4, 8, 1, 12))]
)
def test_experts_are_kept_in_int8_and_their_router_is_not(name, scales):
    model, params = loaded(name)
    stored = frozen.freeze(params, dtype="int8")
    experts = stored.stored["layers"]["experts"]
    assert isinstance(experts["up"]["kernel"], Int8)
    assert experts["up"]["kernel"].scales.shape == scales
    assert experts["router"]["weight"].dtype == jnp.float32
    if name == "gemma4_moe":
        assert experts["scale"].dtype == experts["router"]["scale"].dtype == jnp.float32
    near = hidden(stored.stored, model=model)
    exact = hidden(params, model=model)
    assert 0 < np.abs(near - exact).mean() < 0.1
