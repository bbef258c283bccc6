"""Places of episodes: drawing in one place does not change the others."""

import functools

import jax
import numpy as np
import pytest
import tiny
import toys

from rlhf_jax.models.generation import decode, episode_places, episodes
from rlhf_jax.models.generation.episode_places import Arrivals
from rlhf_jax.models.generation.sampling import Decoder, Draw
from rlhf_jax.roles import policy

PLACES, COLUMNS, CHUNK = 3, 20, 4
OPTIONS = {"stop_ids": (), "temperature": 1.0}


@functools.cache
def programs(model):
    """Functions of a state: `episodes.read` and `episodes.advance`, compiled."""
    _, _, layers, _ = Decoder(tiny.params(model), model).to_decode(rows=PLACES)

    def compiled(function):
        @toys.jit
        def run(params, *args, **options):
            decoder = Decoder(params, model, layers)
            return function(decoder, *args, draw=Draw(**OPTIONS), **options)

        return run

    return compiled(episodes.read), compiled(episodes.advance)


def arriving(*rows, draws):
    """The arrival of an initial prompt in each place."""
    count = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), CHUNK), np.int32)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    return Arrivals(
        place=np.arange(len(rows), dtype=np.int32),
        tokens=tokens,
        count=count,
        begins=np.ones(len(rows), bool),
        prompt=np.ones(len(rows), bool),
        draws=np.array(draws),
        turn=np.full(len(rows), 6, np.int32),
        keys=jax.random.split(jax.random.key(5), len(rows)),
    )


def begun(model, *rows, draws):
    read, _ = programs(model)
    state = episode_places.empty(
        model, places=PLACES, columns=COLUMNS, key=jax.random.key(0)
    )
    return read(tiny.params(model), state, arriving(*rows, draws=draws))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        tiny.GPT2,
        *(pytest.param(m, marks=pytest.mark.slow) for m in (tiny.MIXED, tiny.SHARED)),
    ],
    ids=["gpt2", "mixed", "shared"],
)
def test_a_place_that_reads_keeps_its_cache_while_others_draw(model):
    """Checked to the bit, as a step of one token rounds otherwise than a chunk."""
    state = begun(model, [3, 4, 5], [6, 7, 8, 9], draws=[True, False])
    marked = jax.tree.map(lambda leaf: leaf.at[1, :, :4].set(1.5), state.caches)
    state = state.replace(caches=marked)
    _, advance = programs(model)
    after = advance(tiny.params(model), state, until=np.int32(0), steps=np.int32(3))
    assert after.length.tolist()[:2] == [3 + 1 + 3, 4]
    for before, now in zip(
        jax.tree.leaves(state.caches), jax.tree.leaves(after.caches), strict=True
    ):
        np.testing.assert_array_equal(now[1, :, :4], before[1, :, :4])
        assert (np.asarray(now[0, :, 3:6]) != np.asarray(before[0, :, 3:6])).any()


@pytest.mark.slow
def test_the_first_token_of_an_empty_prompt_has_log_prob_0():
    """As in the sampler of one turn and in a full pass."""
    model = tiny.GPT2
    state = begun(model, [], [3, 4], draws=[True, True])
    _, advance = programs(model)
    state = advance(tiny.params(model), state, until=np.int32(0), steps=np.int32(5))
    tokens, size = np.asarray(state.tokens)[:1, :6], 6
    full = policy.logprobs(
        tiny.params(model), model=model, tokens=tokens, mask=np.ones((1, size), bool)
    )
    assert state.logprobs[0, 0] == state.entropy[0, 0] == 0
    np.testing.assert_allclose(state.logprobs[0, :size], full[0], atol=1e-5)
    expected = toys.jit(
        functools.partial(decode.generate, model=model, max_new_tokens=size, **OPTIONS)
    )(
        tiny.params(model),
        tokens=np.zeros((1, 1), np.int32),
        mask=np.zeros((1, 1), bool),
        keys=jax.random.split(jax.random.key(5), 2)[:1],
    )
    np.testing.assert_array_equal(tokens, expected.tokens[:, 1:])
