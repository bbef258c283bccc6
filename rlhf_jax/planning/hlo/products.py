"""Matrix products of one line: dots, convolutions, and library calls for either."""

from __future__ import annotations

import functools
import math
import re

from rlhf_jax.models.attention import ring_passes
from rlhf_jax.models.experts.grouped import Load
from rlhf_jax.planning.hlo.parsing import Array, Computation, Line

KERNELS = "tpu_custom_call", "gpu.triton"  # custom calls of grouped products


def flops(
    line: Line, lines: Computation, computations: dict[str, Computation]
) -> float:
    """2 · products that a line computes, including those in fusions."""
    if line.opcode == "fusion":
        inner = computations[line.called("calls")]
        return sum(flops(part, inner, computations) for part in inner.values())
    if line.opcode == "custom-call" and "__cudnn$fmha" in line.rest:
        return _attention(line, lines)
    if line.opcode == "custom-call" and "splash_m" in line.rest:
        return _splash(line)
    if (load := load_of(line)) is not None:
        return 2.0 * load.rows * math.prod(_matrices(line, lines).shape[1:])
    if line.opcode == "custom-call" and "gemm" in line.rest:
        taken = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', line.rest)
        depth = lines[line.operands[0]].result[0].shape[int(taken[1])] if taken else 0
        return 2.0 * math.prod(line.result[0].shape) * depth
    if line.opcode == "dot":
        taken = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        dims = [int(i) for i in taken[1].split(",") if i] if taken else []
        depth = math.prod(lines[line.operands[0]].result[0].shape[i] for i in dims)
        return 2.0 * math.prod(line.result[0].shape) * depth
    if line.opcode == "convolution":
        left, right = (lines[line.operands[i]].result[0].shape for i in (0, 1))
        return _convolution(line, left=left, right=right)
    return 0.0


def load_of(line: Line) -> Load | None:
    """The expected load of a grouped product; None for any other line."""
    kernel = line.opcode == "custom-call" and any(name in line.rest for name in KERNELS)
    return Load.of_scope(line.rest.partition("backend_config")[0]) if kernel else None


def _matrices(line: Line, lines: Computation) -> Array:
    """The array [G, in, out] of a grouped product, with a matrix per group."""
    arrays = [leaf for name in line.operands for leaf in lines[name].result]
    return next(leaf for leaf in (*arrays, *line.result) if len(leaf.shape) == 3)


def grouped_bytes(line: Line, lines: Computation, load: Load) -> float:
    """Bytes of a grouped product: each row and matrix of its load, once."""
    expected = {2: load.rows, 3: load.groups}
    arrays = [leaf for name in set(line.operands) for leaf in lines[name].result]
    return sum(
        leaf.size * min(1.0, expected.get(len(leaf.shape), math.inf) / leaf.shape[0])
        for leaf in (*arrays, *line.result)
        if leaf.shape and not leaf.on_chip
    )


def _attention(line: Line, lines: Computation) -> float:
    """2 · products of cuDNN's attention; a causal mask halves them.

    The forward pass has two products. The backward pass repeats the first and has one
    each for the gradients of query, key, value and probabilities.
    """
    dims = re.search(
        r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]',
        line.rest,
    )
    assert dims is not None, line
    products = 5 if "Backward" in line.rest.partition("backend_config")[0] else 2
    head_dim = lines[line.operands[0]].result[0].shape[-1]
    half = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL"', line.rest) else 1.0
    logits = math.prod(int(size) for size in re.findall(r"\d+", dims[1]))
    return half * products * 2.0 * logits * head_dim


def _splash(line: Line) -> float:
    """2 · products of JAX's splash attention, by its kernels' names.

    Its masks are causal: at most half of [Sq, Sk] is computed, and with a window at
    most the blocks that the grid visits, [heads, Sq / block, blocks of a row]. Turns of
    ring attention after the first have no causal mask.
    """
    kernel = re.search(r"splash_m\w+_(fwd|dkv|dq)", line.rest)
    shapes = re.search(r"operand_layout_constraints=\{(.*?\})\}", line.rest)
    assert kernel is not None, line
    assert shapes is not None, line
    kind = kernel[1]
    arrays = re.findall(r"([a-z]+)\d+\[([\d,]+)\]", shapes[1])
    sizes = [(name, [int(size) for size in dims.split(",")]) for name, dims in arrays]
    query, key = [dims for name, dims in sizes if name in ("f", "bf")][:2]
    pairs = query[-2] * key[-2] / (1 if ring_passes.WHOLE in line.rest else 2)
    blocks = {
        name: int(size)
        for name, size in re.findall(r'(block_\w+)\\": (\d+)', line.rest)
    }
    ending = "" if kind == "fwd" else f"_{kind}"
    visited = next((dims for name, dims in sizes if name == "s"), None)
    if visited is not None and f"block_q{ending}" in blocks:
        block = blocks[f"block_q{ending}"] * blocks[f"block_kv{ending}"]
        pairs = min(pairs, math.prod(visited[-2:]) * block)
    fused = len(line.result) > 4  # also returns the gradient of the query
    products = {"fwd": 2, "dkv": 5 if fused else 4, "dq": 3}[kind]
    return 2.0 * products * math.prod(query[:-2]) * pairs * query[-1]


def _convolution(line: Line, *, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """2 · products of a convolution, without those of padding and dilation holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    assert labels is not None, line
    ins, kernels, outs = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", line.rest)
    settings = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", line.rest)
    total = 2.0 * left[ins.index("b")] / (int(groups[1]) if groups else 1)
    total *= right[kernels.index("i")] * right[kernels.index("o")]
    spatial = sorted(label for label in outs if label.isdigit())
    for at, label in enumerate(spatial):

        def option(name: str, missing: str, at: int = at) -> list[int]:
            text = settings[name].split("x")[at] if name in settings else missing
            return [int(size) for size in text.split("_")]

        total *= _meetings(
            size_in=left[ins.index(label)],
            size_out=line.result[0].shape[outs.index(label)],
            window=right[kernels.index(label)],
            stride=option("stride", "1")[0],
            before=option("pad", "0_0")[0],
            hole=option("lhs_dilate", "1")[0],
            apart=option("rhs_dilate", "1")[0],
        )
    return total


@functools.cache
def _meetings(
    *,
    size_in: int,
    size_out: int,
    window: int,
    stride: int,
    before: int,
    hole: int,
    apart: int,
) -> int:
    """Pairs of an output and a window element that read an actual input."""
    last = (size_in - 1) * hole
    places = (
        out * stride + element * apart - before
        for out in range(size_out)
        for element in range(window)
    )
    return sum(0 <= place <= last and place % hole == 0 for place in places)
