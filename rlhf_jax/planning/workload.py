"""A job as shapes: what stays in memory, and the programs that a step runs in order.

`memory` compiles them for one device, `plan` for a slice of many. Nothing is allocated:
the jobs (`jobs/`) take all shapes from `jax.eval_shape`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import caches
from rlhf_jax.models.config import DeltaNet, ModelConfig

PyTree = Any
# Norms, activations and gated products of a layer, relative to its projections.
BETWEEN = 1.5
Stage = Literal["rollout", "score", "update"]


class Program(NamedTuple):
    """One of the programs of a step."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # shapes
    reads: tuple[str, ...]  # names of `Workload.parts` among the arguments
    batch: tuple[int, ...]  # numbers of the arguments that have rows
    stage: Stage
    model_flops: float  # of all devices, by `model_flops`
    donate: tuple[int, ...] = ()  # numbers of donated arguments
    mesh: MeshShape | None = None  # over the chips of the run; None is the run's mesh
    resharded: tuple[int, ...] = ()  # arguments that are moved to `mesh` for each run
    # Most trips of the loops that end when every row has stopped, in their order.
    trips: tuple[int, ...] = (1,)
    repeats: int = 1  # trips of the loop around the first of these
    least_bytes: float = 0.0  # read by a device, by hand (`decoding.least_bytes`)
    expert_bytes: float = 0.0  # part of least_bytes that is a mixture's experts


class Workload(NamedTuple):
    """A step of a job."""

    model: ModelConfig
    parts: dict[str, PyTree]  # arrays that stay in memory throughout, by name
    programs: list[Program]  # in their order
    tokens: int  # of prompts and responses, without padding
    within: dict[str, int]  # known parts of the temporaries, bytes of all devices


def decoding_turns(
    prompt_length: int, max_new_tokens: int, *, longest: int | None = None
) -> tuple[int, ...]:
    """Turns of the sampler's loops, one for each width of the growing cache.

    The prompts' pass yields the first token, and the last token is not run. The loops
    end with the longest response; None is max_new_tokens.
    """
    size = prompt_length + max_new_tokens
    last = prompt_length + (max_new_tokens if longest is None else longest) - 1
    ends = caches.growing_widths(size, first=prompt_length)
    ends = (prompt_length, *(min(end, last) for end in ends))
    return tuple(end - start for start, end in itertools.pairwise(ends))


def batching_turns(
    responses: Sequence[int], *, places: int, arriving: int
) -> tuple[int, ...]:
    """Turns of each loop of continuous batching.

    A lower bound: with too few pages, rows wait and take more turns.

    Args:
      responses: tokens of each response, in the order of rows.
      places: rows that are decoded at a time.
      arriving: prompts that come in at a time.

    Returns:
      Turns of the loop between two arrivals, the mean rounded up; then those of the
      loops in fewer places.
    """
    # Imported here and below: a run's memory check needs neither pages nor blocks.
    from rlhf_jax.models.generation import continuous_batching

    queue, left = list(responses), list[int]()
    sizes = (*continuous_batching.fewer_places(places), 0)
    turns, arrivals = [0] * len(sizes), 0

    def until(limit: int) -> int:
        """Turns until at most `limit` rows go on."""
        nonlocal left
        steps = sorted(left)[len(left) - limit - 1] if len(left) > limit else 0
        left = [more - steps for more in left if more > steps]
        return steps

    while queue:
        left += [length - 1 for length in queue[:arriving] if length > 1]
        queue, arrivals = queue[arriving:], arrivals + 1
        limit = places - min(arriving, len(queue)) if queue else sizes[0]
        turns[0] += until(limit)
    for loop, limit in enumerate(sizes[1:], start=1):
        turns[loop] = until(limit)
    return (-(-turns[0] // arrivals), *turns[1:])


def block_visits(
    model: ModelConfig, *, columns: int, context: int, backend: str
) -> dict[str, float]:
    """Blocks that a loop of blockwise attention visits, the mean over layers.

    With blocks of b columns and a window of W, query block i visits
    min(i + 1, 1 + ⌈(W - 1) / b⌉) blocks of keys. On a context axis a device has
    1/context of the queries and all keys, or with ring attention 1/context of the keys
    in each turn.

    Returns:
      {name of a loop: turns}. A packed row of several texts takes fewer.
    """
    from rlhf_jax.models.attention import blockwise, blockwise_passes

    passed = model.attention == "ring"
    block = blockwise.block_columns(backend)
    blocks = -(-columns // block)
    windows = (
        1 - (1 - caches.width(model, layer, columns=columns)) // block
        for layer in model.attention_layers
    )
    pairs = sum(min(i + 1, window) for window in windows for i in range(blocks))
    mean = pairs / (blocks * max(1, len(model.attention_layers)))
    return {
        blockwise_passes.KEY_BLOCKS: mean / (context if passed else 1),
        blockwise_passes.QUERY_BLOCKS: mean / context,
    }


def cache_bytes(model: ModelConfig, *, rows: int, columns: int) -> int:
    """Bytes of keys and values, Σ_l 2·B·K_l·d_l·W_l numbers in `model.dtype`.

    Layer l keeps W_l of the columns of prompt and response. In int8 every vector of d
    numbers has a scale in float32. With `model.cache_pages` a layer that sees all
    columns has those of the pages instead of B·W_l. A DeltaNet layer has its state
    instead, of a fixed size, and a layer that reads another's keys has none.
    """

    def places(layer: int) -> int:
        if model.source(layer) is not None:
            return 0
        own = rows * caches.width(model, layer, columns=columns)
        if model.cache_pages is None:
            return own
        from rlhf_jax.models.generation import paged_caches

        if not paged_caches.in_pages(model, layer, longest=columns):
            return own
        return min(own, model.cache_pages * model.page_size)

    def column_bytes(own: ModelConfig) -> int:
        size = own.head_dim * jnp.dtype(own.dtype).itemsize
        return (
            2 * own.num_kv_heads * (own.head_dim + 4 if own.cache == "int8" else size)
        )

    states = 0
    if model.delta_net is not None:
        state = jax.eval_shape(lambda: caches.blank_state(model, rows=rows))
        states = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    layers, recurrent = model.attention_layers, model.layers_of("delta_net")
    keys_values = sum(column_bytes(model.at(n)) * places(n) for n in layers)
    return keys_values + states * len(recurrent)


def activation_bytes(
    model: ModelConfig, *, rows: int, columns: int, tensor: int = 1
) -> int:
    """Bytes that a device keeps between a forward pass and its backward pass, by hand.

        Σ_l (input of a layer + what remat keeps) + one layer at work + the head

    With remat full a layer keeps its input; with dots also every projection; with none
    all activations, including scores and probabilities [H, S, S] of attention without
    a flash kernel.

    Args:
      model: with the remat and the attention engine of the run.
      rows: of a device, each of `columns` columns.
      tensor: devices that share heads and MLP width.

    Compiled for a v5e, 4 x 512 tokens of GPT-2 small in float32 take 3056, 892 and 316
    MiB of temporaries without remat, with dots and with full; here 3087, 963 and 315.
    """
    tokens, size = rows * columns, jnp.dtype(model.dtype).itemsize

    def layer(own: ModelConfig, width: int, inner: float) -> tuple[float, float]:
        """Bytes that a layer of one kind keeps, and that it has at work."""
        matrices, experts = 2 if own.gated_mlp else 1, own.experts
        mlp = matrices * own.intermediate_size + (own.per_layer_width or 0)
        if experts is not None:
            beside = 0 if experts.beside_width is None else mlp
            # Rows sorted by expert, and the outputs of the experts.
            mlp = matrices * own.expert_width + 2 * own.hidden_size
            mlp = experts.per_token * mlp + beside
        shared = (width + mlp) / tensor
        projections = tokens * size * (shared + 2 * model.hidden_size)
        whole = (1 + BETWEEN) * projections + inner / tensor
        return {"none": whole, "dots": projections, "full": 0.0}[model.remat], whole

    inner = 0.0
    if model.attention == "xla":  # scores and probabilities in float32
        inner = 2 * 4 * rows * columns**2 * model.num_heads
    total = whole = 0.0
    kinds = Counter((model.at(n), model.source(n)) for n in model.attention_layers)
    for (own, source), layers in kinds.items():
        queries = (2 if own.output_gate else 1) * own.num_heads
        # A layer that reads another's keys and values projects none.
        keys = 0 if source is not None else 1 if own.keys_as_values else 2
        width = own.head_dim * (queries + keys * own.num_kv_heads)
        kept, at_work = layer(own, width, inner)
        total, whole = total + layers * kept, max(whole, at_work)
    if model.delta_net is not None:
        numbers = _delta_net_numbers(model.delta_net, rows=rows, columns=columns)
        kept, at_work = layer(model, *numbers)
        total += len(model.layers_of("delta_net")) * kept
        whole = max(whole, at_work)
    inputs = tokens * size * (model.hidden_size + (model.per_layer_width or 0))
    head = 2 * 4 * tokens * model.hidden_size  # hidden states and their gradient
    return int(total + model.num_layers * inputs + whole + head)


def _delta_net_numbers(
    shape: DeltaNet, *, rows: int, columns: int
) -> tuple[int, float]:
    """Numbers of a token's projections, and bytes of float32 beside them."""
    from rlhf_jax.models import delta_net, delta_rule

    keys = shape.num_key_heads * shape.key_dim
    values = shape.num_value_heads * shape.value_dim
    memory = shape.key_dim * shape.value_dim
    # Of a head: factors and products of the chunks of a block, its query, key and
    # value, and a memory per chunk; and the memory before every block.
    within = 8 * delta_rule.CHUNK + 4 * (shape.key_dim + shape.value_dim)
    within += memory / delta_rule.CHUNK
    block = delta_net.block_columns(rows)
    numbers = min(columns, block) * within + columns / block * memory
    return 2 * (keys + values), 4.0 * rows * shape.num_value_heads * numbers
