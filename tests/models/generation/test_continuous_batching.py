"""A queue of prompts in fewer places gives the same samples in fewer steps."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import tiny
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlhf_jax import decode, decoder, grpo, policy, ppo
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import continuous_batching, row_shares, sampling
from rlhf_jax.models.generation.sampling import Shaping

STATIC = (
    *("model", "max_new_tokens", "stop_ids", "temperature", "shaping"),
    *("group_size", "continuous_batching"),
)


def compiled():
    """A new compiled `decode.generate` without earlier traces."""
    return toys.jit(functools.partial(decode.generate), static_argnames=STATIC)


generate = compiled()
logprobs_of = toys.jit(
    policy.logprobs_and_entropy, static_argnames=("model", "temperature")
)

LENGTHS, PROMPT, NEW = (6, 3, 1, 5, 2, 4, 6, 1, 2, 3, 6), 6, 9
ROWS = len(LENGTHS)
STOPS = (2, 7)


def inputs(lengths=LENGTHS):
    tokens, mask = tiny.batch(lengths, PROMPT, side="left")
    index = np.arange(len(lengths), dtype=np.int32)
    keys = decode.row_keys(jax.random.key(0), index=index, sample=index % 3)
    return {"tokens": tokens, "mask": mask, "keys": keys}


def sampled(model, *, generate=generate, **options):
    arguments = {"max_new_tokens": NEW, "stop_ids": STOPS, **inputs(), **options}
    return generate(tiny.params(model), model=model, **arguments)


@functools.cache
def expected_of(model, stop_ids=STOPS):
    """The samples with a place for every row."""
    return sampled(model, stop_ids=stop_ids)


def assert_same(output, expected):
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(output, name), getattr(expected, name), atol=1e-5
        )


@pytest.mark.parametrize(
    ("model", "places"),
    [
        pytest.param(tiny.GPT2, 1, marks=pytest.mark.slow),
        (tiny.LLAMA, 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *((tiny.GPT2, 3), (tiny.LLAMA, 1)),
                *((tiny.GPT2, ROWS), (tiny.LLAMA, ROWS)),
            )
        ),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_samples_are_those_of_a_place_for_every_row(model, places):
    expected = expected_of(model)
    lengths = np.asarray(expected.response_mask).sum(axis=1)
    assert 1 <= lengths.min() < np.median(lengths) < lengths.max()
    assert_same(sampled(model, continuous_batching=places), expected)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("places", "arriving", "stop_ids"),
    [
        pytest.param(6, 5, STOPS, marks=pytest.mark.slow),
        pytest.param(8, 4, STOPS, marks=pytest.mark.slow),
        pytest.param(6, 5, (), marks=pytest.mark.slow),
        pytest.param(5, 5, STOPS, marks=pytest.mark.long),
    ],
)
def test_prompts_come_in_several_at_a_time(places, arriving, stop_ids, monkeypatch):
    """For numbers that do and do not divide places and rows, with and without stops."""
    monkeypatch.setattr(
        continuous_batching, "refill_size", lambda places, *, group_size: arriving
    )
    output = sampled(
        tiny.LLAMA, generate=compiled(), stop_ids=stop_ids, continuous_batching=places
    )
    assert_same(output, expected_of(tiny.LLAMA, stop_ids))


@pytest.mark.slow
def test_the_last_responses_move_together_twice():
    batch = inputs(LENGTHS * 2)
    assert continuous_batching.fewer_places(16) == (4, 1)
    assert_same(
        sampled(tiny.GPT2, **batch, continuous_batching=16), sampled(tiny.GPT2, **batch)
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)
def test_log_probs_are_those_of_a_full_forward(model):
    output = sampled(model, continuous_batching=3, temperature=0.7)
    logprobs, entropy = logprobs_of(
        tiny.params(model),
        model=model,
        tokens=output.tokens,
        mask=output.mask,
        temperature=0.7,
    )
    drawn = np.asarray(output.response_mask)
    for mine, other in ((output.logprobs, logprobs), (output.entropy, entropy)):
        np.testing.assert_allclose(mine, np.where(drawn, other, 0.0), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shaping": Shaping(greedy=True)}, marks=pytest.mark.long),
        pytest.param(
            {"temperature": 0.3, "shaping": Shaping(top_k=3)}, marks=pytest.mark.long
        ),
        pytest.param({"max_new_tokens": 1}, marks=pytest.mark.long),
        pytest.param({"stop_ids": tuple(range(tiny.VOCAB))}, marks=pytest.mark.slow),
    ],
    ids=["greedy", "top_k", "one token", "every token stops"],
)
def test_options_act_as_without_slots(options):
    output = sampled(tiny.GPT2, **options, continuous_batching=4)
    assert_same(output, sampled(tiny.GPT2, **options))


@pytest.mark.slow
def test_layers_one_by_one():
    model = dataclasses.replace(tiny.GPT2, unroll=True)
    assert_same(sampled(model, continuous_batching=3), expected_of(tiny.GPT2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "arriving", "group"),
    [
        (3, 3, 3),
        pytest.param(8, 3, 3, marks=pytest.mark.long),
        pytest.param(16, 2, 2, marks=pytest.mark.long),
        pytest.param(7, 1, 1, marks=pytest.mark.long),
    ],
)
def test_a_group_comes_in_as_one_prompt(places, arriving, group, monkeypatch):
    assert continuous_batching.refill_size(places, group_size=group) == arriving
    tokens, mask = tiny.batch(LENGTHS[:6], PROMPT, side="left")
    batch = inputs(LENGTHS[:6] * group)
    batch |= {"tokens": np.repeat(tokens, group, 0), "mask": np.repeat(mask, group, 0)}
    places = min(places, 6 * group)
    expected = sampled(tiny.GPT2, **batch)
    run = []
    prefill = decoder.prefill

    def counted(params, *, tokens, **options):
        run.append(tokens.shape[0])
        return prefill(params, tokens=tokens, **options)

    monkeypatch.setattr(decoder, "prefill", counted)
    fresh = compiled()
    output = sampled(
        tiny.GPT2, generate=fresh, **batch, continuous_batching=places, group_size=group
    )
    assert_same(output, expected)
    assert set(run) == {1}


def steps(batch, **options):
    """The samples, and the number of rows of each call, for prompts and for steps."""
    rows_of_steps = []
    draw = sampling.sample_token

    def counted(logits, **options):
        jax.debug.callback(lambda: rows_of_steps.append(logits.shape[0]))
        return draw(logits, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "sample_token", counted)
        fresh = compiled()
        output = sampled(tiny.GPT2, generate=fresh, **batch, **options)
        jax.block_until_ready(output)
        jax.effects_barrier()
    return output, rows_of_steps


@pytest.mark.slow
def test_no_slot_waits_while_a_prompt_does():
    """The number of steps is the least for these lengths in their order of arrival."""
    places = 3
    output, rows_of_steps = steps(inputs(), continuous_batching=places)
    lengths = np.asarray(output.response_mask).sum(axis=1)
    ends = [0] * places  # a place takes the next prompt when it is the first to end
    for length in lengths:
        ends[ends.index(min(ends))] += int(length) - 1  # the first comes at once
    assert rows_of_steps.count(1) == ROWS
    assert rows_of_steps.count(places) == max(ends)
    assert len(rows_of_steps) == ROWS + max(ends)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)
def test_samples_do_not_depend_on_the_devices(model):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    batch = inputs((*LENGTHS, *LENGTHS[:5]))
    output = generate(
        jax.device_put(tiny.params(model), NamedSharding(mesh, PartitionSpec())),
        model=model,
        max_new_tokens=NEW,
        stop_ids=STOPS,
        continuous_batching=8,
        **jax.device_put(batch, rows),
    )
    assert_same(output, sampled(model, **batch))


RECIPE = {
    "model": toys.LLAMA,
    "policy_optimizer": optax.sgd(0.1),
    "max_new_tokens": toys.SIZE,
    "stop_ids": toys.STOP,
}
PPO = ppo.PPO(critic_model=toys.LLAMA, critic_optimizer=optax.sgd(0.1), **RECIPE)
PLACES = dataclasses.replace(PPO, continuous_batching=8)
sample = toys.jit(ppo.sample, static_argnames="recipe")


@pytest.mark.slow
def test_on_a_mesh():
    prompts = toys.prompts((4, 2, 3, 1) * 4)
    params = toys.params(toys.LLAMA)
    expected = sample(params, prompts=prompts, key=jax.random.key(3), recipe=PPO)
    with jax.set_mesh(MeshShape(data=2, fsdp=2, tensor=2).make()):
        output = sample(
            sharding.place(params),
            prompts=row_sharding.put_rows(prompts),
            key=jax.random.key(3),
            recipe=PLACES,
        )
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.response_mask, expected.response_mask)
    np.testing.assert_allclose(output.old_logprobs, expected.old_logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_recipe_passes_its_places_on(monkeypatch):
    """No metric would show it."""
    places_of_calls = []
    respond = row_shares.respond

    def recording(*args, places, group_size, **options):
        places_of_calls.append((places, group_size))
        return respond(*args, places=places, group_size=group_size, **options)

    monkeypatch.setattr(row_shares, "respond", recording)
    groups = grpo.GRPO(**RECIPE, group_size=2, continuous_batching=2)
    for run, places in (
        (
            functools.partial(
                ppo.sample, recipe=dataclasses.replace(PPO, continuous_batching=3)
            ),
            3,
        ),
        (functools.partial(grpo.sample, recipe=groups), 2),
        (functools.partial(ppo.sample, recipe=PPO), None),
    ):
        places_of_calls.clear()
        jax.eval_shape(
            functools.partial(run, prompts=toys.prompts(), key=jax.random.key(3)),
            toys.params(toys.LLAMA),
        )
        assert [taken for taken, _ in places_of_calls] == (
            [] if places is None else [places]
        )


@pytest.mark.slow
def test_places_that_cannot_be():
    def call(places, **options):
        named = {
            "continuous_batching": places,
            "stop_ids": (),
            "max_new_tokens": 4,
            **options,
        }
        jax.eval_shape(
            lambda params: decode.generate(
                params, model=tiny.GPT2, **inputs(LENGTHS[:6]), **named
            ),
            tiny.params(tiny.GPT2),
        )

    for places in (0, 7):
        message = (
            r"continuous_batching: expected from 1 .* to 6 \(all rows\), "
            rf"got {places}; choose"
        )
        with pytest.raises(InputError, match=message):
            call(places)
    with pytest.raises(InputError, match=r"from 3 \(the rows of one prompt\) .* got 2"):
        call(2, group_size=3)
    with pytest.raises(InputError, match="group_size"):
        call(4, group_size=4)
    with pytest.raises(InputError, match=r"temperature: .* above 0, got 0"):
        call(3, temperature=0.0)
    with pytest.raises(InputError, match=r"max_new_tokens: .* 1 or more, got 0"):
        call(3, max_new_tokens=0)
    with pytest.raises(InputError, match=r"max_new_tokens: .* at most 24, got 25"):
        call(3, max_new_tokens=19)
    for number in (0, -1):
        with pytest.raises(InputError, match="continuous_batching: expected"):
            dataclasses.replace(PPO, continuous_batching=number)
    call(6)
