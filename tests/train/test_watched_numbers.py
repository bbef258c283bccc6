"""Metrics logged beside the updates, recomputed in float64 from their arrays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from rlhf_jax import masked, rewards
from rlhf_jax.algorithms import batch
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.samplers import agreement, protocol
from rlhf_jax.train import loop
from rlhf_jax.train.rollouts.outside import OutsideSampler
from rlhf_jax.train.rows import ReadRows
from rlhf_jax.train.watch.held_out import HeldOut, of_held_out

MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def means(stats: masked.Stats) -> dict[str, float]:
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


# Held-out prompts: five rows in batches of two, so that the last is filled up.

ROWS, SIZE, PROMPT = 5, 4, 2
LENGTHS = np.array([[3, 1, 4, 2, 4], [1, 2, 4, 3, 1], [4, 4, 1, 2, 3]])  # [draw, row]
GREEDY_SCORES = np.array([0.5, -1.25, 2.0, 0.0, 0.75])
SCORES = np.array(
    [[0.0, -0.5, 1.5, -2.0, 0.0], [-1.0, 0.25, 0.5, -0.75, 0.0], [0.0, -3.0, 0.1, 0, 0]]
)
LOGPROBS, REF_LOGPROBS = np.random.default_rng(0).normal(-1.5, 0.6, (2, 3, ROWS, SIZE))


class HeldOutPrograms:
    """Returns the responses written above."""

    def respond(self, policy, *, prompts, key, greedy):
        row, draw = np.asarray(prompts.index), np.asarray(prompts.sample) % 3
        self.greedy = greedy
        response = np.arange(SIZE) < LENGTHS[draw, row][:, None]
        mask = np.concatenate([np.ones((len(row), PROMPT), bool), response], axis=1)
        garbage = np.where(response, LOGPROBS[draw, row], 1e6)
        return batch.Rollout(
            tokens=toys.array(np.zeros(mask.shape), np.int32),
            mask=toys.array(mask, bool),
            response_mask=toys.array(mask & (np.arange(PROMPT + SIZE) >= PROMPT), bool),
            old_logprobs=self.behind(garbage),
            entropy=toys.array(np.zeros(mask.shape)),
            index=prompts.index,
            sample=prompts.sample,
        )

    def reference_output(self, reference, rollout, *, of_teacher):
        assert of_teacher is None
        row, draw = np.asarray(rollout.index), np.asarray(rollout.sample) % 3
        return batch.ReferenceOutput(self.behind(REF_LOGPROBS[draw, row]))

    def behind(self, numbers):
        return toys.array(
            np.concatenate([np.zeros((len(numbers), PROMPT)), numbers], 1)
        )

    # The rewards of a run.

    def begin(self, rollout):
        return lambda: self.greedy

    def finish(self, rollout, greedy):
        row, draw = np.asarray(rollout.index), np.asarray(rollout.sample) % 3
        total = toys.array(GREEDY_SCORES[row] if greedy else SCORES[draw, row])
        # A reward of --rewards, and what it counts, which solves no row.
        counted = {"half/refused": toys.array((row + draw) % 3 == 0)}
        return rewards.Scores(total, parts={"half": total / 2 - 0.21} | counted)


def test_held_out_prompts_are_evaluated_one_by_one():
    programs = HeldOutPrograms()
    config = types.SimpleNamespace(
        batch=types.SimpleNamespace(batch_size=2),
        watch=types.SimpleNamespace(held_out_samples=3),
        rewards=types.SimpleNamespace(rewards=[types.SimpleNamespace(name="half")]),
        seed=0,
    )
    prompts = {row: tuple(range(3, 3 + 1 + row % PROMPT)) for row in range(ROWS)}
    held_out = HeldOut(
        config,
        ReadRows([{}] * ROWS, [""] * ROWS, prompts),
        rewards=lambda **_: programs,
        episodes=lambda *_, **__: None,
        start=types.SimpleNamespace(pad_id=0),
        mesh=MESH,
    )
    stats = held_out({}, programs=programs, reference=object())
    kls, solved, half_solved, refused = [], [], [], []
    for row in range(ROWS):
        refused.append([(row + draw) % 3 == 0 for draw in range(3)])
        solved.append(any(SCORES[draw, row] > 0 for draw in range(3)))
        half_solved.append(any(SCORES[draw, row] / 2 > 0.21 for draw in range(3)))
        for draw in range(3):
            columns = range(LENGTHS[draw, row])
            gaps = [
                LOGPROBS[draw, row, t] - REF_LOGPROBS[draw, row, t] for t in columns
            ]
            kls.append(sum(gaps))
    assert 0 < sum(half_solved) < sum(solved) < ROWS
    assert means(stats) == pytest.approx(
        {
            "eval/greedy_score": GREEDY_SCORES.mean(),
            "eval/score": SCORES.mean(),
            "eval/greedy_reward/half": GREEDY_SCORES.mean() / 2 - 0.21,
            "eval/reward/half": SCORES.mean() / 2 - 0.21,
            "eval/greedy_reward/half/refused": np.mean([of[0] for of in refused]),
            "eval/reward/half/refused": np.mean(refused),
            "eval/pass_at_k": np.mean(solved),
            "eval/pass_at_k_reward/half": np.mean(half_solved),
            "eval/length": LENGTHS.mean(),
            "eval/kl": np.mean(kls),
        },
        rel=1e-5,
    )


def test_the_summary_has_greedy_and_sampled_scores_of_held_out_prompts():
    one = toys.array(1.0)
    stats = {
        f"eval/{name}": (value * one, one)
        for name, value in (("greedy_score", 1), ("score", 2), ("reward/form", 3))
    }
    assert of_held_out(stats, "after") == {
        "held_out_score_after": 1,
        "held_out_sampled_score_after": 2,
        "held_out_reward/form_after": 3,
    }


def test_a_held_out_response_without_a_score_counts_as_0():
    """As the glossary says, pass_at_k has a number for each response."""
    programs = HeldOutPrograms()
    scores = programs.finish
    failed = 2
    programs.finish = lambda rollout, greedy: rewards.Scores(
        jnp.where(rollout.index == failed, 0.0, scores(rollout, greedy).total),
        left_out=rollout.index == failed,
    )
    held_out = HeldOut(
        types.SimpleNamespace(
            batch=types.SimpleNamespace(batch_size=ROWS),
            watch=types.SimpleNamespace(held_out_samples=0),
            rewards=types.SimpleNamespace(rewards=()),
            seed=0,
        ),
        ReadRows([{}] * ROWS, [""] * ROWS, dict.fromkeys(range(ROWS), (3,))),
        rewards=lambda **_: programs,
        episodes=lambda *_, **__: None,
        start=types.SimpleNamespace(pad_id=0),
        mesh=MESH,
    )
    stats = held_out({}, programs=programs, reference=None)
    others = np.delete(GREEDY_SCORES, failed)
    assert means(stats) == pytest.approx({"eval/greedy_score": others.sum() / ROWS})


# Groups that are drawn again.

DRAWS = np.array(  # [draw, row] of three groups of three
    [
        [1, 1, 1, 0.5, 0, 1, 0, 0, 0],
        [2, 2, 2, 0, 0, 0, 1, 1, 1],
        [0, 0, 3, 1, 2, 1, 4, 4, 4],
        [5, 6, 5, 5, 5, 6, 6, 5, 5],
    ]
)


def test_redraws_are_counted_and_every_group_that_was_drawn():
    """The third draw fills both groups, so the fourth is never made."""
    zeros = np.zeros((9, 2))

    def rollout_of(number):
        return batch.Rollout(
            tokens=toys.array(zeros + number, np.int32),
            mask=toys.array(zeros + 1, bool),
            response_mask=toys.array(zeros + 1, bool),
            old_logprobs=toys.array(zeros),
            entropy=toys.array(zeros),
            index=toys.array(np.arange(9) // 3, np.int32),
            sample=toys.array(np.arange(9) % 3, np.int32),
        )

    steps = []

    def of_draw(number):
        scores = rewards.Scores(toys.array(DRAWS[number]))
        return types.SimpleNamespace(rollout=rollout_of(number), scored=scores)

    def draw(policy, step):
        steps.append(step)
        return of_draw(len(steps))

    sampler = types.SimpleNamespace(max_redraws=7)
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(sampler=sampler, num_steps=10),
        programs=types.SimpleNamespace(recipe=types.SimpleNamespace(rows_per_prompt=3)),
        request=lambda step, version: step,
        draw=draw,
        shown=lambda rollout: rollout,
        rewards=None,
    )
    train = types.SimpleNamespace(policy=None, step=4)
    mixed, stats = loop.fill(run, of_draw(0), train, step=4)
    assert steps == [14, 24]
    equal = [
        len(set(scores[first : first + 3])) == 1
        for scores in DRAWS[:3]
        for first in (0, 3, 6)
    ]
    assert means(stats) == pytest.approx(
        {
            "group/redraws": 2,
            "group/drawn_equal_fraction": sum(equal) / len(equal),
        }
    )
    tokens = mixed.rollout.tokens[:, 0]
    np.testing.assert_array_equal(tokens, [2, 2, 2, 0, 0, 0, 2, 2, 2])
    total = mixed.scored.total
    np.testing.assert_array_equal(total, [0, 0, 3, 0.5, 0, 1, 1, 2, 1])


# Samplers.


def test_the_check_after_a_hand_over_is_the_largest_mean_distance_of_a_response():
    """The trainer's log-probs are of a float64 pass; the server's are perturbed."""
    model, temperature = toys.GPT2, 0.8
    recipe = GRPO(
        model=model,
        policy_optimizer=None,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        temperature=temperature,
        group_size=2,
    )
    check = agreement.Agreement(recipe, tolerance=1.0, mesh=MESH)
    rows, params = len(check.prompts.tokens), toys.params()
    rng = np.random.default_rng(5)
    tokens = rng.integers(3, model.vocab_size, (rows, toys.SIZE)).astype(np.int32)
    lengths = (1 + np.arange(rows) * 3 % toys.SIZE).astype(np.int32)
    reported, distances = np.zeros(tokens.shape), []
    for row, length in enumerate(lengths):
        prompt = check.prompts.tokens[row][check.prompts.mask[row]].tolist()
        text = [*prompt, *tokens[row, :length].tolist()]
        logits = oracles.decoder_logits(params, model, text)
        trainers = [
            oracles.log_softmax(logits[at - 1], temperature)[text[at]]
            for at in range(len(prompt), len(text))
        ]
        off = rng.normal(0, 0.1, length)
        reported[row, :length] = np.array(trainers) + off
        distances.append(np.abs(off).mean())

    class Server:
        def hand_over(self, params, *, version):
            return check.require(params, self.draw(check.prompts))

        def draw(self, prompts, **_):
            return protocol.Drawn(tokens, reported.astype(np.float32), lengths)

    sampler = OutsideSampler(Server(), home=MESH, max_new_tokens=toys.SIZE)
    assert sampler.stats() == {}
    sampler.draw(params, Request(check.prompts, jax.random.key(0), jnp.int32(3)))
    assert means(sampler.stats()) == pytest.approx(
        {"policy/sampler_check": max(distances)}, rel=1e-4
    )
