"""Held-out rows: by prompt, in the requested number, and stable across versions."""

import itertools
from collections import Counter

import hypothesis
import numpy as np
from hypothesis import strategies as st

from rlhf_jax.data import splits
from rlhf_jax.data.examples import Episode, Example, Labelled, Pair
from rlhf_jax.data.receipts import Receipt

SHARES = st.floats(0.001, 0.7)
SEEDS = st.integers(0, 99)


def example(prompt: int, number: int) -> Example:
    return Example([7, prompt], [number])


def one_by_one(rows, *, share, seed):
    """The `hold_out` of earlier versions, without regard to prompts."""
    count = max(round(share * len(rows)), 1)
    held_out = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    training = [row for i, row in enumerate(rows) if i not in held_out]
    return training, [row for i, row in enumerate(rows) if i in held_out]


@hypothesis.given(st.integers(4, 300), SHARES, SEEDS)
def test_rows_of_different_prompts_are_held_out_as_before(count, share, seed):
    rows = [example(number, number) for number in range(count)]
    of = {"share": share, "seed": seed}
    assert splits.hold_out(rows, **of) == one_by_one(rows, **of)


@hypothesis.given(st.integers(4, 300), SHARES, SEEDS)
def test_blocks_of_plain_text_are_held_out_as_before(count, share, seed):
    rows = [Example((), [number % 3]) for number in range(count)]
    of = {"share": share, "seed": seed}
    assert splits.hold_out(rows, **of) == one_by_one(rows, **of)
    bos = [Example([5], [number]) for number in range(count)]
    assert splits.hold_out(bos, **of, unprompted=(5,)) == one_by_one(bos, **of)


@hypothesis.given(st.integers(2, 60), st.sampled_from([1, 2, 4]), SHARES, SEEDS)
def test_kto_holds_out_the_prompts_of_pairs_as_before(
    prompts, rows_per_prompt, share, seed
):
    rows = [
        example(prompt, number)
        for prompt in range(prompts)
        for number in range(rows_per_prompt)
    ]
    groups = [
        list(group) for _, group in itertools.groupby(rows, lambda row: row.prompt)
    ]
    of = {"share": share, "seed": seed}
    hypothesis.assume(round(share * prompts) < prompts)
    hypothesis.assume(round(share * len(rows)) < len(rows))
    before = [list(itertools.chain(*side)) for side in one_by_one(groups, **of)]
    assert splits.hold_out(rows, **of) == tuple(before)


PROMPTS = st.lists(st.integers(0, 12), min_size=3, max_size=80)


@hypothesis.given(PROMPTS, SHARES, SEEDS)
def test_no_prompt_is_on_both_sides_and_the_share_is_near(prompts, share, seed):
    sizes = Counter(prompts)
    hypothesis.assume(len(sizes) > 1)
    hypothesis.assume(round(share * len(prompts)) < len(prompts))
    rows = [example(prompt, number) for number, prompt in enumerate(prompts)]
    training, held_out = splits.hold_out(rows, share=share, seed=seed)
    assert sorted(training + held_out, key=lambda row: row.response) == rows
    assert training == [row for row in rows if row in training]  # in their order
    assert held_out == [row for row in rows if row in held_out]
    assert training
    assert held_out
    sides = [{row.prompt[1] for row in side} for side in (training, held_out)]
    assert not sides[0] & sides[1]
    # No other single prompt would bring it nearer.
    expected = share * len(rows)
    off = abs(len(held_out) - expected)
    assert off < max(1, max(sizes.values()))
    if len(sides[0]) > 1 and len(sides[1]) > 1:
        nearest = min(
            abs(len(held_out) + sizes[prompt] - expected) for prompt in sides[0]
        )
        assert off <= nearest


def test_a_prompt_of_most_rows_is_trained_on():
    rows = [example(0, number) for number in range(97)]
    rows += [example(1 + number, number) for number in range(10)]
    for seed in range(20):
        _, held_out = splits.hold_out(rows, share=0.05, seed=seed)
        assert len(held_out) == 5
        assert all(row.prompt != [7, 0] for row in held_out)


def test_a_prompt_is_found_in_each_kind_of_row():
    message = [{"role": "user", "content": "Hi"}]
    turned = [{"content": "Hi", "role": "user"}]
    kinds = {
        "pairs": [Pair([1, 2], [3], [4]), Pair((1, 2), [5], [6])],
        "labelled": [Labelled([1], [2], [3], True), Labelled([1], [4], [5], False)],
        "episodes": [Episode([1], [2], ()), Episode([1], [3, 4], ((1, 2),))],
        "texts": [{"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "c"}],
        "messages": [{"prompt": message}, {"prompt": turned}],
        "prompts": [[1, 2, 3], np.array([1, 2, 3])],
    }
    for name, rows in kinds.items():
        assert len(splits.by_prompt(rows)) == 1, name
    texts = [{"prompt": "a"}, {"prompt": "b"}, {"other": "a"}, {"other": "a"}]
    assert len(splits.by_prompt(texts)) == 4
    assert splits.numbered([[1], (2,), [1], [], [2], ()]) == [0, 1, 0, 2, 1, 2]


def test_rows_may_be_held_out_whatever_their_prompt():
    rows = [example(0, number) for number in range(40)]
    of = {"share": 0.3, "seed": 4}
    assert splits.hold_out(rows, **of, by="row") == one_by_one(rows, **of)


def test_rows_of_one_prompt_are_all_trained_on_and_the_receipt_is_told():
    rows = [example(0, number) for number in range(40)]
    receipt = Receipt("--data", "rows.jsonl")
    of = {"share": 0.3, "seed": 0}
    assert splits.hold_out(rows, **of, receipt=receipt, instead="ask") == (rows, [])
    assert splits.hold_out(rows, **of) == (rows, [])
    assert receipt.to_json()["notes"] == {
        "rows of one prompt, of which none is held out; ask": {
            "count": 40,
            "first": None,
        }
    }
    two = [*rows, example(1, 0)]
    assert len(splits.hold_out(two, **of, receipt=Receipt("--data", "two"))[1]) == 1
