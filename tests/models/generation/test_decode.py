"""Sampling: tokens, keys, log-probs and the number of turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from places import FIXTURES

from rlhf_jax import decode, decoder, hf, policy
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import sampling
from rlhf_jax.models.generation.sampling import Decoder, Draw, Shaping

STATIC = ("model", "max_new_tokens", "stop_ids", "temperature", "shaping")
generate = jax.jit(decode.generate, static_argnames=STATIC)
sample_token = jax.jit(
    sampling.sample_token, static_argnames=("temperature", "shaping")
)
drawn = jax.jit(sampling.drawn)
shape_logits = jax.jit(sampling.shape_logits, static_argnames="shaping")
logits_of = jax.jit(policy.logits, static_argnames="model")
logprobs_of = jax.jit(policy.logprobs, static_argnames=("model", "temperature"))

LENGTHS, PROMPT, NEW = (6, 3, 1, 5, 2, 4, 6, 1), 6, 9
STOPS = (2, 7)
INDEX = np.arange(8, dtype=np.int32)
SAMPLE = np.array([0, 0, 1, 3, 0, 2, 1, 0], np.int32)
for_each_family = pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)
gpt2_and_slowly_llama = pytest.mark.parametrize(
    "model", [tiny.GPT2, pytest.param(tiny.LLAMA, marks=pytest.mark.slow)]
)


def keys_of(index=INDEX, sample=SAMPLE, seed=0):
    return decode.row_keys(jax.random.key(seed), index=index, sample=sample)


@functools.cache
def expected_of(model):
    return sampled(model)


def sampled(model, *, size=PROMPT, rows=slice(None), **options):
    tokens, mask = tiny.batch(LENGTHS, size, side="left")
    options = {"temperature": 1.0, **options}
    return generate(
        tiny.params(model),
        model=model,
        tokens=tokens[rows],
        mask=mask[rows],
        keys=options.pop("keys", keys_of(INDEX[rows], SAMPLE[rows])),
        max_new_tokens=NEW,
        stop_ids=STOPS,
        **options,
    )


def without_cache(params, *, model, tokens, mask, num_tokens):
    """Greedy decoding by full forward passes over a buffer of fixed width."""
    room = ((0, 0), (0, num_tokens))
    size = tokens.shape[1]
    tokens, mask = np.pad(tokens, room), np.pad(mask, room)
    for column in range(size, size + num_tokens):
        logits = np.asarray(logits_of(params, model=model, tokens=tokens, mask=mask))
        tokens[:, column] = logits[:, column - 1].argmax(axis=-1)
        mask[:, column] = True
    return tokens[:, size:]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        pytest.param("llama_sharded", marks=pytest.mark.slow),
        pytest.param("llama_bf16", marks=pytest.mark.slow),
    ],
)
def test_greedy_equals_a_loop_without_cache_and_transformers(name):
    model, params = hf.load(FIXTURES / name, dtype="float32")
    recorded = np.load(FIXTURES / name / "recorded.npz")
    continuation = recorded["continuation"]
    tokens, mask = recorded["left_tokens"], recorded["left_mask"]
    output = generate(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        keys=keys_of(INDEX[:4], SAMPLE[:4]),
        max_new_tokens=continuation.shape[1],
        stop_ids=(),
        shaping=Shaping(greedy=True),
    )
    size = tokens.shape[1]
    np.testing.assert_array_equal(output.tokens[:, size:], continuation)
    slowly = without_cache(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        num_tokens=continuation.shape[1],
    )
    np.testing.assert_array_equal(output.tokens[:, size:], slowly)
    assert np.asarray(output.response_mask[:, size:]).all()


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("model", "temperature"),
    [
        (tiny.GPT2, 0.3),
        *(
            pytest.param(model, temperature, marks=pytest.mark.slow)
            for model, temperature in [
                *(
                    (tiny.LLAMA, 1.0),
                    (tiny.GPT2, 1.0),
                    (tiny.GPT2, 1.5),
                    (tiny.LLAMA, 0.3),
                    (tiny.LLAMA, 1.5),
                )
            ]
        ),
    ],
)
def test_logprobs_are_those_of_a_full_forward(model, temperature):
    output = sampled(model, temperature=temperature)
    mask = np.asarray(output.response_mask)
    assert not mask[:, PROMPT:].all()  # some rows stopped
    recomputed = logprobs_of(
        tiny.params(model),
        model=model,
        tokens=output.tokens,
        mask=output.mask,
        temperature=temperature,
    )
    np.testing.assert_allclose(
        np.asarray(output.logprobs)[mask], np.asarray(recomputed)[mask], atol=1e-5
    )
    logits = logits_of(
        tiny.params(model), model=model, tokens=output.tokens, mask=output.mask
    )
    entropy = oracles.entropy(np.asarray(logits), temperature)[:, :-1]
    np.testing.assert_allclose(
        np.asarray(output.entropy)[:, 1:][mask[:, 1:]], entropy[mask[:, 1:]], atol=1e-5
    )
    for outside in (output.logprobs, output.entropy):
        assert not np.asarray(outside)[~mask].any()


@gpt2_and_slowly_llama
def test_a_row_ends_with_its_first_stop_token(model):
    output = expected_of(model)
    tokens, mask, response = map(
        np.asarray, (output.tokens, output.mask, output.response_mask)
    )
    prompts, prompt_mask = tiny.batch(LENGTHS, PROMPT, side="left")
    np.testing.assert_array_equal(tokens[:, :PROMPT], prompts)
    np.testing.assert_array_equal(mask[:, :PROMPT], prompt_mask)
    np.testing.assert_array_equal(mask[:, PROMPT:], response[:, PROMPT:])
    assert not response[:, :PROMPT].any()
    lengths = response.sum(axis=1)
    for row, length in enumerate(lengths):
        mine = tokens[row, PROMPT:]
        stops = np.flatnonzero(np.isin(mine, STOPS))
        assert length == (stops[0] + 1 if len(stops) else NEW)
        assert not mine[length:].any()
        assert response[row, PROMPT : PROMPT + length].all()
    assert 1 <= lengths.min() < lengths.max()


def assert_same_samples(output, expected, *, rows=slice(None), shift=0):
    """Asserts equal tokens, and log-probs equal up to the order of sums."""
    for name in ("tokens", "mask", "response_mask"):
        a, b = (np.asarray(getattr(x, name)) for x in (output, expected))
        np.testing.assert_array_equal(a[:, PROMPT + shift :], b[rows, PROMPT:])
    np.testing.assert_allclose(
        np.asarray(output.logprobs)[:, PROMPT + shift :],
        np.asarray(expected.logprobs)[rows, PROMPT:],
        atol=1e-5,
    )


@gpt2_and_slowly_llama
def test_samples_depend_on_key_index_and_sample_alone(model):
    expected = expected_of(model)
    for rows, wider in (([2, 0, 7, 3, 1, 5, 6, 4], 0), ([1, 3, 6], 5)):
        output = sampled(model, rows=rows, size=PROMPT + wider)
        assert_same_samples(output, expected, rows=rows, shift=wider)
    for keys in (
        keys_of(seed=1),
        keys_of(index=INDEX + 8),
        keys_of(sample=SAMPLE + 4),
    ):
        other = sampled(model, keys=keys)
        differ = np.asarray(other.tokens != expected.tokens)[:, PROMPT:]
        assert differ.any(axis=1).sum() >= 6


@pytest.mark.slow
@gpt2_and_slowly_llama
def test_samples_do_not_depend_on_the_devices(model):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    output = generate(
        jax.device_put(tiny.params(model), NamedSharding(mesh, PartitionSpec())),
        model=model,
        tokens=jax.device_put(tokens, rows),
        mask=jax.device_put(mask, rows),
        keys=jax.device_put(keys_of(), rows),
        max_new_tokens=NEW,
        stop_ids=STOPS,
    )
    assert len(output.tokens.sharding.device_set) == 8
    assert len(expected_of(model).tokens.sharding.device_set) == 1
    assert_same_samples(output, expected_of(model))


@pytest.mark.slow
def test_every_key_is_used_once(monkeypatch):
    """Every row and every turn of the loop draws with its own key."""
    keys_seen = []
    draw = sampling.sample_token

    def record(data):
        keys_seen.extend(map(tuple, np.asarray(data).tolist()))

    def recorded(logits, *, keys, **options):
        jax.debug.callback(record, jax.random.key_data(keys))
        return draw(logits, keys=keys, **options)

    monkeypatch.setattr(sampling, "sample_token", recorded)
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    keys = keys_of(np.repeat(INDEX[:4], 2), np.tile([0, 1], 4))
    whole = jax.jit(
        functools.partial(
            decode.generate, model=tiny.GPT2, max_new_tokens=NEW, stop_ids=()
        )
    )
    jax.block_until_ready(
        whole(tiny.params(tiny.GPT2), tokens=tokens, mask=mask, keys=keys)
    )
    jax.effects_barrier()
    record(jax.random.key_data(keys))  # which only fold, and never draw
    assert len(keys_seen) == len(set(keys_seen)) == 8 * NEW + 8


@functools.cache
def in_two_parts():
    """Runs start and finish as separate programs; stops end all rows early."""
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    draw = Draw((0, *STOPS, 1, 3, 4, 5, 6))

    @jax.jit
    def start(params, **prompts):
        decoders = [Decoder(params, tiny.GPT2)]
        return decode.start(decoders, max_new_tokens=NEW, draw=draw, **prompts)

    @functools.partial(jax.jit, donate_argnames="state")
    def finish(params, *, state, keys):
        decoders = [Decoder(params, tiny.GPT2)]
        return decode.finish(decoders, state=state, keys=keys, draw=draw)

    params = tiny.params(tiny.GPT2)
    state = start(params, tokens=tokens, mask=mask, keys=keys_of())
    compiled = finish.lower(params, state=state, keys=keys_of()).compile()
    return state, compiled, compiled(params, state=state, keys=keys_of())


@pytest.mark.slow
def test_the_loop_ends_with_the_last_row():
    _, _, final = in_two_parts()
    lengths = np.asarray(final.generated.response_mask).sum(axis=1)
    assert np.asarray(final.finished).all()
    assert 1 < int(final.step) == lengths.max() < NEW


@pytest.mark.slow
def test_both_parts_draw_what_generate_draws():
    """With fewer stops, responses are longer and begin with the same tokens."""
    _, _, final = in_two_parts()
    mask = np.asarray(final.generated.response_mask)
    longer = expected_of(tiny.GPT2)
    for name in ("tokens", "logprobs", "entropy"):
        a, b = (np.asarray(getattr(x, name)) for x in (final.generated, longer))
        np.testing.assert_allclose(a[mask], b[mask], atol=1e-5)


@pytest.mark.slow
def test_a_donated_cache_is_written_in_place():
    state, compiled, _ = in_two_parts()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.caches))
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    shapes = {
        "f32[" + ",".join(map(str, leaf.shape)) + "]"
        for leaf in jax.tree.leaves(state.caches)
    }
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and any(shape in line for shape in shapes)
    ]
    assert not copies


def test_sampled_frequencies_are_the_softmax():
    """χ² of 20,000 draws over 9 tokens, within its 0.999 quantile."""
    logits = np.array([1.0, -0.5, 2.0, 0.0, -np.inf, 0.3, -3.0, 1.5, 0.0], np.float32)
    draws = 20_000
    keys = jax.random.split(jax.random.key(3), draws)
    token, _, _ = sample_token(
        jnp.broadcast_to(logits, (draws, 9)), keys=keys, temperature=0.8
    )
    probs = np.exp(oracles.log_softmax(logits, 0.8))
    counts = np.bincount(token, minlength=9)
    assert counts[4] == 0
    possible = probs > 0
    expected = draws * probs[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 24.3


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("words", [11, 2 * sampling.BLOCK, 5 * sampling.BLOCK - 3])
def test_a_draw_inverts_the_cumulative_distribution(words):
    logits = np.random.default_rng(0).normal(0, 2, (64, words)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 64)
    token, logprob, entropy = sample_token(logits, keys=keys, temperature=0.7)
    for row in range(64):
        expected = oracles.log_softmax(logits[row], 0.7)
        uniform = float(jax.random.uniform(keys[row]))
        assert int(token[row]) == int(
            np.searchsorted(np.cumsum(np.exp(expected)), uniform, side="right")
        )
        np.testing.assert_allclose(logprob[row], expected[int(token[row])], atol=1e-5)
    np.testing.assert_allclose(entropy, oracles.entropy(logits, 0.7), atol=1e-5)


def test_the_block_of_a_draw_and_its_place_there():
    """Integer weights: every sum is exact, and every edge of a block is hit."""
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 3, 4 * sampling.BLOCK - 5).astype(np.float32)
    weights[sampling.BLOCK - 9 : 2 * sampling.BLOCK + 7] = 0  # a block of nothing
    total = int(weights.sum())
    share = np.arange(total, dtype=np.float64)
    expected = np.searchsorted(np.cumsum(weights), share, side="right")
    # Half of a count above: a share as float32 may be that little off.
    tokens = drawn(
        jnp.broadcast_to(weights, (total, len(weights))),
        uniform=jnp.asarray((share + 0.5) / total, jnp.float32),
    )
    np.testing.assert_array_equal(tokens, expected)
    assert set(expected) == set(np.flatnonzero(weights))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_a_token_of_probability_0_is_never_drawn_of_many_words(uniform):
    weights = np.zeros((4, 3 * sampling.BLOCK + 1), np.float32)
    weights[0, [sampling.BLOCK, 2 * sampling.BLOCK - 1]] = 0.5
    weights[1, -1] = 1e-30
    weights[2, [0, -1]] = [1.0, 1e-30]
    weights[3, sampling.BLOCK + 1 :: 2] = np.random.default_rng(0).random(256)
    tokens = drawn(jnp.asarray(weights), uniform=jnp.full(4, uniform))
    assert (weights[np.arange(4), np.asarray(tokens)] > 0).all()
    assert int(tokens[0]) == sampling.BLOCK + (sampling.BLOCK - 1) * (uniform >= 0.5)
    assert int(tokens[1]) == 3 * sampling.BLOCK


@pytest.mark.parametrize("words", [5, sampling.BLOCK + 1])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_a_row_of_no_distribution_draws_a_word_and_is_not_finite(words, what):
    """Later readers of the rollout, such as the reference, stay finite."""
    logits = np.zeros((2, words), np.float32)
    logits[1] = what
    token, logprob, entropy = sample_token(
        logits, keys=jax.random.split(jax.random.key(0), 2), temperature=1.0
    )
    assert 0 <= int(token[0]) < words
    assert int(token[1]) == words - 1
    for array in (logprob, entropy):
        np.testing.assert_array_equal(np.isfinite(array), [True, False])


def test_a_target_that_rounds_below_its_block_takes_the_first_possible_word():
    """1 + 7e-8 rounds to 1 + 2^-23, so 1.2e-7 seems to precede the second block."""
    weights = np.zeros((1, 2 * sampling.BLOCK), np.float32)
    weights[0, [3, sampling.BLOCK + 5]] = [7e-8, 1.0]
    tokens = drawn(jnp.asarray(weights), uniform=jnp.asarray([8e-8]))
    assert int(tokens[0]) == sampling.BLOCK + 5


GRID = 2**23  # of which a uniform number is one


def float64_logprobs(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    scaled -= scaled.max()
    return scaled - np.log(np.exp(scaled).sum())


@jax.jit
def probabilities(logits, temperature):
    return jnp.exp(jax.nn.log_softmax(logits / temperature))


def random_logits(words, dtype=np.float32, *, planted=False):
    """Normal logits; if planted, every block begins with a token of odds exp(-70)."""
    logits = np.random.default_rng(0).normal(0, 2, words).astype(np.float32)
    if planted:
        logits[:: sampling.BLOCK] = logits.max() - 70
    return jnp.asarray(logits).astype(dtype)


def drawn_of_one_row(weights, steps):
    """The tokens that sample_token would draw at some points of the grid."""
    return jax.vmap(
        lambda step: sampling.drawn(
            weights[None], uniform=step[None].astype(jnp.float32) / GRID
        )[0]
    )(steps)


# Compiled as a run's programs are, not as those of tests: the grid is large.
counted = jax.jit(
    lambda weights, steps: jax.lax.map(
        lambda some: drawn_of_one_row(weights, some), steps
    ),
    compiler_options={
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.7, 3.0])
@pytest.mark.parametrize("words", [200, 50_257])
def test_no_draw_at_an_edge_takes_an_unlikely_token(words, temperature):
    """Grid points at every edge of a block and of tokens above 1e-4, and the ends."""
    logits = random_logits(words, planted=words > sampling.BLOCK)
    logprobs = float64_logprobs(logits, temperature)
    ends = np.cumsum(np.exp(logprobs))
    likely = np.exp(logprobs) > 1e-4
    edges = np.concatenate([ends[:: sampling.BLOCK], ends[likely], (ends - 1e-4)[:1]])
    steps = np.round(edges * GRID)[:, None] + np.arange(-4, 5)
    steps = np.unique(np.clip([*steps.ravel(), 0], 0, GRID - 1)).astype(np.int32)
    weights = probabilities(logits, temperature)
    tokens = np.asarray(jax.jit(drawn_of_one_row)(weights, steps))
    assert logprobs[tokens].min() > -30
    # Sums in float32 may move an edge by a few steps, and a draw there to a neighbour.
    below, above = (
        np.searchsorted(ends, (steps + at) / GRID, side="right") for at in (-5, 6)
    )
    assert ((below <= tokens) & (tokens <= np.minimum(above, words - 1))).all()
    rows = np.broadcast_to(weights, (len(steps[-64:]), words))
    batched = drawn(rows, uniform=jnp.asarray(steps[-64:] / GRID, jnp.float32))
    # Another program may sum in another order, and move an edge by a step.
    batched = np.asarray(batched)
    assert logprobs[batched].min() > -30
    assert ((below[-64:] <= batched) & (batched <= above[-64:])).all()


@pytest.mark.parametrize("words", [5, 2 * sampling.BLOCK])
def test_a_uniform_number_of_0_takes_no_unlikely_first_token(words):
    weights = np.full((1, words), 1 / words, np.float32)
    weights[0, 0] = 2.0**-26
    tokens = drawn(jnp.asarray(weights), uniform=jnp.zeros(1))
    assert int(tokens[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [200, 5 * sampling.BLOCK - 3])
def test_logits_of_bfloat16_are_taken_to_float32(words):
    logits = random_logits(words, jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1), 8)
    half, single = (
        sample_token(
            jnp.broadcast_to(logits.astype(dtype), (8, words)),
            keys=keys,
            temperature=0.7,
        )
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    for a, b in zip(half, single, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "dtype", "planted"),
    [
        (0.3, jnp.float32, False),
        (0.7, jnp.bfloat16, True),
        (1.0, jnp.float32, True),
        (3.0, jnp.bfloat16, True),
    ],
)
def test_unlikely_tokens_come_as_often_as_their_mass(temperature, dtype, planted):
    """All uniform numbers, against the mass below every probability."""
    logits = random_logits(50_257, dtype, planted=planted).astype(jnp.float32)
    logprobs = float64_logprobs(logits, temperature)
    weights = jnp.exp(jax.nn.log_softmax(logits / temperature))
    tokens = counted(weights, jnp.arange(GRID, dtype=jnp.int32).reshape(-1, 8192))
    counts = np.bincount(np.ravel(tokens), minlength=len(logprobs))
    ascending = np.argsort(logprobs)
    mass = GRID * np.cumsum(np.exp(logprobs[ascending]))
    came = np.cumsum(counts[ascending])
    assert np.max(np.abs(came - mass) / np.sqrt(np.maximum(mass, 1))) < 4
    # Where a thousandth of one draw is expected, there is none.
    assert came[mass < 1e-3].max(initial=0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_a_token_of_probability_0_is_never_drawn(monkeypatch, uniform):
    monkeypatch.setattr(jax.random, "uniform", lambda key: jnp.float32(uniform))
    logits = np.full((3, 6), -np.inf, np.float32)
    logits[0, 1:5] = [0.0, -np.inf, 1.0, 2.0]
    logits[1, 2] = -5.0
    logits[2, [0, 5]] = [0.0, -200.0]  # the second underflows
    token, logprob, _ = sampling.sample_token(
        jnp.asarray(logits),
        keys=jax.random.split(jax.random.key(0), 3),
        temperature=1.0,
    )
    assert np.isfinite(logprob).all()
    assert (np.exp(logprob) > 0).all()
    assert int(token[1]) == 2
    assert int(token[2]) == 0


SHAPINGS = {
    "top_k": Shaping(top_k=3),
    "top_k larger than the vocabulary": Shaping(top_k=50),
    "top_p": Shaping(top_p=0.6),
    "top_p 1": Shaping(top_p=1.0),
    "top_p tiny": Shaping(top_p=1e-6),
    "min_p": Shaping(min_p=0.2),
    "all three": Shaping(top_k=5, top_p=0.8, min_p=0.3),
}


@pytest.mark.parametrize("shaping", SHAPINGS.values(), ids=SHAPINGS.keys())
def test_shaping_keeps_what_the_oracle_keeps(shaping):
    logits = np.random.default_rng(1).normal(0, 2, (50, 11)).astype(np.float32)
    logits[:, 4] = -np.inf
    shaped = np.asarray(shape_logits(logits, shaping=shaping))
    for row in range(50):
        keep = oracles.kept_tokens(
            logits[row], shaping.top_k, shaping.top_p, shaping.min_p
        )
        expected = np.where(keep, logits[row], -np.inf)
        np.testing.assert_array_equal(shaped[row], expected)


def test_shaped_draws_have_log_probs_of_the_shaped_distribution():
    logits = np.random.default_rng(2).normal(0, 2, (40, 11)).astype(np.float32)
    shaping = Shaping(top_k=3)
    token, logprob, entropy = sample_token(
        logits,
        keys=jax.random.split(jax.random.key(0), 40),
        temperature=0.5,
        shaping=shaping,
    )
    for row in range(40):
        keep = oracles.kept_tokens(logits[row], 3, None, None)
        assert keep[int(token[row])]
        shaped = np.where(keep, logits[row], -np.inf)
        expected = oracles.log_softmax(shaped, 0.5)[int(token[row])]
        assert float(logprob[row]) == pytest.approx(expected, abs=1e-5)
        assert float(entropy[row]) == pytest.approx(
            float(oracles.entropy(shaped, 0.5)), abs=1e-5
        )


@pytest.mark.slow
def test_padded_rows_of_the_vocabulary_change_no_sample():
    model = tiny.LLAMA
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left", padding=-1)
    output = generate(
        tiny.with_rows_of_padding(tiny.params(model), model, np.nan),
        model=model,
        tokens=tokens,
        mask=mask,
        keys=keys_of(),
        max_new_tokens=NEW,
        stop_ids=STOPS,
        temperature=1.0,
    )
    assert_same_samples(output, expected_of(model))
    assert not np.asarray(output.tokens)[~np.asarray(output.mask)].any()


def test_bad_options_are_named():
    for options, message in [
        ({"top_k": 0}, "expected top_k >= 1, got 0; None is off"),
        ({"top_p": 0.0}, "expected 0 < top_p <= 1, got 0.0"),
        ({"min_p": 1.5}, "expected 0 < min_p <= 1, got 1.5"),
    ]:
        with pytest.raises(InputError, match=message):
            Shaping(**options)
    shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=tiny.GPT2))

    def call(columns=3, **options):
        jax.eval_shape(
            lambda params: decode.generate(
                params,
                model=tiny.GPT2,
                tokens=jnp.zeros((1, columns), jnp.int32),
                mask=jnp.ones((1, columns), bool),
                keys=jax.random.split(jax.random.key(0), 1),
                stop_ids=(),
                **{"max_new_tokens": 4, **options},
            ),
            shapes,
        )

    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"temperature: .* above 0.*\(greedy=True"):
            call(temperature=temperature)
    with pytest.raises(InputError, match=r"max_new_tokens: .* 1 or more, got 0"):
        call(max_new_tokens=0)
    with pytest.raises(InputError, match=r"columns_of_prompts: .*, got 0"):
        call(columns=0)
    with pytest.raises(InputError, match=r"at most 24, got 25; shorten"):
        call(columns=21)


@pytest.mark.slow
@pytest.mark.parametrize(
    "continuous_batching", [None, pytest.param(2, marks=pytest.mark.slow)]
)
def test_nothing_predicts_the_first_token_of_an_empty_prompt(continuous_batching):
    """Sampler and trainer agree: log-prob 0, and a draw independent of parameters."""
    model, rows = tiny.GPT2, 6
    tokens, mask = tiny.batch((0, 3, 0, 1, 0, 2), 4, side="left")
    run = jax.jit(
        functools.partial(
            decode.generate,
            model=model,
            tokens=tokens,
            mask=mask,
            max_new_tokens=5,
            stop_ids=(),
            continuous_batching=continuous_batching,
        )
    )
    keys = keys_of(INDEX[:rows], SAMPLE[:rows])
    output = run(tiny.params(model), keys=keys)
    empty = ~mask.any(axis=1)
    assert (np.asarray(output.logprobs)[empty, 4] == 0).all()
    assert (np.asarray(output.entropy)[empty, 4] == 0).all()
    recomputed = logprobs_of(
        tiny.params(model), model=model, tokens=output.tokens, mask=output.mask
    )
    np.testing.assert_allclose(
        np.asarray(output.logprobs)[:, 4:], np.asarray(recomputed)[:, 4:], atol=1e-5
    )
    other = run(jax.tree.map(lambda leaf: 3.0 * leaf, tiny.params(model)), keys=keys)
    np.testing.assert_array_equal(output.tokens[empty, 4], other.tokens[empty, 4])


@pytest.mark.slow
def test_a_token_that_nothing_predicts_is_uniform():
    rows, vocabulary = 20_000, 10
    logits = jnp.full((rows, vocabulary), jnp.nan).at[:, 0].set(9.0)
    token, logprob, entropy = sample_token(
        logits,
        keys=jax.random.split(jax.random.key(0), rows),
        temperature=0.5,
        predicted=jnp.zeros(rows, bool),
    )
    counts = np.bincount(np.asarray(token), minlength=vocabulary)
    deviation = np.sqrt(rows * 0.1 * 0.9)
    assert np.abs(counts - rows / vocabulary).max() < 4 * deviation
    assert not np.asarray(logprob).any()
    assert not np.asarray(entropy).any()


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_distributions_drawn_from():
    """Holds at every response token, the last included; nothing else changes."""
    model, temperature = tiny.GPT2, 0.7
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    draw = functools.partial(
        decode.generate,
        tiny.params(model),
        model=model,
        tokens=tokens,
        mask=mask,
        keys=keys_of(),
        max_new_tokens=NEW,
        stop_ids=STOPS,
        temperature=temperature,
    )
    plain = jax.jit(draw)()
    output = jax.jit(functools.partial(draw, record_top_k=3))()
    assert plain.top_k is None
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    np.testing.assert_array_equal(output.logprobs, plain.logprobs)
    logits = logits_of(
        tiny.params(model), model=model, tokens=output.tokens, mask=output.mask
    )
    likely = np.asarray(jax.nn.log_softmax(logits / temperature))
    for row, column in oracles.entries(np.asarray(output.response_mask)):
        expected = likely[row, column - 1]
        words = np.asarray(output.top_k.tokens[row, column])
        values = np.asarray(output.top_k.logprobs[row, column])
        np.testing.assert_allclose(values, np.sort(expected)[::-1][:3], atol=1e-4)
        np.testing.assert_allclose(expected[words], values, atol=1e-4)
    with pytest.raises(InputError, match="record_top_k: expected a decoder of every"):
        draw(record_top_k=3, continuous_batching=4)
