"""Weights of 4 bits, against a loop over every number."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from places import FIXTURES
from safetensors.numpy import load_file, save_file

from rlhf_jax import hf
from rlhf_jax.checkpoints.hf import mxfp4
from rlhf_jax.functional.checks import InputError

OPTIONS = json.loads((FIXTURES / "gpt_oss" / "config.json").read_text()) | {
    "hidden_size": 64,
    "intermediate_size": 32,
    "quantization_config": {"quant_method": "mxfp4"},
}
# Sign, two bits of exponent, one of fraction (OCP MX 1.0, table 5).
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def unpacked_one_by_one(blocks, scales):
    experts, size_out, groups, _ = blocks.shape
    result = np.zeros((experts, groups * 32, size_out))
    for expert, row, group, byte in np.ndindex(blocks.shape):
        for half in range(2):
            bits = int(blocks[expert, row, group, byte]) >> 4 * half & 15
            value = MAGNITUDES[bits % 8] * (-1) ** (bits // 8)
            value *= 2.0 ** (int(scales[expert, row, group]) - 127)
            result[expert, group * 32 + 2 * byte + half, row] = value
    return result


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(a folder in the format of gpt-oss, its matrices)."""
    rng = np.random.default_rng(0)
    model = hf.FAMILIES["gpt_oss"].config_from_hf(OPTIONS)
    path = tmp_path_factory.mktemp("mxfp4")
    hf.save(path / "plain", model, tiny.params(model), dtype="bfloat16")
    tensors = load_file(path / "plain" / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, size_in, size_out = tensors.pop(name).shape
        shape = (experts, size_out, size_in // 32)
        blocks = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        scales = rng.integers(110, 135, shape).astype(np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        expected[name] = unpacked_one_by_one(blocks, scales)
    folder = path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OPTIONS))
    save_file(tensors, folder / "model.safetensors")
    return folder, expected


def test_every_number_is_read_whole_and_in_part(packed):
    folder, expected = packed
    model, params = hf.load(folder)
    experts = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["layers"][
        "experts"
    ]
    at = "model.layers.{}.mlp.experts."
    for layer in range(model.num_layers):
        gate_up = expected[at.format(layer) + "gate_up_proj"]
        np.testing.assert_array_equal(
            experts["gate"]["kernel"][layer], gate_up[..., ::2]
        )
        np.testing.assert_array_equal(
            experts["up"]["kernel"][layer], gate_up[..., 1::2]
        )
        down = expected[at.format(layer) + "down_proj"]
        np.testing.assert_array_equal(experts["down"]["kernel"][layer], down)
    tensors, name = mxfp4.Tensors(folder), at.format(1) + "gate_up_proj"
    for window in (
        (slice(1, 3), slice(33, 40), slice(5, 9)),
        (slice(None), slice(20, 50), slice(0, 64)),
        (slice(0, 1), slice(64, 64), slice(None)),
    ):
        part = tensors.read(name, window).astype(np.float64)
        np.testing.assert_array_equal(part, expected[name][window])


def test_blocks_without_their_scales_are_named(packed, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "packed")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"down_proj_scales u8 .* got U8.*and none; f"):
        hf.load(folder)
