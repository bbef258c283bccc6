import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import drift
from rlhf_jax.roles.reference import storage

weight_drift = jax.jit(drift.weight_drift)


def tree(scale=1.0):
    rng = np.random.default_rng(0)
    return {
        "embed": {"tokens": (scale * rng.normal(size=(5, 4))).astype(np.float32)},
        "layers": {"kernel": (scale * rng.normal(size=(3, 4, 4))).astype(np.float32)},
        "final_norm": {"bias": np.zeros(4, np.float32)},
    }


def tensors(params):
    """The parameters as a checkpoint has them: one tensor per layer."""
    return [
        params["embed"]["tokens"],
        *params["layers"]["kernel"],
        params["final_norm"]["bias"],
    ]


def as_jax(params):
    return {
        name: {key: jnp.asarray(leaf) for key, leaf in leaves.items()}
        for name, leaves in params.items()
    }


def test_drift_is_a_sum_of_norms_over_the_tensors_of_a_checkpoint():
    reference, params = tree(), tree()
    params["layers"]["kernel"][1] += 0.3
    params["embed"]["tokens"][2, 3] -= 2.0
    table = weight_drift(as_jax(params), as_jax(reference))
    moved = sum(
        np.linalg.norm(np.float64(a) - b)
        for a, b in zip(tensors(params), tensors(reference), strict=True)
    )
    size = sum(np.linalg.norm(np.float64(b)) for b in tensors(reference))
    assert float(table["absolute"]) == pytest.approx(moved, rel=1e-5)
    assert float(table["relative"]) == pytest.approx(moved / size, rel=1e-5)
    # As one vector of 20 + 48 + 4 numbers: 16 of them moved by 0.3 and one by 2.
    vector = np.concatenate([np.ravel(tensor) for tensor in tensors(reference)])
    expected = np.sqrt(16 * 0.3**2 + 2.0**2) / np.linalg.norm(np.float64(vector))
    assert float(table["global_norm"]) == pytest.approx(expected, rel=1e-5)
    modules = table["modules"]
    assert list(modules) == ["embed/tokens", "final_norm/bias", "layers/kernel"]
    kernel = modules["layers/kernel"]
    sizes = [np.linalg.norm(layer) for layer in reference["layers"]["kernel"]]
    np.testing.assert_allclose(kernel["absolute"], [0, 1.2, 0], rtol=1e-5)
    np.testing.assert_allclose(kernel["size"], sizes, rtol=1e-5)
    np.testing.assert_allclose(kernel["relative"], [0, 1.2 / sizes[1], 0], rtol=1e-5)
    assert float(modules["embed/tokens"]["absolute"]) == pytest.approx(2, rel=1e-5)
    for name in ("absolute", "relative", "size"):
        assert float(modules["final_norm/bias"][name]) == 0


def test_equal_trees_have_not_drifted_and_a_scaled_one_by_its_scale():
    reference = as_jax(tree())
    assert float(weight_drift(reference, reference)["absolute"]) == 0
    scaled = weight_drift(as_jax(tree(1.25)), reference)
    assert float(scaled["relative"]) == pytest.approx(0.25, rel=1e-5)
    assert float(scaled["global_norm"]) == pytest.approx(0.25, rel=1e-5)
    kernel = scaled["modules"]["layers/kernel"]
    np.testing.assert_allclose(kernel["relative"], 0.25, rtol=1e-5)


def test_a_moved_tensor_of_zeros_and_a_bfloat16_reference():
    params, reference = as_jax(tree()), as_jax(tree())
    params["final_norm"]["bias"] = jnp.ones(4)
    reference["embed"]["tokens"] = reference["embed"]["tokens"].astype(jnp.bfloat16)
    table = weight_drift(params, reference)
    assert np.isinf(table["modules"]["final_norm/bias"]["relative"])
    assert table["absolute"].dtype == jnp.float32
    assert 2.0 < float(table["absolute"]) < 2.05


@pytest.mark.slow
def test_a_reference_in_int8_is_compared_as_it_is_read():
    """Rounding counts as drift: here that between a tensor and its int8 form."""
    params = as_jax(tree())
    stored = storage.store(params, dtype="int8")
    table = weight_drift(params, stored)
    kernel = stored["layers"]["kernel"]
    kernel_as_read = np.float64(kernel.values) * np.float64(kernel.scales)
    moved = [
        np.linalg.norm(np.float64(layer) - read)
        for layer, read in zip(params["layers"]["kernel"], kernel_as_read, strict=True)
    ]
    assert min(moved) > 0
    np.testing.assert_allclose(
        table["modules"]["layers/kernel"]["absolute"], moved, rtol=1e-4
    )
    assert 0 < float(table["relative"]) < 0.01


def test_trees_of_two_structures():
    other = as_jax(tree())
    del other["final_norm"]
    with pytest.raises(
        ValueError, match=r"one structure, got leaves .*final_norm/bias"
    ):
        weight_drift(as_jax(tree()), other)
