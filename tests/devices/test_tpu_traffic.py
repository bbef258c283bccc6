"""TPU memory traffic of a program, against counts by hand.

Snippets are cut from libtpu's output; the last test compiles a program with libtpu.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import delta_net_on_tpu
import places
import pytest
import traffic_for_tpu

from rlhf_jax.planning import cost

WIDE, TOKENS = 2 * 128 * 256, 2 * 8 * 256  # bytes of a weight and of what it meets

NESTED = """
%bitcast_fusion.1 (b.0: bf16[128,256]) -> bf16[128,256] {
  %b.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %b.1 = bf16[128,256]{1,0:T(8,128)(2,1)} bitcast(%b.0)
}

%bitcast_fusion.2 (d.0: f32[8,128]) -> f32[1024] {
  %d.0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %d.1 = f32[1024]{0:T(1024)} bitcast(%d.0)
}

%row.1 (g.0: bf16[128,256]) -> bf16[1,256] {
  %g.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %g.1 = s32[] constant(3)
  %g.2 = s32[] constant(0)
  ROOT %g.3 = bf16[1,256]{1,0:T(8,128)(2,1)} dynamic-slice(%g.0, %g.1, %g.2), dynamic_slice_sizes={1,256}
}

%product.1 (p.0: bf16[128,256], p.1: bf16[8,256]) -> f32[8,128] {
  %p.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(1)
  %p.2 = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%p.0), kind=kLoop, calls=%bitcast_fusion.1
  ROOT %p.3 = f32[8,128]{1,0:T(8,128)} convolution(%p.1, %p.2), dim_labels=bf_oi->bf
}

%flat.1 (f.0: bf16[128,256], f.1: bf16[8,256]) -> f32[1024] {
  %f.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %f.1 = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(1)
  %f.2 = f32[8,128]{1,0:T(8,128)} convolution(%f.1, %f.0), dim_labels=bf_oi->bf
  ROOT %f.3 = f32[1024]{0:T(1024)} fusion(%f.2), kind=kLoop, calls=%bitcast_fusion.2
}

%sliced.1 (s.0: bf16[128,256], s.1: bf16[8,256]) -> f32[8,1] {
  %s.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %s.1 = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(1)
  %s.2 = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%s.0), kind=kLoop, calls=%bitcast_fusion.1
  %s.3 = bf16[1,256]{1,0:T(8,128)(2,1)} fusion(%s.2), kind=kLoop, calls=%row.1
  ROOT %s.4 = f32[8,1]{1,0:T(8,128)} convolution(%s.1, %s.3), dim_labels=bf_oi->bf
}

%carried.1 (c.0: bf16[128,256], c.1: bf16[8,256]) -> (bf16[8,256], bf16[128,256]) {
  %c.0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %c.1 = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(1)
  %c.2 = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%c.0), kind=kLoop, calls=%bitcast_fusion.1
  %c.3 = bf16[8,256]{1,0:T(8,128)(2,1)} add(%c.1, %c.1)
  ROOT %c.4 = (bf16[8,256]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}) tuple(%c.3, %c.2)
}
"""  # noqa: E501


def entry(result, rest):
    """The bytes of a program of one instruction, with a weight and other operands."""
    return cost.cost(f"""HloModule jit_f
{NESTED}
ENTRY %main.1 (a.0: bf16[128,256], a.1: bf16[8,256]) -> f32[8,128] {{
  %a.0 = bf16[128,256]{{1,0:T(8,128)(2,1)}} parameter(0)
  %a.1 = bf16[8,256]{{1,0:T(8,128)(2,1)}} parameter(1)
  %a.2 = bf16[128,256]{{1,0:T(8,128)(2,1)S(1)}} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %out.1 = {result} {rest}
}}
""").bytes  # noqa: E501


def fused(result, name):
    return entry(result, f"fusion(%a.0, %a.1), kind=kOutput, calls=%{name}")


@pytest.mark.parametrize(
    ("name", "result", "size"),
    [
        ("product.1", "f32[8,128]{1,0:T(8,128)}", WIDE + TOKENS + 4 * 8 * 128),
        ("product.1", "f32[8,128]{1,0:T(8,128)S(1)}", WIDE + TOKENS),
        # What leaves a fusion through a bitcast was written by it all the same.
        ("flat.1", "f32[1024]{0:T(1024)}", WIDE + TOKENS + 4 * 1024),
        # One row of 128 is read, though all of them pass the bitcast.
        ("sliced.1", "f32[8,1]{1,0:T(8,128)}", WIDE // 128 + TOKENS + 4 * 8),
        # The weight is handed on, and neither read nor written.
        ("carried.1", "(bf16[8,256]{1,0}, bf16[128,256]{1,0})", 2 * TOKENS),
    ],
)
def test_a_weight_that_passes_a_fusion_in_a_fusion(name, result, size):
    assert fused(result, name) == size


HBM, CHIP = "bf16[128,256]{1,0:T(8,128)(2,1)}", "bf16[128,256]{1,0:T(8,128)(2,1)S(1)}"


@pytest.mark.parametrize(
    ("target", "source", "operand", "size"),
    [
        (CHIP, HBM, "%a.0", WIDE),  # fetched ahead: read once
        (HBM, CHIP, "%a.2", WIDE),  # put back: written once
        (HBM, HBM, "%a.0", 2 * WIDE),
        (CHIP, CHIP, "%a.2", 0),
    ],
)
def test_a_copy_counts_at_each_end_that_lies_in_the_memory(
    target, source, operand, size
):
    result = f"({target}, {source}, u32[]{{:S(2)}})"
    assert entry(result, f"copy-start({operand})") == size


@pytest.mark.parametrize(
    ("target", "source", "operand", "ends"),
    [
        ("S(1)", HBM, "%a.0", 1),
        ("", HBM, "%a.0", 2),
        ("", CHIP, "%a.2", 1),
        ("S(1)", CHIP, "%a.2", 0),
    ],
)
def test_a_slice_counts_what_it_takes_and_no_more(target, source, operand, ends):
    piece = f"bf16[32,256]{{1,0:T(8,128)(2,1){target}}}"
    num_bytes = entry(
        f"({source}, {piece}, s32[]{{:S(2)}})",
        f"slice-start({operand}), slice={{[0:32], [0:256]}}",
    )
    assert num_bytes == ends * WIDE // 4


NO_LIBTPU = importlib.util.find_spec("libtpu") is None


def compiled(program):
    """The output of a program that compiles with libtpu, in its own process."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": places.PYTHONPATH,
    }
    environment.pop("XLA_FLAGS", None)  # as a real run has it
    script = Path(program.__file__)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="libtpu is not installed")
def test_a_token_reads_every_weight_and_the_cache_once():
    """A decoding loop compiled by libtpu for two chips with different memories."""
    shape = traffic_for_tpu
    layers = shape.LAYERS * (3 * shape.WIDTH * shape.INNER)
    weights = 2 * (layers + shape.WORDS * shape.WIDTH)
    cache = 2 * shape.LAYERS * shape.ROWS * shape.COLUMNS * shape.WIDTH
    logits = 4 * shape.ROWS * shape.WORDS
    for chip, num_bytes in compiled(shape).items():
        token = num_bytes / shape.TURNS
        # Activations are small; logits and the picked rows pass a few times.
        assert weights + cache <= 1.001 * token, chip
        assert token <= 1.01 * (weights + cache) + 4 * logits, chip


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="libtpu is not installed")
def test_a_delta_net_passes_little_but_its_projections_through_the_memory():
    """Neither float32 numbers nor the factors of chunks, in bytes per token."""
    model, shape = delta_net_on_tpu.MODEL, delta_net_on_tpu.MODEL.delta_net
    keys = shape.num_key_heads * shape.key_dim
    values = shape.num_value_heads * shape.value_dim
    # Six projections read x; queries, keys, values and gates are written and read, as
    # is what the last projection reads.
    activations = 7 * model.hidden_size + 2 * (2 * keys + 3 * values)
    matrices = model.hidden_size * (2 * keys + 3 * values)
    tokens = delta_net_on_tpu.ROWS * delta_net_on_tpu.COLUMNS
    least = 2 * (activations + matrices / tokens)
    assert 0.5 * least < compiled(delta_net_on_tpu) < 3 * least
