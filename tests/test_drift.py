import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import drift


def tree(scale=1.0):
    rng = np.random.default_rng(0)
    return {
        "embed": {"tokens": (scale * rng.normal(size=(5, 4))).astype(np.float32)},
        "layers": {"kernel": (scale * rng.normal(size=(3, 4, 4))).astype(np.float32)},
        "final_norm": {"bias": np.zeros(4, np.float32)},
    }


def tensors(params):
    """As a checkpoint holds them: one tensor a layer."""
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
    found = drift.weight_drift(as_jax(params), as_jax(reference))
    moved = sum(
        np.linalg.norm(np.float64(a) - b)
        for a, b in zip(tensors(params), tensors(reference), strict=True)
    )
    size = sum(np.linalg.norm(np.float64(b)) for b in tensors(reference))
    assert float(found["absolute"]) == pytest.approx(moved, rel=1e-5)
    assert float(found["relative"]) == pytest.approx(moved / size, rel=1e-5)
    modules = found["modules"]
    assert list(modules) == ["embed/tokens", "final_norm/bias", "layers/kernel"]
    expected = 1.2 / np.linalg.norm(reference["layers"]["kernel"][1])
    np.testing.assert_allclose(modules["layers/kernel"], [0, expected, 0], rtol=1e-5)
    assert float(modules["final_norm/bias"]) == 0


def test_equal_trees_have_not_drifted_and_a_scaled_one_by_its_scale():
    reference = as_jax(tree())
    assert float(drift.weight_drift(reference, reference)["absolute"]) == 0
    scaled = drift.weight_drift(as_jax(tree(1.25)), reference)
    assert float(scaled["relative"]) == pytest.approx(0.25, rel=1e-5)
    np.testing.assert_allclose(scaled["modules"]["layers/kernel"], 0.25, rtol=1e-5)


def test_a_moved_tensor_of_zeros_and_a_bfloat16_reference():
    params, reference = as_jax(tree()), as_jax(tree())
    params["final_norm"]["bias"] = jnp.ones(4)
    reference["embed"]["tokens"] = reference["embed"]["tokens"].astype(jnp.bfloat16)
    found = drift.weight_drift(params, reference)
    assert np.isinf(found["modules"]["final_norm/bias"])
    assert found["absolute"].dtype == jnp.float32
    assert 2.0 < float(found["absolute"]) < 2.05


def test_trees_of_two_structures():
    other = as_jax(tree())
    del other["final_norm"]
    with pytest.raises(
        ValueError, match=r"one structure, got leaves .*final_norm/bias"
    ):
        drift.weight_drift(as_jax(tree()), other)
