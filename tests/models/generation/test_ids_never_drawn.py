"""Samplers of a model with unused ids draw like a model without these rows.

The other model has only the embeddings of the used ids, in order. A draw inverts the
cumulative distribution, so both draw the same tokens with the same keys.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import toys

from rlhf_jax import decode, policy
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models.generation import episode_places, episodes, mixture
from rlhf_jax.models.generation.episode_places import Arrivals
from rlhf_jax.models.generation.sampling import Decoder, Draw, Shaping

UNUSED = ((0, 2), (5, 6), (10, 13))
USED = np.array([2, 3, 4, 6, 7, 8, 9])
STOPS, PROMPT, NEW, TEMPERATURE = (1, 4), 4, 9, 0.7  # places in USED
LENGTHS = (4, 2, 0, 1, 3, 4, 0, 2)  # an empty prompt's first token is drawn uniformly
ROWS = len(LENGTHS)
logprobs_of = toys.jit(
    policy.logprobs_and_entropy, static_argnames=("model", "temperature")
)


def unused(model):
    return dataclasses.replace(model, unused_ids=UNUSED)


def without(model):
    return dataclasses.replace(model, vocab_size=len(USED), unused_ids=())


def rows_of_used(params):
    def cut(leaf):
        rows = np.zeros_like(leaf)
        rows[: len(USED)] = np.asarray(leaf)[USED]
        return jax.device_put(rows)

    embed = {**params["embed"], "tokens": cut(params["embed"]["tokens"])}
    cut_off = {**params, "embed": embed}
    if "head" in params:
        cut_off["head"] = {"kernel": cut(params["head"]["kernel"])}
    return cut_off


def pair(model, *, seed=0):
    """(parameters, shape) of the model with unused ids, and of the one without."""
    params = tiny.params(model, seed)
    return (params, unused(model)), (rows_of_used(params), without(model))


def arguments_of(*, mapped: bool):
    random = np.random.default_rng(1)
    mask = np.arange(PROMPT)[None] >= PROMPT - np.array(LENGTHS)[:, None]
    tokens = random.integers(0, len(USED), mask.shape).astype(np.int32)
    index = np.arange(ROWS, dtype=np.int32)
    tokens = np.where(mask, USED[tokens] if mapped else tokens, 0).astype(np.int32)
    keys = decode.row_keys(jax.random.key(0), index=index, sample=index % 3)
    return {"tokens": tokens, "mask": mask, "keys": keys}


def stops(*, mapped: bool):
    return tuple(int(USED[i]) if mapped else i for i in STOPS)


def sampled(params, model, **options):
    mapped = bool(model.unused_ids)
    program = functools.partial(
        decode.generate,
        model=model,
        max_new_tokens=NEW,
        stop_ids=stops(mapped=mapped),
        temperature=TEMPERATURE,
        **options,
    )
    return toys.jit(program)(params, **arguments_of(mapped=mapped))


def assert_same(output, expected):
    """Asserts tokens equal by their places in USED, and equal numbers."""
    mask = np.asarray(expected.mask)
    assert mask[:, PROMPT:].any()
    for name in ("mask", "response_mask"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))
    tokens = np.where(mask, USED[np.asarray(expected.tokens)], 0)
    np.testing.assert_array_equal(output.tokens, tokens)
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(output, name), getattr(expected, name), atol=1e-5
        )


OPTIONS = {
    "policy": {},
    "top_k and min_p": {"shaping": Shaping(top_k=10, min_p=0.05)},
    "top_p": {"shaping": Shaping(top_p=0.8)},
    "greedy": {"shaping": Shaping(greedy=True)},
    "continuous": {"continuous_batching": 3},
}


@pytest.mark.cases(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (tiny.LLAMA, "policy"),
        (tiny.GPT2, "top_k and min_p"),
        (tiny.GPT2, "continuous"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((tiny.MIXED, "policy"), (tiny.GPT2, "top_p")),
                (tiny.LLAMA, "greedy"),
            )
        ),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_samples_are_those_of_a_model_without_the_ids(model, options):
    (params, shape), other = pair(model)
    output = sampled(params, shape, **OPTIONS[options])
    assert_same(output, sampled(*other, **OPTIONS[options]))
    drawn = np.asarray(output.response_mask)
    assert set(np.asarray(output.tokens)[drawn]) <= set(USED)
    if "shaping" in OPTIONS[options]:
        return
    # The sampler's numbers are those of a full forward pass.
    logprobs, entropy = logprobs_of(
        params,
        model=shape,
        tokens=output.tokens,
        mask=output.mask,
        temperature=TEMPERATURE,
    )
    for own, full in ((output.logprobs, logprobs), (output.entropy, entropy)):
        np.testing.assert_allclose(own, np.where(drawn, full, 0), atol=1e-5)


@pytest.mark.slow
def test_samples_in_pages():
    model = dataclasses.replace(tiny.LLAMA, cache_pages=20, page_size=3)
    (params, shape), other = pair(model)
    options = {"continuous_batching": 3}
    assert_same(sampled(params, shape, **options), sampled(*other, **options))


@pytest.mark.slow
def test_unused_ids_would_be_drawn_without_the_mask():
    params, model = tiny.params(tiny.GPT2), tiny.GPT2
    output = sampled(params, dataclasses.replace(model, unused_ids=((12, 13),)))
    drawn = np.asarray(output.tokens)[np.asarray(output.response_mask)]
    assert np.mean(~np.isin(drawn, USED)) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(data=8), MeshShape(data=2, tensor=4)])
def test_samples_on_eight_devices(mesh):
    """A sharded vocabulary has unused ids on some devices only."""
    (params, shape), _ = pair(tiny.GPT2)
    expected = sampled(params, shape)
    mesh = mesh.make()
    inputs = arguments_of(mapped=True)
    rows = row_sharding.put_rows((inputs["tokens"], inputs["mask"]), mesh=mesh)
    program = functools.partial(
        decode.generate,
        model=shape,
        max_new_tokens=NEW,
        stop_ids=stops(mapped=True),
        temperature=TEMPERATURE,
    )
    output = toys.jit(sharding.on(mesh, program))(
        sharding.place(params, mesh=mesh),
        tokens=rows[0],
        mask=rows[1],
        keys=sharding.place(inputs["keys"], mesh=mesh),
    )
    for name in ("tokens", "response_mask"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
    logprobs, entropy = toys.jit(
        sharding.on(
            mesh,
            functools.partial(
                policy.logprobs_and_entropy, model=shape, temperature=TEMPERATURE
            ),
        )
    )(
        sharding.place(params, mesh=mesh),
        **dict(
            zip(
                ("tokens", "mask"),
                row_sharding.put_rows(
                    jax.device_get((output.tokens, output.mask)), mesh=mesh
                ),
                strict=True,
            )
        ),
    )
    drawn = np.asarray(output.response_mask)
    for own, full in ((output.logprobs, logprobs), (output.entropy, entropy)):
        np.testing.assert_allclose(own, np.where(drawn, full, 0), atol=1e-5)


@pytest.mark.slow
def test_a_mixture_leaves_them_out():
    ours, theirs = (pair(model, seed=at) for at, model in enumerate(tiny.BOTH))

    def mixed(at: int):
        (params, model), other = ours[at], theirs[at]
        mapped = bool(model.unused_ids)
        inputs = arguments_of(mapped=mapped)
        inputs["mask"] = inputs["mask"].copy()
        inputs["mask"][:, -1] = True  # a mixture has no empty prompt
        inputs["tokens"][~inputs["mask"]] = 0
        inputs["tokens"][:, -1] = USED[3] if mapped else 3
        draw = functools.partial(
            mixture.generate,
            Decoder(params, model),
            Decoder(*other),
            share=0.3,
            max_new_tokens=NEW,
            stop_ids=stops(mapped=mapped),
            temperature=TEMPERATURE,
        )
        return toys.jit(draw)(**inputs)

    assert_same(mixed(0), mixed(1))


@pytest.mark.slow
def test_places_of_episodes_leave_them_out():
    """Also with an empty prompt, whose first token has no prediction."""
    prompts, turn = ([3, 5, 2], [], [1]), 6

    def turns(params, model):
        mapped = bool(model.unused_ids)
        tokens = np.zeros((len(prompts), 4), np.int32)
        for at, row in enumerate(prompts):
            tokens[at, : len(row)] = USED[row] if mapped else row
        _, _, layers, _ = Decoder(params, model).to_decode(rows=3)
        draw = Draw((), TEMPERATURE, unused=model.unused_ids)
        state = episode_places.empty(model, places=3, columns=16, key=jax.random.key(0))
        arrivals = Arrivals(
            place=np.arange(3, dtype=np.int32),
            tokens=tokens,
            count=np.array([len(row) for row in prompts], np.int32),
            begins=np.ones(3, bool),
            prompt=np.ones(3, bool),
            draws=np.ones(3, bool),
            turn=np.full(3, turn, np.int32),
            keys=jax.random.split(jax.random.key(5), 3),
        )

        @toys.jit
        def turn_of(params, layers, state):
            decoder = Decoder(params, model, layers)
            state = episodes.read(decoder, state, arrivals, draw=draw)
            until, steps = np.int32(0), np.int32(turn)
            return episodes.advance(decoder, state, until=until, steps=steps, draw=draw)

        return turn_of(params, layers, state)

    (params, shape), other = pair(tiny.LLAMA)
    output, expected = turns(params, shape), turns(*other)
    sizes = np.asarray(expected.length)
    assert sizes.tolist() == [len(row) + turn for row in prompts]
    for at, size in enumerate(sizes):
        own = np.asarray(output.tokens)[at, :size]
        np.testing.assert_array_equal(own, USED[np.asarray(expected.tokens)[at, :size]])
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
