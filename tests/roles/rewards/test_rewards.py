import collections
import copy
import dataclasses
import decimal
import fractions
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import frozen, masked, rewards
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.train import rewards as train_rewards

MODEL = tiny.GPT2
LENGTHS, SIZE = (6, 4, 1, 5), 6
score_of = jax.jit(rewards.sequence_scores, static_argnames="model")


@dataclasses.dataclass
class Answers:
    """The part of a rollout that a reward reads."""

    tokens: np.ndarray
    mask: np.ndarray
    response_mask: np.ndarray
    index: np.ndarray


def params(seed=0):
    rng = np.random.default_rng(seed)
    head = {
        "kernel": jnp.asarray(rng.normal(size=MODEL.hidden_size), jnp.float32),
        "bias": jnp.float32(0.25),
    }
    return {"trunk": tiny.params(MODEL, seed), "score": head}


def answers():
    """Prompts of 3 columns and responses of 4, the last column unused."""
    tokens = np.array(
        [[0, 1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6, 0], [0, 0, 5, 6, 0, 0, 0]], np.int32
    )
    mask = np.array(
        [[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]], bool
    )
    response_mask = mask & (np.arange(7) >= 3)[None, :]
    return Answers(tokens, mask, response_mask, np.array([2, 0, 1], np.int32))


def test_the_score_is_that_of_the_last_token_wherever_it_stands():
    """Alone, padded left or right, and as a left-padded prompt with its response."""
    scores_of = {}
    for side in ("left", "right"):
        tokens, mask = tiny.batch(LENGTHS, SIZE, side=side, padding=-1)
        scores_of[side] = np.asarray(
            score_of(params(), model=MODEL, tokens=tokens, mask=mask)
        )
    assert scores_of["left"].dtype == np.float32
    np.testing.assert_allclose(scores_of["left"], scores_of["right"], atol=1e-5)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    both = score_of(
        params(),
        model=MODEL,
        tokens=np.pad(tokens, ((0, 0), (2, 3)), constant_values=9),
        mask=np.pad(mask, ((0, 0), (2, 3))),
    )
    np.testing.assert_allclose(both, scores_of["left"], atol=1e-5)
    for row, length in enumerate(LENGTHS):
        if length < SIZE:
            continue
        changed = tokens.copy()
        changed[row, -1] = (changed[row, -1] + 1) % tiny.VOCAB
        moved = score_of(params(), model=MODEL, tokens=changed, mask=mask)
        assert abs(float(moved[row]) - scores_of["left"][row]) > 1e-3


def test_a_reward_model_starts_from_a_copy_under_a_random_head():
    trunk = jax.tree.map(jnp.copy, tiny.params(tiny.LLAMA))
    made = rewards.init(jax.random.key(0), trunk, model=tiny.LLAMA)
    jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(trunk)
    assert "head" not in made["trunk"]
    for name, leaves in made["trunk"].items():
        chex.assert_trees_all_equal(leaves, tiny.params(tiny.LLAMA)[name])
    wide = dataclasses.replace(MODEL, hidden_size=4095)
    head = rewards.init(jax.random.key(1), tiny.params(MODEL), model=wide)["score"]
    assert float(head["kernel"].std()) == pytest.approx(1 / 64, rel=0.05)
    assert float(head["bias"]) == 0


@pytest.mark.slow
def test_a_frozen_reward_model_is_a_pytree_that_does_not_retrace():
    traces = []

    @jax.jit
    def score_rows(reward, tokens, mask):
        traces.append(1)
        return reward(Answers(tokens, mask, mask, jnp.arange(3)))

    batch = answers()
    for seed in (0, 1):
        reward_model = frozen.freeze(params(seed))
        reward = rewards.from_model(reward_model, model=MODEL)
        assert len(jax.tree.leaves(reward)) == len(jax.tree.leaves(reward_model))
        scores = score_rows(reward, batch.tokens, batch.mask)
        expected = score_of(
            params(seed), model=MODEL, tokens=batch.tokens, mask=batch.mask
        )
        np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert len(traces) == 1


def test_normalise_gives_the_mean_and_std_asked_for():
    tokens, mask = tiny.batch((6, 5, 4, 3, 2, 1), SIZE, side="left")
    scores = score_of(params(), model=MODEL, tokens=tokens, mask=mask)
    for mean, std in ((0.0, 1.0), (-2.0, 0.5)):
        made = rewards.normalise(params(), scores=scores, mean=mean, std=std)
        normalised = np.asarray(score_of(made, model=MODEL, tokens=tokens, mask=mask))
        assert normalised.mean() == pytest.approx(mean, abs=1e-5)
        assert normalised.std() == pytest.approx(std, abs=1e-5)
        np.testing.assert_array_equal(np.argsort(normalised), np.argsort(scores))


@pytest.mark.parametrize("mean", [0.0, -2.0])
def test_normalise_without_a_std_moves_the_bias_alone(mean):
    """Demonstrations get the required mean, and differences of scores stay."""
    tokens, mask = tiny.batch((6, 5, 4, 3, 2, 1), SIZE, side="left")
    before = params()
    scores = np.asarray(score_of(before, model=MODEL, tokens=tokens, mask=mask))
    made = rewards.normalise(before, scores=jnp.asarray(scores), mean=mean, std=None)
    normalised = np.asarray(score_of(made, model=MODEL, tokens=tokens, mask=mask))
    assert normalised.mean() == pytest.approx(mean, abs=1e-6)
    np.testing.assert_allclose(normalised - scores, mean - scores.mean(), atol=1e-6)
    np.testing.assert_array_equal(made["score"]["kernel"], before["score"]["kernel"])
    assert made["trunk"] is before["trunk"]
    # A bias needs no spread: a single demonstration will do.
    one = rewards.normalise(before, scores=jnp.array([1.5]), mean=mean, std=None)
    assert float(one["score"]["bias"]) == pytest.approx(0.25 + mean - 1.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bias_needs_finite_scores(bad):
    with pytest.raises(
        InputError, match=r"expected finite scores .* got 2 scores with"
    ):
        rewards.normalise(params(), scores=jnp.array([1.0, bad]), std=None)


@pytest.mark.parametrize("scores", [[1.0, 1.0], [1.0, np.nan], [1.0, np.inf]])
def test_scores_that_cannot_be_normalised(scores):
    with pytest.raises(InputError, match=r"scores that vary .* got 2 scores with"):
        rewards.normalise(params(), scores=jnp.asarray(scores))


@pytest.mark.parametrize("cuts", [[], [1], [4, 5, 29], list(range(1, 30))])
def test_running_moments_are_those_of_all_scores_in_any_split(cuts):
    scores = np.random.default_rng(0).normal(3.0, 2.0, 30).astype(np.float32)
    update = jax.jit(rewards.update_moments)
    moments = rewards.no_moments()
    for part in np.split(scores, cuts):
        moments = update(moments, part)
    assert float(moments.count) == 30
    assert float(moments.mean) == pytest.approx(np.float64(scores).mean(), rel=1e-5)
    assert float(moments.variance) == pytest.approx(np.float64(scores).var(), rel=1e-4)


def test_running_moments_leave_out_what_is_not_finite():
    scores = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
    moments = rewards.update_moments(rewards.no_moments(), scores)
    again = rewards.update_moments(moments, jnp.array([jnp.nan, -jnp.inf]))
    for state in (moments, again):
        assert [float(x) for x in (state.count, state.mean, state.variance)] == [
            2,
            2,
            1,
        ]
        assert float(state.mean_rest) == float(state.variance_rest) == 0.0


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_running_moments_of_many_scores_near_1000_keep_their_digits(spread):
    """192,000 scores, 64 at a time, agree with float64 sums."""
    rng = np.random.default_rng(0)
    scores = (1000.1 + rng.normal(0, spread, (3000, 64))).astype(np.float32)

    @jax.jit
    def updated(moments, scores):
        return jax.lax.scan(
            lambda moments, part: (rewards.update_moments(moments, part), None),
            moments,
            scores,
        )[0]

    moments = updated(rewards.no_moments(), scores)
    mean, variance = np.float64(scores).mean(), np.float64(scores).var()
    mean_of_moments = float(moments.mean) + float(moments.mean_rest)
    assert mean_of_moments == pytest.approx(mean, abs=2e-6)
    assert float(moments.mean) == np.float32(mean_of_moments)
    assert float(moments.variance) == pytest.approx(variance, rel=1e-5, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("scores", [np.full(300, 100.1), np.full(977, 1000.1)])
def test_equal_scores_cannot_be_normalised(scores):
    with pytest.raises(InputError, match=r"standard deviation 0\.0"):
        rewards.normalise(params(), scores=jnp.asarray(scores, jnp.float32))


ROWS = [{"gold": 10}, {"gold": 20}, {"gold": 30}]


def text_reward(function):
    return rewards.TextReward(
        function=function, decode=lambda ids: "".join(map(str, ids)), rows=ROWS
    )


def test_a_python_function_sees_texts_and_rows_without_padding():
    def function(prompts, responses, rows):
        assert prompts == ["12", "123", "5"]
        assert responses == ["34", "456", "6"]
        return [len(r) + row["gold"] for r, row in zip(responses, rows, strict=True)]

    scores = text_reward(function)(answers())
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [32.0, 13.0, 21.0])


def test_a_function_is_not_asked_about_no_responses():
    """A process whose devices have no rows: `max([])` would end the run."""
    reward = text_reward(lambda prompts, responses, rows: [max(responses)])
    scores = reward(Answers(*(part[:0] for part in vars(answers()).values())))
    assert (scores.dtype, scores.shape) == (np.float32, (0,))


def only_for(prompt, effect):
    """1.0 for every response but those to one prompt."""

    def function(prompts, responses, rows):
        return [effect() if p == prompt else 1.0 for p in prompts]

    return function


def broken():
    raise KeyError("gold")


def clearing(prompts, responses, rows):
    for argument in (prompts, responses, rows):
        argument.clear()
    return [1.0 for _ in responses]


class Unreadable:
    """An object whose every method raises."""

    def __float__(self):
        raise ZeroDivisionError("no")

    def __repr__(self):
        raise KeyError("gold")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            only_for("123", lambda: float("nan")),
            r"return finite numbers, got nan at index 1 of 3, for prompt '123' \(row 0",
        ),
        (
            only_for("5", lambda: None),
            r"got None at index 2 of 3, as a function without a `return` gives, for "
            r"prompt '5' \(row 1 of the data\) and response '6'; return a float",
        ),
        (
            lambda p, r, rows: [None] * 3,
            r"got None at index 0 of 3, as a function without a `return` gives, for pr",
        ),
        (
            only_for("12", lambda: 1e39),
            r"got inf at index 0 of 3, for prompt '12' \(row 2 of the data\)",
        ),
        (
            lambda p, r, rows: [10**400, -np.inf, 1.0],
            r"got inf at index 0 of 3 and at 1 others, for prompt '12'",
        ),
        (
            only_for("5", broken),
            r"raised KeyError: 'gold' for prompt '5' \(row 1 of the data\) and "
            r"response '6'; mend it",
        ),
        (lambda p, r, rows: [1.0, 2.0], r"3 numbers, one per response, got 2; return"),
        (lambda p, r, rows: np.ones((3, 1)), r"3 numbers, .* got shape \(3, 1\); ret"),
        (lambda p, r, rows: 1.0, r"3 numbers, one per response, got 1.0 \(float\);"),
        (lambda p, r, rows: np.float64(1), r"got the number np.float64\(1.0\) alone;"),
        (lambda p, r, rows: None, r"3 numbers, one per response, got None; return a"),
        (lambda p, r, rows: "1.5", r"3 numbers, one per response, got '1.5' \(str\);"),
        (lambda p, r, rows: {"a": 1.0}, r"one per response, got {'a': 1.0} \(dict\);"),
        (lambda p, r, rows: (1.0 for _ in r), r"got <generator .*\(generator\); ret"),
        (clearing, r"3 numbers, one per response, got an empty list; return a list"),
        (lambda p, r, rows: ["good"] * 3, r"got 'good' \(str\) at index 0 of 3, for"),
        (lambda p, r, rows: ["1.5"] * 3, r"got '1.5' \(str\) at index 0 of 3, for pr"),
        (lambda p, r, rows: [b"1"] * 3, r"got b'1' \(bytes\) at index 0 of 3, for pr"),
        (lambda p, r, rows: [0, [1.0], 0], r"got \[1.0\] \(list\) at index 1 of 3"),
        (lambda p, r, rows: [0, 0, np.ones(1)], r"got array.*\(ndarray\) at index 2"),
        (lambda p, r, rows: [0, 1j, 0], r"got 1j \(complex\) at index 1 of 3, for"),
        (lambda p, r, rows: np.full(3, 1j), r"\(complex128\) at index 0 of 3, for"),
        (lambda p, r, rows: ["x" * 999] * 3, r"got 'x{79}\.\.\. \(str\) at index 0"),
        (
            lambda p, r, rows: [Unreadable()] * 3,
            r"got a value that cannot be shown \(KeyError\) \(Unreadable\) at index 0 "
            r"of 3 \(ZeroDivisionError: no\), for prompt '12'",
        ),
        (
            lambda p, r, rows: broken() if len(p) > 1 else [1.0],
            r"raised KeyError: 'gold' for a batch of 3, though for none of its resp",
        ),
    ],
)
def test_a_function_that_fails_is_told_where(function, message):
    with pytest.raises(InputError, match=message):
        text_reward(function)(answers())


def test_the_function_s_own_error_is_the_cause():
    with pytest.raises(InputError) as error:
        text_reward(only_for("12", broken))(answers())
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([True, False, True], [1, 0, 1]),
        ((1, np.float16(0.5), np.array(0.25)), [1, 0.5, 0.25]),
        (np.array([1, 2, 3]), [1, 2, 3]),
        (np.array([0.5, 1, 2], object), [0.5, 1, 2]),
        (jnp.array([0.5, 1, 2], jnp.bfloat16), [0.5, 1, 2]),
        (collections.deque([1, 2, 3]), [1, 2, 3]),
        ([fractions.Fraction(1, 2), decimal.Decimal("0.25"), 2], [0.5, 0.25, 2]),
    ],
)
def test_any_list_of_numbers_is_scores(returned, expected):
    scores = text_reward(lambda prompts, responses, rows: returned)(answers())
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.float32(expected))


def test_a_function_gets_copies():
    """Its changes to lists and rows, nested ones too, do not reach the next call."""
    rows = [{"gold": i, "notes": {"seen": []}} for i in range(3)]
    before = copy.deepcopy(rows)

    def meddling(prompts, responses, rows):
        scores = [row["gold"] + len(row["notes"]["seen"]) for row in rows]
        for row in rows:
            row["notes"]["seen"].append("seen")
            row["gold"] = -1
        for argument in (prompts, responses, rows):
            argument.clear()
        return scores

    reward = rewards.TextReward(function=meddling, decode=str, rows=rows)
    one_row = dataclasses.replace(answers(), index=np.array([2, 2, 1], np.int32))
    for _ in range(2):
        np.testing.assert_array_equal(reward(answers()), [2, 0, 1])
        np.testing.assert_array_equal(reward(one_row), [2, 2, 1])
    assert rows == before


@pytest.mark.parametrize("code", [0, None, 3, "done"])
def test_a_function_that_calls_exit_stops_the_run(code):
    reward = text_reward(only_for("5", lambda: sys.exit(code)))
    reward = dataclasses.replace(reward, called="--judge mine:score")
    message = rf"--judge mine:score called sys.exit\({code!r}\) for prompt '5' \(row 1 "
    with pytest.raises(StopError, match=message) as error:
        reward(answers())
    assert isinstance(error.value.__cause__, SystemExit)


def test_ctrl_c_in_a_function_stays_ctrl_c():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text_reward(only_for("5", interrupted))(answers())


# --- several rewards as one ---------------------------------------------------


def lengths(rollout):
    """f32[B], tokens of each response; `jit` can trace it."""
    return jnp.sum(rollout.response_mask, axis=1, dtype=jnp.float32)


def constant(value):
    return lambda rollout: np.full(3, value, np.float32)


def test_numbers_alone_are_scores_without_parts():
    plain = rewards.scores_of(np.array([1.0, 2.0], np.float32))
    assert plain.parts == {}
    assert rewards.part_stats(plain) == {}
    assert rewards.scores_of(plain) is plain


def test_a_weighted_sum_has_the_weighted_rewards_of_turns():
    """Only parts with turn rewards count; a part of weight 0 adds nothing."""
    of_turns = jnp.asarray([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    total = jnp.asarray([3.0, 5.0])

    def played(_):
        return rewards.Scores(total, turns=of_turns)

    def broken(_):
        return rewards.Scores(total, turns=of_turns * jnp.nan)

    def plain(_):
        return total

    parts = {"a": (0.5, played), "b": (2.0, plain), "c": (0.0, broken)}
    scores = rewards.weighted(parts)(None)
    np.testing.assert_array_equal(scores.turns, 0.5 * of_turns)
    np.testing.assert_array_equal(scores.total, 2.5 * total)
    twice = rewards.weighted({"a": (0.5, played), "d": (1.0, played)})(None)
    np.testing.assert_array_equal(twice.turns, 1.5 * of_turns)
    assert rewards.weighted({"b": (2.0, plain)})(None).turns is None


def test_rewards_of_turns_stand_beside_their_totals():
    with pytest.raises(InputError, match=r"rewards of turns as f32\[B, S\] beside"):
        rewards.scores_of(rewards.Scores(jnp.zeros(2), turns=jnp.zeros((3, 4))))


def test_a_weighted_sum_names_its_parts():
    """Responses of 2, 3 and 1 tokens; the text's reward is length plus gold."""

    def function(prompts, responses, rows):
        return [len(r) + row["gold"] for r, row in zip(responses, rows, strict=True)]

    reward = rewards.weighted(
        {
            "length": (-0.5, lengths),
            "text": (2.0, text_reward(function)),
            "watched": (0.0, constant(7.0)),
        }
    )
    scores = reward(answers())
    broken = rewards.weighted(
        {"length": (2.0, lengths), "watched": (0.0, constant(np.nan))}
    )
    np.testing.assert_array_equal(broken(answers()).total, [4.0, 6.0, 2.0])
    assert scores.total.dtype == jnp.float32
    np.testing.assert_array_equal(scores.total, [63.0, 24.5, 41.5])
    assert list(scores.parts) == ["length", "text", "watched"]
    assert scores.weights == (("length", -0.5), ("text", 2.0), ("watched", 0.0))
    assert constant(1.0)(answers()).ndim == 1
    assert rewards.scores_of(constant(1.0)(answers())).weights == ()
    np.testing.assert_array_equal(scores.parts["text"], [32.0, 13.0, 21.0])
    means = masked.mean_stats(rewards.part_stats(scores))
    assert {name: float(mean) for name, mean in means.items()} == {
        "reward/length": 2.0,
        "reward/text": 22.0,
        "reward/watched": 7.0,
    }


def test_parts_of_parts_are_named_for_both():
    inner = rewards.weighted({"a": (1.0, constant(1.0)), "b": (3.0, constant(2.0))})
    outer = rewards.weighted({"inner": (10.0, inner), "c": (1.0, constant(0.5))})
    scores = outer(answers())
    np.testing.assert_array_equal(scores.total, [70.5] * 3)
    parts = {name: float(part[0]) for name, part in scores.parts.items()}
    assert parts == {"inner": 7.0, "inner/a": 1.0, "inner/b": 2.0, "c": 0.5}


@pytest.mark.slow
def test_a_sum_of_frozen_models_is_a_pytree_that_does_not_retrace():
    traces = []

    @jax.jit
    def score_rows(reward, tokens, mask):
        traces.append(1)
        return reward(Answers(tokens, mask, mask, jnp.arange(3)))

    batch = answers()
    for seed in (0, 1):
        reward_model = frozen.freeze(params(seed))
        modelled = rewards.from_model(reward_model, model=MODEL)
        counted = jax.tree_util.Partial(lengths)
        reward = rewards.weighted({"model": (2.0, modelled), "long": (-1.0, counted)})
        assert len(jax.tree.leaves(reward)) == len(jax.tree.leaves(reward_model))
        scores = score_rows(reward, batch.tokens, batch.mask)
        alone = score_of(
            params(seed), model=MODEL, tokens=batch.tokens, mask=batch.mask
        )
        np.testing.assert_allclose(scores.parts["model"], alone, atol=1e-6)
        expected = 2 * np.asarray(alone) - batch.mask.sum(axis=1)
        np.testing.assert_allclose(scores.total, expected, atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "expected at least one reward to weigh, got none"),
        ({"a": (np.inf, lengths)}, "weight of 'a': expected a finite number, got inf"),
        ({"a": (np.float32("nan"), lengths)}, "weight of 'a': expected a finite"),
        ({"a": (np.nan, lengths)}, "weight of 'a': expected a finite number, got nan"),
    ],
)
def test_weights_that_make_no_sum(parts, message):
    with pytest.raises(InputError, match=message):
        rewards.weighted(parts)


def test_parts_of_other_sizes_are_not_broadcast():
    def one(rollout):
        return np.ones(1, np.float32)

    reward = rewards.weighted({"a": (1.0, constant(1.0)), "b": (1.0, one)})
    with pytest.raises(ValueError, match=r"one shape, got a \(3,\), b \(1,\)"):
        reward(answers())


# --- ensembles ----------------------------------------------------------------

MEMBERS = np.float32(
    [[1.0, -2.0, 0.5, 3.0], [2.0, -1.0, 0.5, -5.0], [0.0, 4.0, 0.5, 1]]
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"how": "mean"}, MEMBERS.mean(axis=0)),
        ({"how": "minimum"}, [0.0, -2.0, 0.5, -5.0]),
        (
            {"how": "mean_minus_std", "std_coef": 0.7},
            np.mean(MEMBERS, axis=0) - 0.7 * np.std(np.float64(MEMBERS), axis=0),
        ),
        (
            {"how": "mean_minus_std"},
            np.mean(MEMBERS, axis=0) - np.std(np.float64(MEMBERS), axis=0),
        ),
        (
            {"how": "entropic"},
            -np.log(np.mean(np.exp(-np.float64(MEMBERS)), axis=0)),
        ),
        (
            {"how": "entropic", "risk": 2.5},
            -2.5 * np.log(np.mean(np.exp(-np.float64(MEMBERS) / 2.5), axis=0)),
        ),
    ],
)
def test_an_ensemble_is_its_formula(options, expected):
    scores = rewards.combine(list(MEMBERS), **options)
    np.testing.assert_allclose(scores.total, expected, rtol=1e-5, atol=1e-7)
    means = means_of(rewards.part_stats(scores))
    for i, member in enumerate(MEMBERS):
        assert means[f"reward/member_{i}"] == pytest.approx(member.mean())
    spread = np.float64(MEMBERS).std(axis=0)
    assert spread[2] == float(scores.parts["disagreement"][2]) == 0
    assert means["reward/disagreement"] == pytest.approx(spread.mean(), rel=1e-5)


def test_an_entropic_risk_is_the_worst_of_all_weights_near_equal_ones():
    """min over w of Σ w·r + τ·KL(w ‖ 1/3), and its limits in τ."""
    risk, members = 0.8, np.float64(MEMBERS)

    def charged(w):
        return w @ members + risk * np.sum(w * np.log(3 * w), axis=-1)[..., None]

    total = rewards.combine(list(MEMBERS), how="entropic", risk=risk).total
    drawn = charged(np.random.default_rng(0).dirichlet([1, 1, 1], 20_000))
    assert (drawn >= np.asarray(total) - 1e-5).all()
    np.testing.assert_allclose(drawn.min(axis=0), total, atol=0.02)
    ends = ((1e-3, MEMBERS.min(axis=0), 3e-3), (1e6, MEMBERS.mean(axis=0), 1e-5))
    for tau, end, within in ends:
        near = rewards.combine(list(MEMBERS), how="entropic", risk=tau).total
        np.testing.assert_allclose(near, end, atol=within)


def means_of(stats):
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


def test_an_ensemble_of_functions():
    """Responses of 2, 3 and 1 tokens; a member with parts counts by its total."""
    inner = rewards.weighted({"a": (2.0, constant(1.0)), "b": (0.25, constant(2.0))})
    reward = rewards.ensemble([lengths, inner], how="minimum")
    scores = reward(answers())
    np.testing.assert_array_equal(scores.total, [2.0, 2.5, 1.0])
    np.testing.assert_array_equal(scores.parts["disagreement"], [0.25, 0.25, 0.75])
    same = rewards.ensemble([lengths, inner], how="mean_minus_std", std_coef=2.0)
    np.testing.assert_array_equal(same(answers()).total, [1.75, 2.25, 0.25])


@pytest.mark.slow
def test_an_ensemble_of_frozen_models_is_a_pytree():
    """Each member has its own copy, of which the total is used."""
    reward_models = [frozen.freeze(params(seed)) for seed in (0, 1)]
    inner = rewards.weighted(
        {"a": (2.0, rewards.from_model(reward_models[1], model=MODEL))}
    )
    members = [rewards.from_model(reward_models[0], model=MODEL), inner]
    reward = rewards.ensemble(members, how="minimum")
    assert len(jax.tree.leaves(reward)) == 2 * len(jax.tree.leaves(reward_models[0]))
    batch = answers()
    alone = [
        np.asarray(
            score_of(params(i), model=MODEL, tokens=batch.tokens, mask=batch.mask)
        )
        for i in (0, 1)
    ]
    scores = reward(batch)
    np.testing.assert_allclose(
        scores.total, np.minimum(alone[0], 2 * alone[1]), atol=1e-5
    )


def test_ensembles_that_are_refused():
    with pytest.raises(InputError, match="at least 2 rewards to combine, got 1"):
        rewards.ensemble([lengths], how="mean")
    with pytest.raises(InputError, match="at least 2 rewards to combine, got 1"):
        rewards.combine(MEMBERS[:1], how="mean")
    with pytest.raises(InputError, match=r"how: expected one of 'mean', 'min.*'max'"):
        rewards.combine(MEMBERS, how="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="std_coef: expected a finite number, 0 or mo"):
        rewards.combine(MEMBERS, how="mean_minus_std", std_coef=-1.0)
    with pytest.raises(InputError, match=r"risk: expected .* above 0"):
        rewards.combine(list(MEMBERS), how="entropic", risk=0.0)
    for unread in ({"std_coef": 1.0}, {"risk": 1.0}):
        with pytest.raises(InputError, match="expected none with how 'mean', which"):
            rewards.ensemble([lengths, lengths], how="mean", **unread)
    with pytest.raises(ValueError, match=r"member_1 \(3,\)"):
        rewards.combine([MEMBERS[0], MEMBERS[1][1:]], how="mean")


def test_a_turn_of_one_reward_is_a_turn_of_the_episode():
    def of(columns, total, turns=None):
        ends = jnp.zeros((2, 5), bool).at[:, jnp.array(columns)].set(True)
        return rewards.Scores(
            jnp.full(2, total, jnp.float32), turns=turns, turn_ends=ends
        )

    first, second = of([1, 4], 1.0), of([2, 4], 2.0)
    both = rewards.weighted(
        {"first": (0.0, lambda _: first), "second": (1.0, lambda _: second)}
    )(None)
    assert np.flatnonzero(both.turn_ends[0]).tolist() == [1, 2, 4]
    with pytest.raises(InputError, match="turn_ends as bool"):
        rewards.scores_of(
            dataclasses.replace(first, turn_ends=jnp.zeros((1, 5), bool)), rows=2
        )
    with pytest.raises(InputError, match="turn_ends as bool"):
        rewards.scores_of(
            dataclasses.replace(first, turn_ends=jnp.zeros((2, 5), jnp.float32)), rows=2
        )


def test_ends_of_turns_stay_where_another_reward_alone_counts():
    ends = jnp.zeros((2, 5), bool).at[:, 4].set(True)
    episodes = rewards.Scores(
        jnp.zeros(2), turn_ends=ends, left_out=jnp.array([False, True])
    )
    whole = train_rewards._without_failed(jnp.ones(2), episodes)
    np.testing.assert_array_equal(whole.turn_ends, ends)
    assert whole.left_out.tolist() == [False, True]
