"""Continuous batching with a pool of pages draws the samples of full caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toys
from jax.sharding import AxisType
from places import FIXTURES

from rlhf_jax import decode, hf, policy
from rlhf_jax.devices import program_cache, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import attention, caches
from rlhf_jax.models.attention import pages as pages_module
from rlhf_jax.models.generation import paged_caches, sampling

LENGTHS, PROMPT, NEW = (6, 3, 1, 5, 2, 4, 6, 1, 2), 6, 9
ROWS = len(LENGTHS)
STOPS = (2, 7)
LEAST = {1: 14, 3: 5, 4: 4, 64: 1}  # pages of a longest row, by their columns


def inputs(model, lengths=LENGTHS):
    tokens, mask = tiny.batch(lengths, PROMPT, side="left")
    index = np.arange(len(lengths), dtype=np.int32)
    keys = decode.row_keys(jax.random.key(0), index=index, sample=index % 3)
    return {"tokens": tokens % model.vocab_size, "mask": mask, "keys": keys}


def sampled(model, params=None, *, batch=None, **options):
    options = {"max_new_tokens": NEW, "stop_ids": STOPS, **options}
    run = toys.jit(functools.partial(decode.generate, model=model, **options))
    params = tiny.params(model) if params is None else params
    return run(params, **(inputs(model) if batch is None else batch))


def in_pages(model, pages, size):
    return dataclasses.replace(model, cache_pages=pages, page_size=size)


def assert_same(output, expected, *, atol=1e-5):
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(output, name), getattr(expected, name), atol=atol
        )


@functools.cache
def expected_of(model, stop_ids=STOPS):
    return sampled(model, stop_ids=stop_ids)


SLOW = (
    (tiny.MIXED, 5, 3, 7, STOPS),
    *((tiny.MIXED, 3, 3, 5, ()), (tiny.MIXED, 5, 1, 20, STOPS)),
    *((tiny.GPT2, 1, 4, 4, STOPS), (tiny.GPT2, 8, 4, 40, ())),
    *((tiny.LLAMA, 4, 3, 9, ()), (tiny.LLAMA, ROWS, 64, 3, STOPS)),
)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("model", "places", "size", "pages", "stop_ids"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_samples_are_those_of_a_cache_for_every_row(
    model, places, size, pages, stop_ids
):
    """With and without windows; from the smallest pool to one with room for all."""
    assert pages >= LEAST[size]
    expected = expected_of(model, stop_ids)
    output = sampled(
        in_pages(model, pages, size), stop_ids=stop_ids, continuous_batching=places
    )
    assert_same(output, expected)


WITH_A_RING = dataclasses.replace(
    toys.GPT2, num_layers=2, sliding_window=3, local_layers=(True, False)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [toys.GPT2, pytest.param(WITH_A_RING, marks=pytest.mark.slow)]
)
def test_responses_are_drawn_from_whole_forward_passes(model):
    """In the smallest pool, in which rows wait."""
    params, lengths, prompt, new = toys.params(model), (5, 2, 4, 1) * 4, 5, 8
    tokens, mask = tiny.batch(lengths, prompt, side="left")
    keys = inputs(model, lengths)["keys"]
    output = toys.jit(
        functools.partial(
            decode.generate,
            model=in_pages(model, 6, 2),
            max_new_tokens=new,
            stop_ids=(3, 8),
            continuous_batching=3,
        )
    )(params, tokens=tokens, mask=mask, keys=keys)

    def drawn_again(params, tokens, mask, keys):
        logits = policy.logits(params, model=model, tokens=tokens, mask=mask)
        mine = jax.vmap(
            jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None)
        )(keys, jnp.arange(new))
        logits = logits[:, prompt - 1 : -1].reshape(-1, logits.shape[-1])
        return sampling.sample_token(logits, keys=mine.reshape(-1), temperature=1.0)

    again = toys.jit(drawn_again)(params, output.tokens, output.mask, keys)
    drawn = np.asarray(output.response_mask)[:, prompt:]
    for name, expected in zip(("tokens", "logprobs", "entropy"), again, strict=True):
        one, other = getattr(output, name)[:, prompt:], expected.reshape(drawn.shape)
        np.testing.assert_allclose(one, np.where(drawn, other, 0), atol=1e-5)
    # A response ends with its first stop token, or with its last column.
    ends = np.isin(np.asarray(output.tokens)[:, prompt:], (3, 8)) & drawn
    sizes = drawn.sum(axis=1)
    assert sizes.min() < 3 < sizes.max()
    assert ((sizes == new) | ends.any(axis=1)).all()
    assert (ends.sum(axis=1) <= 1).all()
    last = ends[np.arange(len(lengths)), sizes - 1]
    np.testing.assert_array_equal(last, ends.any(axis=1))


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_e2b",
        "gemma4_moe",
        "mistral",
        "phi3",
        "qwen2",
        "olmo3",
        "smollm3",
    ],
)
@pytest.mark.parametrize("cache", ["same", "int8"])
def test_families_with_windows(name, cache):
    model, params = hf.load(FIXTURES / name, dtype="float32")
    model = dataclasses.replace(model, cache=cache)
    batch = inputs(model)
    if all(model.is_local(n) for n in range(model.num_layers)):
        # Longer than any row, so that pages hold all layers.
        model = dataclasses.replace(model, sliding_window=PROMPT + NEW)
    stops = tuple(range(12))
    expected = sampled(model, params, batch=batch, stop_ids=stops)
    lengths = np.asarray(expected.response_mask).sum(axis=1)
    assert lengths.min() < lengths.max()
    output = sampled(
        in_pages(model, 8, 2),
        params,
        batch=batch,
        stop_ids=stops,
        continuous_batching=4,
    )
    assert_same(output, expected)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"stop_ids": tuple(range(tiny.VOCAB))},
        {"stop_ids": tuple(range(0, tiny.VOCAB, 2))},
    ],
    ids=["one token", "every token stops", "most are short"],
)
def test_short_responses(options):
    output = sampled(in_pages(tiny.GPT2, 5, 4), continuous_batching=4, **options)
    assert_same(output, sampled(tiny.GPT2, **options))


@pytest.mark.slow
def test_groups_come_in_together():
    lengths = np.repeat(LENGTHS[:4], 3)
    tokens, mask = tiny.batch(LENGTHS[:4], PROMPT, side="left")
    batch = inputs(tiny.GPT2, lengths)
    batch |= {"tokens": np.repeat(tokens, 3, 0), "mask": np.repeat(mask, 3, 0)}
    expected = sampled(tiny.GPT2, batch=batch)
    # A longest row of 4 pages, and two prompts of 2.
    output = sampled(
        in_pages(tiny.GPT2, 8, 4), batch=batch, continuous_batching=6, group_size=3
    )
    assert_same(output, expected)


@pytest.mark.slow
def test_empty_prompts_and_a_prompt_in_chunks():
    batch = inputs(tiny.MIXED, (0, 3, 0, 6, 1))
    model = dataclasses.replace(in_pages(tiny.MIXED, 6, 3), prefill_chunk=2)
    output = sampled(model, batch=batch, continuous_batching=2)
    assert_same(output, sampled(tiny.MIXED, batch=batch))


@pytest.mark.slow
def test_heads_on_several_devices():
    expected = expected_of(tiny.LLAMA)
    with jax.set_mesh(MeshShape(tensor=2).make(jax.devices()[:2])):
        output = sampled(
            in_pages(tiny.LLAMA, 7, 3),
            sharding.place(tiny.params(tiny.LLAMA)),
            continuous_batching=3,
        )
    assert_same(output, expected)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "model", "engine"),
    [
        (MeshShape(data=3), tiny.MIXED, "xla"),
        (MeshShape(data=3, tensor=2), tiny.LLAMA, "blockwise"),
    ],
    ids=["rows", "rows and heads"],
)
def test_each_share_of_the_rows_has_pages_of_its_own(mesh, model, engine):
    """Some shares end before others, which continue alone."""
    expected = expected_of(model)
    paged = dataclasses.replace(in_pages(model, 21, 3), attention=engine)
    with jax.set_mesh(mesh.make(jax.devices()[: mesh.size])):
        output = sampled(
            paged, sharding.place(tiny.params(model)), continuous_batching=6
        )
    assert_same(output, expected)


ONE_LAYER = dataclasses.replace(
    tiny.LLAMA, num_layers=1, num_kv_heads=1, vocab_multiple=4
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        (MeshShape(data=2, tensor=2), ONE_LAYER),
        (MeshShape(data=2, tensor=4), ONE_LAYER),
        (
            MeshShape(data=2, tensor=4),
            dataclasses.replace(tiny.MIXED, vocab_multiple=4),
        ),
    ],
    ids=["one head", "a head of four", "windows"],
)
def test_shares_that_exchange_heads_go_on_in_step(mesh, model):
    """`tensor` does not divide the heads, so all devices take part in an exchange."""
    paged, params = in_pages(model, 18, 3), tiny.params(model)
    batches = [inputs(model, (6, 3, 1, 5) * 4), inputs(model, (2, 5, 6, 1) * 4)]
    outputs = [sampled(model, params, batch=batch) for batch in batches]
    run = jax.jit(
        functools.partial(
            decode.generate,
            model=paged,
            max_new_tokens=NEW,
            stop_ids=STOPS,
            continuous_batching=8,
        )
    )
    with jax.set_mesh(mesh.make(jax.devices()[: mesh.size])):
        params = sharding.place(params)
        before = program_cache.compiled_so_far()
        for batch, expected in zip(batches, outputs, strict=True):
            lengths = np.asarray(expected.response_mask).sum(axis=1).reshape(2, -1)
            assert lengths.sum(axis=1).std() > 0
            # Sums over `tensor` round otherwise.
            assert_same(run(params, **batch), expected, atol=2e-5)
    assert program_cache.compiled_since(before)["generate"] == 1


@pytest.mark.slow
def test_groups_stay_together_in_a_share():
    """Two shares of three groups of two rows; greedy, so rows of a group agree."""
    batch = inputs(tiny.MIXED, (6, 6, 3, 3, 1, 1, 5, 5, 2, 2, 4, 4))
    batch["tokens"] = batch["tokens"][::2].repeat(2, axis=0)
    options = {"group_size": 2, "shaping": sampling.Shaping(greedy=True)}
    expected = sampled(tiny.MIXED, batch=batch, **options)
    with jax.set_mesh(MeshShape(data=2).make(jax.devices()[:2])):
        output = sampled(
            in_pages(tiny.MIXED, 20, 3),
            sharding.place(tiny.params(tiny.MIXED)),
            batch=batch,
            continuous_batching=4,
            **options,
        )
    assert_same(output, expected)
    np.testing.assert_array_equal(output.tokens[::2], output.tokens[1::2])


@pytest.mark.long
@pytest.mark.slow
def test_memory_follows_the_pages():
    """At equal rows, the program's temporaries shrink as the pool does."""
    model = dataclasses.replace(tiny.LLAMA, max_positions=600)

    def temporary(pages):
        run = functools.partial(
            decode.generate,
            model=model if pages is None else in_pages(model, pages, 16),
            max_new_tokens=500,
            stop_ids=STOPS,
            continuous_batching=ROWS,
        )
        compiled = jax.jit(run).lower(tiny.params(model), **inputs(model)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    column = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4  # bytes
    whole, full, half = temporary(None), temporary(9 * 32), temporary(9 * 16)
    assert full - half >= 9 * 16 * 16 * column
    assert half < 0.7 * whole


@pytest.mark.parametrize(
    ("cache", "softcap"),
    [
        ("int8", 1.5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("int8", None), ("same", None), ("same", 1.5))
        ),
    ],
)
def test_attention_to_pages_by_hand(softcap, cache):
    """Rows of 5, 2 and 0 tokens, against a float64 loop over their tokens."""
    rng = np.random.default_rng(0)
    kv_heads, group, size, head_dim = 2, 3, 3, 4
    keys, values = rng.normal(size=(2, 4, kv_heads, size, head_dim)).astype(np.float32)
    query = rng.normal(size=(3, kv_heads * group, 1, head_dim)).astype(np.float32)
    new = rng.normal(size=(2, 3, kv_heads, 1, head_dim)).astype(np.float32)
    table = np.array([[2, 0], [3, 4], [4, 4]], np.int32)
    visible = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    where = attention.Pages(
        table=table,
        owner=np.array([0, 2, 0, 1], np.int32),
        seen=visible,
        page=np.array([0, 3, 4], np.int32),
        column=np.array([1, 1, 0], np.int32),
    )
    pools = tuple(map(jnp.asarray, (keys, values)))
    if cache == "int8":
        pools = tuple(map(caches.quantise, pools))

    def run(query, pools, new):
        pools = attention.append_to_pages(pools, new, pages=where)
        y = attention.attend_to_pages(
            query, pools, pages=where, scale=0.7, softcap=softcap
        )
        return y, pools

    output, pools = toys.jit(run)(query, pools, tuple(new))
    keys[[0, 3], :, 1], values[[0, 3], :, 1] = new[:, :2, :, 0]
    if cache == "int8":
        exact = keys, values
        keys, values = (
            np.asarray(x.values) * np.asarray(x.scales)[..., None] for x in pools
        )
        np.testing.assert_allclose((keys, values), exact, atol=0.02)
    for row, pages in enumerate(([2, 0], [3], [])):
        for head in range(kv_heads * group):
            k, v = (
                np.concatenate(
                    [x[p, head // group][visible[p]].astype(np.float64) for p in pages]
                    or [np.zeros((0, head_dim))]
                )
                for x in (keys, values)
            )
            logits = 0.7 * k @ query[row, head, 0]
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            share = np.exp(logits)
            expected_row = share @ v / max(share.sum(), 1e-30)
            np.testing.assert_allclose(output[row, head, 0], expected_row, atol=1e-6)


@pytest.mark.slow
def test_a_ring_of_pages_by_hand():
    """Row 0 has tokens 0 to 4 and adds token 5; row 1 is empty and adds its first."""
    pages = pages_module.ring(jnp.array([5, 0]), size=4, going=jnp.array([True, False]))
    np.testing.assert_array_equal(pages.seen, [[1, 1, 1, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(pages.page, [0, 2])
    np.testing.assert_array_equal(pages.column, [1, 0])


@pytest.mark.parametrize(
    "cache", ["same", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_prompts_fill_rings_and_pages(cache):
    """Prompts of 3 and 5 tokens in 6 columns; a window of 4, and pages of 2 columns."""
    model = dataclasses.replace(
        WITH_A_RING, sliding_window=4, cache=cache, cache_pages=7, page_size=2
    )
    of_token = np.full((2, 6), 9.0, np.float32)  # of padding
    of_token[0, 3:], of_token[1, 1:] = [10, 11, 12], [20, 21, 22, 23, 24]
    shape = (2, model.num_kv_heads, 6, model.head_dim)
    prompt = np.broadcast_to(of_token[:, None, :, None], shape)

    def fill(prompt):
        return paged_caches.filled(
            paged_caches.empty(model, places=3, pages=7, longest=11),
            [(prompt, prompt + 50)] * 2,
            model=model,
            lengths=np.array([3, 5]),
            longest=11,
            page=np.array([[4, 0, 7, 7, 7, 7], [2, 6, 5, 7, 7, 7]]),
            place=np.array([2, 0]),
        )

    for layer, expected in zip(
        toys.jit(fill)(prompt),
        (
            # Token i in column i mod 4.
            {(2, 0): 10, (2, 1): 11, (2, 2): 12}
            | {(0, 0): 24, (0, 1): 21, (0, 2): 22, (0, 3): 23},
            {(4, 0): 10, (4, 1): 11, (0, 0): 12}
            | {(2, 0): 20, (2, 1): 21, (6, 0): 22, (6, 1): 23, (5, 0): 24},
        ),
        strict=True,
    ):
        for offset, columns in zip((0, 50), layer, strict=True):
            if cache == "int8":
                columns = columns.values * columns.scales[..., None]
            for (page, column), value in expected.items():
                np.testing.assert_allclose(
                    columns[page, :, column], value + offset, rtol=1e-5
                )


@pytest.mark.slow
def test_pools_that_cannot_be():
    def call(model, places=3, **options):
        run = functools.partial(
            decode.generate,
            model=model,
            max_new_tokens=NEW,
            stop_ids=STOPS,
            continuous_batching=places,
            **options,
        )
        jax.eval_shape(run, {}, **inputs(model))  # before a parameter is read

    with pytest.raises(
        InputError, match=r"cache_pages: expected at least 5 pages of 3"
    ):
        call(in_pages(tiny.GPT2, 4, 3))
    with pytest.raises(InputError, match=r"at least 9 pages .* 2 prompts more of its"):
        call(in_pages(tiny.GPT2, 8, 3), group_size=3)
    with pytest.raises(InputError, match=r"cache_pages: expected continuous_batching"):
        call(in_pages(tiny.GPT2, 40, 3), places=None)
    with pytest.raises(InputError, match=r"windows of 4 in every layer"):
        call(in_pages(tiny.PARALLEL, 40, 3))
    with (
        jax.set_mesh(MeshShape(data=3, fsdp=2).make(jax.devices()[:6])),
        pytest.raises(
            InputError, match=r"shared by data alone, .* got one with fsdp=2"
        ),
    ):
        call(in_pages(tiny.GPT2, 42, 3))
    with (
        jax.set_mesh(jax.make_mesh((3,), ("data",), axis_types=(AxisType.Explicit,))),
        pytest.raises(InputError, match=r"with Auto axes, got one with data=3"),
    ):
        call(in_pages(tiny.GPT2, 42, 3))
    with jax.set_mesh(MeshShape(data=3).make(jax.devices()[:3])):
        with pytest.raises(InputError, match=r"cache_pages: .* multiple of 3.* got 40"):
            call(in_pages(tiny.GPT2, 40, 3))
        with pytest.raises(InputError, match=r"continuous_batching: .* multiple of 3"):
            call(in_pages(tiny.GPT2, 42, 3), places=4)
        with pytest.raises(InputError, match=r"at least 15 pages .* 3 shares.* got 12"):
            call(in_pages(tiny.GPT2, 12, 3))
        with pytest.raises(InputError, match=r"at least 9 places, as a prompt has 3"):
            call(in_pages(tiny.GPT2, 99, 3), places=6, group_size=3)
    for options in ({"cache_pages": 0}, {"cache_pages": 3, "page_size": 0}):
        with pytest.raises(
            InputError, match=r"expected a finite number above 0, got 0"
        ):
            dataclasses.replace(tiny.GPT2, **options)
