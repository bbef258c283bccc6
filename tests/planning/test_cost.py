"""Costs counted from a program's text, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax import decoder, logprobs, policy
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import config
from rlhf_jax.models.attention import blockwise, blockwise_passes, ring_passes
from rlhf_jax.models.experts import grouped
from rlhf_jax.models.positions import AttentionMask
from rlhf_jax.planning import cost, workload
from rlhf_jax.planning.hlo import exchanges
from rlhf_jax.planning.hlo.exchanges import Collective


def cost_of(function, *args, trips=(1,)):
    text = jax.jit(function).lower(*args).compile().as_text()
    return cost.cost(text, trips=trips)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_product():
    work = cost_of(jnp.matmul, shape(8, 16), shape(16, 4))
    assert work.flops == 2 * 8 * 16 * 4
    assert work.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert not work.collectives


def test_the_body_of_a_scan_counts_every_turn():
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    work = cost_of(layers, shape(8, 16), shape(50, 16, 16))
    assert work.flops == 50 * 2 * 8 * 16 * 16
    assert work.unknown_loops == 0
    # Each turn reads its own matrix, and not all fifty.
    assert 50 * 4 * 16 * 16 < work.bytes < 50 * 4 * (10 * 16 * 16)


def test_a_loop_of_unknown_length_takes_the_turns_that_are_given():
    def halve(x, w):
        return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: x @ w, x)

    work = cost_of(halve, shape(4, 4), shape(4, 4), trips=(7,))
    assert work.flops == 7 * 2 * 4**3
    assert work.unknown_loops == 1


NEAR = """
HloModule near

%update (p: f32[1024], q: f32[8], i: s32[]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[1024]{0} dynamic-update-slice(%p, %q, %i)
}

ENTRY %main (a: f32[1024], b: f32[8], i: s32[]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  %n = f32[1024]{0} negate(%a)
  %e = f32[1024]{0} exponential(%n)
  %s = f32[1024]{0} fusion(%a, %b, %i), kind=kLoop, calls=%update
  ROOT %r = f32[1024]{0} add(%e, %s)
}
"""


def test_what_a_cache_holds_between_kernels_is_not_counted():
    size, part = 4 * 1024, 4 * 8
    everything = cost.cost(NEAR).bytes
    # Read and written by two kernels, and by the third from two of them; a part of it
    # read and written, with its place.
    assert everything == 4 * size + (2 * part + 4) + 3 * size
    # `a` is an argument, and so is what an update writes a part of.
    least = size + (2 * part + 4) + size
    assert cost.cost(NEAR, near=size).bytes == least
    assert cost.cost(NEAR, near=size - 1).bytes == everything


ATTENTION = config.gpt2(
    vocab_size=8, hidden_size=16, num_layers=2, num_heads=2, max_positions=600
)


def test_blocks_that_are_visited_by_hand():
    """5 blocks of 128 columns; block 2 sees one column of block 0 through 256."""
    local = dataclasses.replace(
        ATTENTION, sliding_window=256, local_layers=(True, False)
    )
    wide, narrow = 1 + 2 + 3 + 4 + 5, 1 + 2 + 3 + 3 + 3
    for model, pairs in {ATTENTION: wide, local: (wide + narrow) / 2}.items():
        visits = workload.block_visits(model, columns=600, context=4, backend="cpu")
        assert visits == {
            blockwise_passes.KEY_BLOCKS: pairs / 5,
            blockwise_passes.QUERY_BLOCKS: pairs / 5 / 4,
        }
    passed = dataclasses.replace(ATTENTION, attention="ring")
    visits = workload.block_visits(passed, columns=600, context=4, backend="cpu")
    assert set(visits.values()) == {wide / 5 / 4}  # in each of four turns
    visits = workload.block_visits(ATTENTION, columns=600, context=1, backend="gpu")
    assert set(visits.values()) == {(1 + 2) / 2}  # blocks of 512


@pytest.mark.slow
def test_blockwise_attention_counts_the_blocks_that_it_visits():
    """Counts a gradient's products: 2 of the forward pass and 5 of the backward."""
    visits = workload.block_visits(ATTENTION, columns=600, context=1, backend="cpu")
    query = shape(3, 2, 600, 8)
    segments = jax.ShapeDtypeStruct((3, 600), jnp.int32)

    def attend(q, k, v, segments):
        mask = AttentionMask(segments)
        return blockwise.attend_blockwise(q, (k, v), mask=mask).sum()

    gradient = jax.jit(jax.grad(attend, argnums=(0, 1, 2)))
    compiled = gradient.lower(query, query, query, segments).compile()
    work = cost.cost(compiled.as_text(), named=visits)
    of_block = 2 * 128 * 128 * 8  # FLOPs of one product of one head
    blocks = 1 + 2 + 3 + 4 + 5
    assert work.flops == pytest.approx(3 * 2 * blocks * (2 + 5) * of_block)
    assert work.unknown_loops == 0


ROWS, COLUMNS = 3, 10


def by_hand(model, *, passes):
    """Forward: 2 N per token, and 4 S D for attention; backward twice as much."""
    size, width = model.hidden_size, model.num_heads * model.head_dim
    kernels = 2 * size * (width + model.num_kv_heads * model.head_dim)
    mlp = (3 if model.gated_mlp else 2) * size * model.intermediate_size
    token = 2 * (kernels + mlp) + 2 * 2 * COLUMNS * width
    return passes * model.num_layers * ROWS * COLUMNS * token


def trained(model, *, passes):
    """FLOPs of a forward pass, or of a forward pass with its gradient."""
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    mask = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bool_)

    def forward(params, tokens, mask):
        hidden = decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)
        return hidden.sum()

    function = forward if passes == 1 else jax.grad(forward)
    return cost_of(function, params, tokens, mask).flops


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 3])
def test_a_decoder_forward_and_backward(passes):
    assert trained(tiny.GPT2, passes=passes) == by_hand(tiny.GPT2, passes=passes)


@pytest.mark.slow
def test_a_decoder_of_grouped_queries():
    assert trained(tiny.LLAMA, passes=1) == by_hand(tiny.LLAMA, passes=1)


@pytest.mark.slow
def test_remat_is_one_more_pass():
    """Without the last product of a layer, which the gradient does not need."""
    model = dataclasses.replace(tiny.GPT2, remat="full")
    most = by_hand(model, passes=4)
    last = 2 * model.num_layers * ROWS * COLUMNS * 16 * 64
    assert trained(model, passes=4) == most - last


def test_loops_of_unknown_length_take_their_turns_in_order():
    def twice(x, w):
        for size in (4, 2):
            x = jax.lax.while_loop(
                lambda x: x.sum() > 1.0, lambda x: jnp.tanh(x @ w), x[:size]
            )
        return x

    one = 2 * 4**2  # of one row
    for trips, flops in {(7, 3): 7 * 4 + 3 * 2, (7, 3, 2): 12 * 4 + 12 * 2}.items():
        work = cost_of(twice, shape(4, 4), shape(4, 4), trips=trips)
        assert work.flops == flops * one
        assert work.unknown_loops == 2


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1,2},{3,4,5}}", (0, 1, 2)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("mesh['a'=2,'b'=4] {'a','b'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("mesh['a'=8] {'a':(4)2}", (0, 1)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6)),
    ],
)
def test_the_devices_of_a_group(groups, expected):
    rest = f", channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert exchanges.group(rest) == expected


def test_what_leaves_a_node():
    """8 devices in 2 nodes of 4: a node receives what it lacks once, by 4 links."""
    assert Collective("all-gather", 80, 8, 2).across == 40 / 4
    assert Collective("reduce-scatter", 80, 8, 2).across == 40 / 4
    assert Collective("all-reduce", 80, 8, 2).across == 2 * 40 / 4
    # Half of what each has is for devices of the other node, and for no two the same.
    assert Collective("all-to-all", 80, 8, 2).across == 40
    assert Collective("collective-permute", 80, 2, 2).across == 80
    # One device of each of 8 nodes: all that is sent.
    alone = Collective("all-gather", 80, 8, 8)
    assert alone.across == alone.sent == 70
    assert Collective("all-gather", 80, 8, 1).across == 0


RAGGED = """
ENTRY %main (p: bf16[64,128], q: bf16[128,128], i: s32[8]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  %q = bf16[128,128]{1,0} parameter(1)
  %i = s32[8]{0} parameter(2)
  %c = s32[8]{0} all-to-all(%i), channel_id=1, replica_groups=[1,8]<=[8]
  %r = bf16[128,128]{1,0} ragged-all-to-all(%p, %q, %i, %i, %i, %c), channel_id=1, replica_groups=[1,8]<=[8]
  ROOT %b = bf16[64,128]{1,0} ragged-all-to-all(%r, %p, %i, %c, %i, %i), channel_id=1, replica_groups=[1,8]<=[8]
}
"""  # noqa: E501


def test_rows_that_are_sent_to_their_experts_and_not_the_room_for_them():
    """Each of 8 devices sends 64 rows there, and receives them back."""
    assert cost.cost(RAGGED).collectives == {
        Collective("all-to-all", 4 * 8, 8): 1,
        Collective("ragged-all-to-all", 2 * 64 * 128, 8): 2,
    }


def test_turns_of_a_loop_in_another():
    """Both are named with the turns that are expected, here 2 of 3 and 5 of 7."""

    def run(x, few, many):
        def inner(_, x):
            with jax.named_scope(f"{grouped.TURNS}5"):
                return jax.lax.fori_loop(0, many, lambda _, x: x @ x, x)

        with jax.named_scope(f"{grouped.TURNS}2"):
            return jax.lax.fori_loop(0, few, inner, x)

    work = cost_of(run, jnp.ones((8, 8)), jnp.int32(3), jnp.int32(7))
    assert work.flops == 2 * 5 * 2 * 8**3
    assert work.unknown_loops == 0


OF_ONE_CHANNEL = """
%piece (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %q = f32[8]{0} all-reduce(%r), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %a = f32[8]{0} fusion(%q), kind=kCustom, calls=%piece
  ROOT %b = f32[8]{0} fusion(%a), kind=kCustom, calls=%piece
}
"""  # noqa: E501


def test_sums_of_one_channel_are_several_and_pieces_of_a_fusion_are_one():
    assert cost.cost(OF_ONE_CHANNEL).collectives == {Collective("all-reduce", 32, 8): 3}


TWO_NODES = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %q = f32[8]{0} all-reduce(%r), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
  %c = f32[8]{0} collective-permute(%q), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3}}
  ROOT %d = f32[8]{0} collective-permute(%c), channel_id=4, source_target_pairs={{0,1},{3,4}}
}
"""  # noqa: E501


def test_the_nodes_of_a_group():
    work = cost.cost(TWO_NODES, per_node=4).collectives
    assert work == {
        Collective("all-reduce", 32, 4, 2): 1,
        Collective("all-reduce", 32, 2, 1): 1,
        Collective("collective-permute", 32, 2, 1): 1,
        Collective("collective-permute", 32, 2, 2): 1,
    }
    assert {one.nodes for one in cost.cost(TWO_NODES).collectives} == {1}


CUDNN = """
ENTRY %main (q: bf16[2,32,4,16], k: bf16[2,32,2,16], v: bf16[2,32,2,16]) -> bf16[2,4,32,16] {
  %q = bf16[2,32,4,16]{3,2,1,0} parameter(0)
  %k = bf16[2,32,2,16]{3,2,1,0} parameter(1)
  %v = bf16[2,32,2,16]{3,2,1,0} parameter(2)
  %a = (bf16[2,4,32,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmaxTARGET", backend_config={"cudnn_fmha_backend_config": {"algorithm": {"tuning_knobs": {"17": "1"}}, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "32", "32"], "tuple_shapes": []}, "mask_type": "MASK"}}
  ROOT %y = bf16[2,4,32,16]{3,1,2,0} get-tuple-element(%a), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [("", "NO_MASK", 2), ("", "PADDING_CAUSAL", 1), ("Backward", "CAUSAL", 2.5)],
)
def test_the_products_of_cudnn_s_attention(target, mask, products):
    """q·kᵀ and p·v cost 2·B·H·S·S·d each; a gradient has five such products."""
    work = cost.cost(CUDNN.replace("TARGET", target).replace("MASK", mask, 1))
    assert work.flops == products * 2 * 2 * 4 * 32 * 32 * 16
    # What it reads and writes, and no logits.
    assert work.bytes == 2 * 2 * 32 * 16 * (4 + 2 + 2 + 4)


SPLASH = """
ENTRY %main (m: s8[1,8,GRID], q: bf16[2,4,1024,64], k: bf16[2,2,1024,64]) -> bf16[2,4,1024,64] {
  %m = s8[1,8,GRID]{2,1,0} parameter(0)
  %q = bf16[2,4,1024,64]{3,2,1,0} parameter(1)
  %k = bf16[2,2,1024,64]{3,2,1,0} parameter(2)
  %s.1 = (RESULTS) custom-call(%m, %q, %k, %k), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,8,GRID]{2,1,0}, bf16[2,4,1024,64]{3,2,1,0}, bf16[2,2,1024,64]{3,2,1,0}, bf16[2,2,1024,64]{3,2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_qENDING\\": 128, \\"block_kvENDING\\": 128}"
}}, metadata={op_name="jit(f)/splash_mha_KIND_segmented/pallas_call" stack_frame_id=5}, backend_config={"custom_call_config":{"body":"abc"}}
  ROOT %y = bf16[2,4,1024,64]{3,2,1,0} get-tuple-element(%s.1), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("kind", "results", "products"),
    [("fwd", 5, 2), ("dkv", 4, 4), ("dkv", 5, 5), ("dq", 2, 3)],
)
@pytest.mark.parametrize(("grid", "pairs"), [(8, 1024 * 512), (3, 8 * 3 * 128**2)])
def test_the_products_of_splash_attention(kind, results, products, grid, pairs):
    """A causal mask costs half of the pairs, a window the visited blocks."""
    text = SPLASH.replace("KIND", kind).replace("GRID", str(grid))
    text = text.replace("ENDING", "" if kind == "fwd" else f"_{kind}")
    text = text.replace("RESULTS", ", ".join(["bf16[2,4,1024,64]{3,2,1,0}"] * results))
    assert cost.cost(text).flops == 2 * products * 2 * 4 * pairs * 64


def test_a_turn_of_ring_attention_computes_all_pairs():
    text = SPLASH.replace("KIND", "fwd").replace("GRID", "8").replace("ENDING", "")
    text = text.replace("RESULTS", ", ".join(["bf16[2,4,1024,64]{3,2,1,0}"] * 5))
    text = text.replace("jit(f)/", f"jit(f)/{ring_passes.WHOLE}/cond/")
    assert cost.cost(text).flops == 2 * 2 * 2 * 4 * 1024**2 * 64


SLICES = """
ENTRY %main (a: bf16[64,8,128]) -> bf16[64,8,128] {
  %a = bf16[64,8,128]{2,1,0} parameter(0)
  %none = token[] after-all()
  %send = (bf16[64,8,128]{2,1,0}, u32[], token[]) send(%a, %none), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target=TARGET,_xla_megascale_transfer_type="KIND"}
  ROOT %y = bf16[64,8,128]{2,1,0} get-tuple-element(%send), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("target", "kind", "expected"),
    [
        ('"{1,2}x{0:3}"', "ALL_REDUCE", Collective("all-reduce", 2**17, 2, 2)),
        ('"{1,2,3}x{0:3}"', "ALL_GATHER", Collective("all-gather", 3 * 2**17, 3, 3)),
        (
            "{{100000,100001,200000,200001}}",
            *("ALL_TO_ALL", Collective("all-to-all", 2**17, 4, 2)),
        ),
        (
            "{{200000->100001}}",
            *("ONE_TO_ONE", Collective("collective-permute", 2**17, 2, 2)),
        ),
    ],
)
def test_what_slices_send_each_other(target, kind, expected):
    """Only exchanges between slices, in libtpu's form, are counted."""
    text = SLICES.replace("TARGET", target).replace("KIND", kind)
    work = cost.cost(text)
    assert work.collectives == {expected: 1}
    assert work.across > 0
    assert not cost.cost(text.replace("_xla_megascale", "_other")).collectives


def test_collectives_by_kind_and_size():
    """Rows and a matrix, both over 4 devices: the forward pass gathers the matrix."""
    mesh = MeshShape(fsdp=4).make(jax.devices()[:4])

    def on(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    x = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=on("fsdp"))
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=on("fsdp"))

    def total(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, on("fsdp"))
        return jnp.square(y).sum()

    work = cost_of(total, x, w)
    assert work.collectives[Collective("all-gather", 4 * 64 * 32, 4)] == 1
    assert work.collectives[Collective("all-reduce", 4, 4)] == 1
    assert work.flops == 2 * 128 * 64 * 32
    gathered = Collective("all-gather", 4 * 64 * 32, 4).sent
    assert gathered == 4 * 64 * 32 * 3 / 4
    assert Collective("all-reduce", 4, 4).sent == 2 * 4 * 3 / 4
    assert Collective("collective-permute", 12, 2).sent == 12
    assert work.sent == gathered + 6


@pytest.mark.slow
def test_every_device_holds_as_many_logits_as_one(monkeypatch):
    """A sharded head is gathered once per chunk: more devices must not add chunks."""
    monkeypatch.setattr("rlhf_jax.roles.policy.MAX_LOGITS", 2 * 128 * 4)
    model, columns = tiny.GPT2, 17
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    assert model.padded_vocab_size == 128
    times = {}
    for devices, rows in ((1, 2), (8, 16)):
        mesh = MeshShape(fsdp=devices).make(jax.devices()[:devices])

        def placed(tree, spec, mesh=mesh):
            where = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
            )

        tokens = jax.ShapeDtypeStruct((rows, columns), jnp.int32)
        mask = jax.ShapeDtypeStruct((rows, columns), jnp.bool_)

        def compute(params, tokens, mask):
            return policy.logprobs(params, model=model, tokens=tokens, mask=mask)

        with jax.set_mesh(mesh):
            args = placed(params, ()), *placed((tokens, mask), ("fsdp",))
            lowered = jax.jit(compute).lower(*args).as_text()
        times[devices] = f"tensor<{rows * 16}x32xf32>" in lowered
    assert times == {1: True, 8: True}  # 32 tokens of the vocabulary at a time on both


@pytest.mark.slow
def test_words_that_are_sharded_are_computed_where_they_lie():
    """Four products with the head; a device computes an eighth of each."""
    rows, columns, width, words = 2, 9, 16, 16 * 8
    mesh = MeshShape(tensor=8).make()

    def loss(hidden, head, tokens):
        output = logprobs.token_logprobs_from_hidden(
            hidden, head, tokens, vocab_size=120, max_logits=words * rows * columns // 2
        )
        return jnp.sum(output[0] + output[1])

    def on(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    step = jax.jit(
        jax.value_and_grad(loss, (0, 1)),
        in_shardings=(on(), on("tensor"), on()),
        out_shardings=(on(), (on(), on("tensor"))),
    )
    tokens = jax.ShapeDtypeStruct((rows, columns), jnp.int32)
    lowered = step.lower(shape(rows, columns, width), shape(words, width), tokens)
    work = cost.cost(lowered.compile().as_text())
    product = 2 * rows * (columns - 1) * width * words
    assert work.flops == 4 * product / 8


TPU = """HloModule jit_f

%matmul.1 (p.0: bf16[32,1024,4096,1], p.1: bf16[32,128,4096,1]) -> bf16[32,1024,32,128] {
  %p.0 = bf16[32,1024,4096,1]{2,1,0,3:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[32,128,4096,1]{2,0,1,3:T(8,128)(2,1)} parameter(1)
  ROOT %conv.1 = bf16[32,1024,32,128]{3,1,2,0:T(8,128)(2,1)} convolution(%p.0, %p.1), window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f
}

%piece.1 (p.2: bf16[64,8], p.3: bf16[4096,8]) -> (bf16[64,8], bf16[4096,8]) {
  %p.2 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.3 = bf16[4096,8]{1,0:T(8,128)(2,1)} parameter(1)
  %gather.1 = bf16[4096,8]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=7, replica_groups=mesh['axis_0'=64] {'axis_0'}, dimensions={0}
  ROOT %both.1 = (bf16[64,8]{1,0}, bf16[4096,8]{1,0}) tuple(%p.2, %gather.1)
}

%turn.1 (p.4: (u32[], bf16[64,8], bf16[4096,8])) -> (u32[], bf16[64,8], bf16[4096,8]) {
  %two.1 = u32[]{:T(128)} constant(2)
  %p.4 = (u32[]{:T(128)}, bf16[64,8]{1,0}, bf16[4096,8]{1,0}) parameter(0)
  %count.1 = u32[]{:T(128)} get-tuple-element(%p.4), index=0
  %part.1 = bf16[64,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p.4), index=1
  %whole.1 = bf16[4096,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p.4), index=2
  %next.1 = u32[]{:T(128)} add(%count.1, %two.1)
  %start.1 = (bf16[64,8]{1,0:S(1)}, bf16[4096,8]{1,0}) fusion(%part.1, %whole.1), kind=kCustom, calls=%piece.1
  %end.1 = (bf16[64,8]{1,0:S(1)}, bf16[4096,8]{1,0}) fusion(%part.1, %whole.1), kind=kCustom, calls=%piece.1
  ROOT %out.1 = (u32[], bf16[64,8], bf16[4096,8]) tuple(%next.1, %part.1, %whole.1)
}

%more.1 (p.5: (u32[], bf16[64,8], bf16[4096,8])) -> pred[] {
  %p.5 = (u32[]{:T(128)}, bf16[64,8]{1,0}, bf16[4096,8]{1,0}) parameter(0)
  %count.2 = u32[]{:T(128)} get-tuple-element(%p.5), index=0
  %limit.1 = u32[]{:T(128)} constant(9)
  ROOT %less.1 = pred[]{:T(512)} compare(%count.2, %limit.1), direction=LT
}

ENTRY %main.1 (a.0: bf16[32,1024,4096,1], a.1: bf16[32,128,4096,1], a.2: bf16[64,8], a.3: bf16[4096,8]) -> bf16[32,1024,32,128] {
  %a.0 = bf16[32,1024,4096,1]{2,1,0,3:T(8,128)(2,1)} parameter(0)
  %a.1 = bf16[32,128,4096,1]{2,0,1,3:T(8,128)(2,1)} parameter(1)
  %a.2 = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(2)
  %a.3 = bf16[4096,8]{1,0:T(8,128)(2,1)} parameter(3)
  %zero.1 = u32[]{:T(128)} constant(0)
  %begin.1 = (u32[], bf16[64,8], bf16[4096,8]) tuple(%zero.1, %a.2, %a.3)
  %loop.1 = (u32[], bf16[64,8], bf16[4096,8]) while(%begin.1), condition=%more.1, body=%turn.1
  ROOT %dot.1 = bf16[32,1024,32,128]{3,1,2,0:T(8,128)(2,1)S(1)} fusion(%a.0, %a.1), kind=kOutput, calls=%matmul.1
}
"""  # noqa: E501


def test_the_text_of_a_tpu():
    """A product written as a convolution, a gather in two parts, an unrolled loop."""
    work = cost.cost(TPU)
    assert work.flops == 2 * 32 * 1024 * 4096 * 4096
    # 5 turns: 0, 2, 4, 6, 8.
    assert work.collectives == {Collective("all-gather", 2 * 4096 * 8, 64): 5}
    # The product's result stays on the chip; its arguments are read whole.
    products = 2 * (32 * 1024 * 4096 + 4096 * 4096)
    assert products <= work.bytes < products + 5000


GPU = """HloModule jit_g

ENTRY %main.1 (a: bf16[64,256], b: bf16[256,32]) -> (bf16[64,32], s8[4096]) {
  %a = bf16[64,256]{1,0} parameter(0)
  %b = bf16[256,32]{1,0} parameter(1)
  ROOT %gemm.1 = (bf16[64,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501


def test_the_text_of_a_gpu():
    """A product computed by cuBLAS."""
    assert cost.cost(GPU).flops == 2 * 64 * 256 * 32


# A TPU's product takes its weights through a fusion of a bitcast alone; another reads
# what a prefetch has brought onto the chip; a third writes through such a fusion.
PREFETCHED = """HloModule jit_h

%view.1 (v.0: bf16[4096,1024]) -> bf16[4096,1024] {
  %v.0 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %same.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)} bitcast(%v.0)
}

%product.1 (w.0: bf16[4096,1024], x.0: bf16[8,4096]) -> bf16[8,1024] {
  %x.0 = bf16[8,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %w.0 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)} fusion(%w.0), kind=kLoop, calls=%view.1
  ROOT %conv.1 = bf16[8,1024]{1,0:T(8,128)(2,1)} convolution(%x.0, %w.1), dim_labels=bf_io->bf
}

%turned.1 (u.0: bf16[8,1024]) -> bf16[1024,8] {
  %u.0 = bf16[8,1024]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %same.2 = bf16[1024,8]{0,1:T(8,128)(2,1)} bitcast(%u.0)
}

%product.2 (w.2: bf16[4096,1024], x.1: bf16[8,4096]) -> bf16[1024,8] {
  %x.1 = bf16[8,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %w.2 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %conv.2 = bf16[8,1024]{1,0:T(8,128)(2,1)} convolution(%x.1, %w.2), dim_labels=bf_io->bf
  ROOT %out.2 = bf16[1024,8]{0,1:T(8,128)(2,1)} fusion(%conv.2), kind=kLoop, calls=%turned.1
}

ENTRY %main.1 (a.0: bf16[4096,1024], a.1: bf16[8,4096], a.2: bf16[4096,1024]) -> (bf16[8,1024], bf16[1024,8]) {
  %a.0 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %a.1 = bf16[8,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %a.2 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(2)
  %start.1 = (bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a.2)
  %first.1 = bf16[8,1024]{1,0:T(8,128)(2,1)} fusion(%a.0, %a.1), kind=kOutput, calls=%product.1
  %done.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%start.1)
  %second.1 = bf16[1024,8]{0,1:T(8,128)(2,1)} fusion(%done.1, %a.1), kind=kOutput, calls=%product.2
  ROOT %both.1 = (bf16[8,1024]{1,0}, bf16[1024,8]{0,1}) tuple(%first.1, %second.1)
}
"""  # noqa: E501


def test_weights_behind_a_view_and_a_prefetch_are_read_once():
    """By hand: each matrix is read once, x twice, each result is written once."""
    matrix, rows, result = 2 * 4096 * 1024, 2 * 8 * 4096, 2 * 8 * 1024
    work = cost.cost(PREFETCHED)
    assert work.bytes == 2 * matrix + 2 * rows + 2 * result
    assert work.flops == 2 * (2 * 8 * 4096 * 1024)


def test_a_copy_counts_where_it_comes_from_and_where_it_goes():
    """A copy off the chip is counted as written; a fetched slice, as read."""
    matrix = 2 * 4096 * 1024
    row = next(line for line in PREFETCHED.splitlines() if "copy-start" in line)
    copied = PREFETCHED.replace(row, row.replace("S(1)}", "}", 1))
    before = cost.cost(PREFETCHED).bytes
    assert cost.cost(copied).bytes == before + matrix
    part = row.replace(
        "(bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}",
        "(bf16[4096,1024]{1,0:T(8,128)(2,1)}, bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}",
    ).replace("copy-start", "slice-start")
    sliced = cost.cost(PREFETCHED.replace(row, part))
    assert sliced.bytes == before - matrix + matrix // 8
