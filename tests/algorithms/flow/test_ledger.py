"""The ledger of trust: each lie of a sampler is caught, and honest ones raise nothing.

The samplers draw with the real decoder and then report something false.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from rlhf_jax import batch, policy
from rlhf_jax.algorithms.flow import ledger, rollout
from rlhf_jax.functional import masked
from rlhf_jax.models.generation.decode import Shaping
from rlhf_jax.runs import alarms

ROWS, GROUP, BEFORE = 16, 4, 4
MODEL = toys.GPT2
FEW = 4  # batches within which a lie is caught: 64 responses of at most 5 tokens
MANY = 50
SAME = {"model": MODEL, "max_new_tokens": toys.SIZE, "stop_ids": toys.STOP}


@jax.jit
def draw(params, prompts, key, version):
    return rollout.rollout(
        params, prompts=prompts, key=key, temperature=1.0, version=version, **SAME
    )


@jax.jit
def draw_greedily(params, prompts, key, version):
    """Draws greedily but reports the log-probs of the policy."""
    drawn = rollout.rollout(
        params,
        prompts=prompts,
        key=key,
        temperature=1.0,
        version=version,
        shaping=Shaping(greedy=True),
        **SAME,
    )
    return rollout.recompute_logprobs(
        drawn,
        params,
        model=MODEL,
        max_new_tokens=toys.SIZE,
        temperature=1.0,
    )


@jax.jit
def row_of(params, drawn, step):
    """The metrics of a step with two micro-batches."""
    rows = jnp.arange(ROWS)
    entries = ledger.entries(drawn, step=step, rows=rows)
    logprobs, entropy = policy.logprobs_and_entropy(
        params, model=MODEL, tokens=drawn.tokens, mask=drawn.mask, first_column=BEFORE
    )
    parts = [
        ledger.sums(
            jax.tree.map(lambda x, part=part: x[part::2], entries),
            logprobs=logprobs[part::2],
            entropy=entropy[part::2],
            mask=drawn.mask[part::2],
            max_new_tokens=toys.SIZE,
            vocab_size=MODEL.vocab_size,
        )
        for part in (0, 1)
    ]
    return ledger.settle(masked.add_stats(*parts)) | ledger.duplicates(drawn, rows=rows)


def params_at(step, *, scale=1.0, speed=0.02):
    """A policy that changes a little in every step."""
    start = toys.params(MODEL)
    moved = toys.perturbed(start, seed=max(step, 0), scale=speed) if step > 0 else start
    return jax.tree.map(lambda leaf: scale * leaf, moved)


def prompts_at(step):
    rng = np.random.default_rng(step)
    length = np.repeat(rng.integers(1, BEFORE + 1, ROWS // GROUP), GROUP)
    mask = np.arange(BEFORE) >= BEFORE - length[:, None]
    tokens = np.repeat(rng.integers(3, 13, (ROWS // GROUP, BEFORE)), GROUP, axis=0)
    return batch.Prompts(
        tokens=toys.array(np.where(mask, tokens, 0), np.int32),
        mask=toys.array(mask, bool),
        index=toys.array(np.repeat(np.arange(4) + 4 * step, GROUP), np.int32),
        sample=toys.array(np.tile(np.arange(GROUP), 4), np.int32),
    )


def honest(step, *, age=0, scale=1.0, dtype=np.float32, draw=draw, **changes):
    params = params_at(step - age, scale=scale)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(np.float32), params)
    prompts = dataclasses.replace(prompts_at(step), **changes)
    return draw(params, prompts, jax.random.key(step), max(step - age, 0))


def off(step, by=0.2, **options):
    drawn = honest(step, **options)
    logprobs = jnp.where(drawn.response_mask, drawn.old_logprobs + by, 0.0)
    return dataclasses.replace(drawn, old_logprobs=logprobs)


def wrong_ids(step):
    drawn = honest(step)
    other = (drawn.tokens + 1) % 13
    tokens = jnp.where(drawn.response_mask, other, drawn.tokens)
    return dataclasses.replace(drawn, tokens=tokens)


def swapped(step):
    """Swaps the first two tokens of a response and their log-probs."""
    drawn = honest(step)
    two = drawn.response_mask[:, BEFORE + 1, None]
    order = np.arange(drawn.tokens.shape[1])
    order[[BEFORE, BEFORE + 1]] = order[[BEFORE + 1, BEFORE]]

    def swap(x):
        return jnp.where(two, x[:, order], x)

    return dataclasses.replace(
        drawn, tokens=swap(drawn.tokens), old_logprobs=swap(drawn.old_logprobs)
    )


def previous_weights(step):
    """Draws with the previous step's weights and reports the new version."""
    drawn = honest(step, age=1)
    version = jnp.where(drawn.response_mask, step, 0)
    return dataclasses.replace(drawn, version=version)


def one_seed(step):
    return honest(step, sample=toys.array(np.zeros(ROWS), np.int32))


def greedy(step, **options):
    return honest(step, draw=draw_greedily, **options)


def history(sampler, steps, *, start=0, scale=1.0):
    """The rows of metrics.jsonl, with null for metrics without weight."""
    rows = []
    for step in range(start, start + steps):
        stats = row_of(params_at(step, scale=scale), sampler(step), step)
        rows.append({name: metric(*x) for name, x in jax.device_get(stats).items()})
    return rows


def metric(value, weight):
    if weight is None:
        return float(value)
    return float(value / weight) if weight else None


def raised(rows, **limits):
    chosen = alarms.Limits(**limits)
    watch = alarms.Watch(lambda rows: alarms.check(rows, limits=chosen))
    for step, row in enumerate(rows):
        watch.see(step, row)
    return {alarm.name for alarm in watch.raised}


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("lie", "start", "names"),
    [
        (off, 0, {"trust_distance", "trust_weight"}),
        (partial(off, by=-0.2), 0, {"trust_distance", "trust_weight"}),
        (wrong_ids, 0, {"trust_distance"}),
        (swapped, 0, {"trust_distance"}),
        (greedy, 0, {"trust_entropy", "trust_duplicates"}),
        (previous_weights, 0, {"trust_distance"}),
        (one_seed, 0, {"trust_duplicates"}),
        # With old parameters there is no distance to compare.
        (partial(off, age=2), 3, {"trust_weight"}),
        (partial(off, age=2, by=-0.2), 3, {"trust_weight"}),
        (partial(greedy, age=2), 3, {"trust_entropy", "trust_duplicates"}),
        (partial(honest, age=3), 3, {"trust_age"}),
    ],
    ids=[
        *("off", "off below", "wrong ids", "swapped", "greedy", "previous weights"),
        *("one seed", "off and old", "off below and old", "greedy and old", "old"),
    ],
)
def test_a_lie_is_caught_within_a_few_batches(lie, start, names):
    assert raised(history(lie, FEW, start=start), trust_age=2) == names


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("sampler", "scale"),
    [
        (honest, 1.0),
        (partial(honest, dtype="bfloat16"), 1.0),
        (partial(honest, age=2), 1.0),
        (partial(honest, scale=2.5), 2.5),  # it often repeats itself
        (partial(honest, scale=0.3), 0.3),  # all tokens are almost as likely
    ],
    ids=["ours", "bfloat16", "2 behind", "peaked", "flat"],
)
def test_an_honest_sampler_raises_nothing(sampler, scale):
    rows = history(sampler, MANY, scale=scale)
    assert raised(rows, trust_age=2) == set()
    means = {name: np.mean([row[name] for row in rows[3:]]) for name in CALIBRATED}
    spread = {name: np.std([row[name] for row in rows[3:]]) for name in CALIBRATED}
    assert all(abs(mean) < 0.5 for mean in means.values())
    assert all(deviation < 1.2 for deviation in spread.values())


CALIBRATED = ("trust/entropy_z", "trust/weight_z", "trust/duplicates_z")


def test_quarters_of_lengths_and_columns_by_hand():
    """One prompt per quarter of 8 columns, one response token per quarter of 4."""
    before = size = 8
    length = np.array([2, 4, 5, 8])  # the first two quarters' last, then the others'
    column = np.arange(before + size)
    response = (column >= before) & (column - before < length[:, None])
    mask = (column >= before - length[:, None]) & (column < before) | response
    gap = np.where(response, 0.1 * length[:, None] + 0.01 * column, 0.0)
    gap[2, before] = 1.5  # an outlier
    drawn = batch.Rollout(
        tokens=toys.array(np.zeros(mask.shape), np.int32),
        mask=toys.array(mask, bool),
        response_mask=toys.array(response, bool),
        old_logprobs=toys.array(np.where(response, -2.0, 0.0)),
        entropy=toys.array(np.ones(mask.shape)),
        index=toys.array(range(4), np.int32),
        sample=toys.array([0] * 4, np.int32),
        version=toys.array(np.full(mask.shape, 5), np.int32),
    )

    @toys.jit
    def sums(drawn, logprobs):
        return ledger.sums(
            ledger.entries(drawn, step=jnp.int32(5), rows=jnp.arange(4)),
            logprobs=logprobs,
            entropy=jnp.ones(mask.shape),
            mask=drawn.mask,
            max_new_tokens=size,
            vocab_size=50,
        )

    stats = sums(drawn, toys.array(np.where(response, -2.0 - gap, 0.0)))
    got = {name: metric(*x) for name, x in jax.device_get(stats).items()}
    assert got["trust/outliers"] == pytest.approx(1 / length.sum(), rel=1e-5)
    for row, quarter in enumerate((1, 2, 3, 4)):
        of_prompt = gap[row][response[row]].mean()
        name = f"trust/distance_prompt_{quarter}"
        assert got[name] == pytest.approx(of_prompt, rel=1e-5), name
        columns = slice(before + 2 * row, before + 2 * row + 2)
        of_columns = gap[:, columns][response[:, columns]].mean()
        name = f"trust/distance_position_{quarter}"
        assert got[name] == pytest.approx(of_columns, rel=1e-5), name


@pytest.mark.slow
def test_the_sums_by_hand():
    """Three rows, of which the policy drew two; masked values are not read."""
    width, size = 3, 4
    response = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1]], bool)
    length = np.array([1, 3, 3])
    mask = np.concatenate([np.arange(3) >= 3 - length[:, None], response], axis=1)
    mask[1, 4] = True  # observed
    response = np.concatenate([np.zeros((3, 3), bool), response], axis=1)
    rng = np.random.default_rng(0)
    sampler, trainer = rng.uniform(-2.5, -0.1, (2, 3, width + size))
    entropy = rng.uniform(0.1, 1.5, (3, width + size))
    sampler[0, 4], trainer[0, 4] = -0.1, -1.5  # an outlier
    sampler[1, 3], trainer[1, 3] = -9.0, -0.1  # beyond the largest weight
    version = np.array([[5], [4], [5]]) * np.ones((1, width + size), int)
    garbage = np.where(response, 0.0, np.nan)
    drawn = batch.Rollout(
        tokens=toys.array(np.zeros(mask.shape), np.int32),
        mask=toys.array(mask, bool),
        response_mask=toys.array(response, bool),
        old_logprobs=toys.array(sampler + garbage),
        entropy=toys.array(entropy),
        index=toys.array([0, 1, 1], np.int32),
        sample=toys.array([0, 0, 1], np.int32),
        version=toys.array(version, np.int32),
    )
    entries = ledger.entries(drawn, step=jnp.int32(5), rows=jnp.array([0, 1]))
    sums = ledger.sums(
        entries,
        logprobs=toys.array(trainer + garbage),
        entropy=toys.array(entropy + garbage),
        mask=drawn.mask,
        max_new_tokens=size,
        vocab_size=50,
    )
    got = {name: metric(*x) for name, x in jax.device_get(sums).items()}
    empty = {name for name, value in got.items() if value is None}
    assert empty == {"trust/distance_position_4"} | {
        f"trust/distance_prompt_{quarter}" for quarter in (2, 3, 4)
    }
    got = {name: value for name, value in got.items() if name not in empty}
    ours = response & (np.arange(3) < 2)[:, None]
    fresh = response & (np.arange(3) < 1)[:, None]
    gap = abs(trainer - sampler)
    weight = np.minimum(np.exp(trainer - sampler), 10)[ours]
    assert weight.max() == 10
    surprise, expected = -trainer[ours], entropy[ours]
    assert got == pytest.approx(
        {
            "trust/distance": gap[fresh].mean(),
            "trust/outliers": (gap[fresh] > 1).mean(),
            "trust/distance_position_1": gap[0, 3],
            "trust/distance_position_2": gap[0, 4],
            "trust/distance_position_3": gap[0, 5],
            "trust/distance_prompt_1": gap[fresh].mean(),
            "trust/weight": weight.mean(),
            "trust/weight_z": (weight - 1).sum() / np.square(weight - 1).sum(),
            "trust/entropy_ratio": (weight @ surprise) / (weight @ expected),
            "trust/entropy_z": (weight @ (surprise - expected))
            * np.log(50)
            / (expected * np.maximum(np.log(50) - expected, 1)).sum(),
            "trust/age_max": 1,
        },
        rel=1e-5,
    )
    settled = ledger.settle({"a": (2.0, 4.0), "b_z": (jnp.float32(-3), jnp.float32(8))})
    assert metric(*settled["a"]) == 0.5
    assert metric(*settled["b_z"]) == -1  # -3 / √(8 + 3/3)


def test_duplicates_by_hand():
    """Rows 0 and 1 are equal; 1 and 2 differ; 2 and 3 have different prompts."""
    tokens = np.array([[9, 5, 6], [9, 5, 6], [9, 5, 7], [8, 5, 7], [8, 5, 0]])
    response = np.array([[0, 1, 1]] * 4 + [[0, 1, 0]], bool)
    logprobs = np.log([[1, 0.5, 0.5], [1, 0.5, 0.5], [1, 0.5, 0.2], [1, 0.1, 0.5]])
    drawn = batch.Rollout(
        tokens=toys.array(tokens, np.int32),
        mask=toys.array(response | [True, False, False], bool),
        response_mask=toys.array(response, bool),
        old_logprobs=toys.array(np.concatenate([logprobs, [[0, 0, np.nan]]])),
        entropy=toys.array(np.zeros((5, 3))),
        index=toys.array([3, 3, 3, 4, 4], np.int32),
        sample=toys.array(np.arange(5), np.int32),
    )
    duplicates = toys.jit(ledger.duplicates)
    stats = jax.device_get(duplicates(drawn, rows=np.arange(5)))
    got = {name: metric(*x) for name, x in stats.items()}
    share, expected = 1 / 3, (0.25 + 0.25 + 0.05) / 3
    divergence = share * np.log(share / expected)
    divergence += (1 - share) * np.log((1 - share) / (1 - expected))
    assert got == pytest.approx(
        {
            "trust/duplicates": share,
            "trust/duplicates_expected": expected,
            "trust/duplicates_z": np.sqrt(2 * 3 * divergence),
        },
        rel=1e-5,
    )
    # Every other row alone: no two with one prompt but 2 and 0, which differ.
    stats = jax.device_get(duplicates(drawn, rows=np.array([0, 2, 4])))
    got = {name: metric(*x) for name, x in stats.items()}
    assert got == pytest.approx(
        {
            "trust/duplicates": 0,
            "trust/duplicates_expected": 0.25,
            "trust/duplicates_z": 0,
        }
    )
    one = jax.device_get(duplicates(drawn, rows=np.array([0])))
    assert {metric(*x) for x in one.values()} == {None}
