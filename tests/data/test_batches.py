"""Token lists to batches: exact arrays, epochs, random access, process slices."""

import chex
import jax
import numpy as np
import pytest

from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example, Pair
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional.checks import InputError

PROMPTS = [[11], [21, 22], [31, 32, 33], [41, 42, 43, 44], [51, 52, 53, 54, 55]]


def prompts_of(batch_size, **options):
    return batches.prompt_batches(
        PROMPTS, **({"batch_size": batch_size, "seed": 7, "pad_id": 9} | options)
    )


def test_prompts_are_left_padded():
    batch = batches.prompt_batches(
        [[11, 12]], batch_size=2, samples_per_prompt=2, seed=0, pad_id=9, buckets=[4, 8]
    )[3]
    np.testing.assert_array_equal(batch.tokens, [[9, 9, 11, 12]] * 2)
    np.testing.assert_array_equal(batch.mask, [[False, False, True, True]] * 2)
    np.testing.assert_array_equal(batch.index, [0, 0])
    np.testing.assert_array_equal(batch.sample, [6, 7])  # the fourth epoch
    for array in (batch.tokens, batch.index, batch.sample):
        assert array.dtype == np.int32
    assert batch.mask.dtype == np.bool_


def test_every_row_once_an_epoch_and_the_epochs_differ():
    stream = prompts_of(2)
    index = np.concatenate([stream[step].index for step in range(5)])
    epochs = index.reshape(2, 5)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [[0, 1, 2, 3, 4]] * 2
    assert epochs[0].tolist() != epochs[1].tolist()
    sample = np.concatenate([stream[step].sample for step in range(5)])
    np.testing.assert_array_equal(sample, [0] * 5 + [1] * 5)
    assert stream.steps_per_epoch == 3


def test_rows_hold_their_own_tokens():
    batch = prompts_of(5)[0]
    for row in range(5):
        tokens = batch.tokens[row][batch.mask[row]]
        assert tokens.tolist() == PROMPTS[batch.index[row]]


def test_no_sample_of_a_prompt_comes_twice():
    stream = prompts_of(6, samples_per_prompt=3)
    drawn = [
        pair
        for step in range(20)
        for pair in zip(
            stream[step].index.tolist(), stream[step].sample.tolist(), strict=True
        )
    ]
    assert len(set(drawn)) == len(drawn) == 120
    index = stream[0].index
    np.testing.assert_array_equal(index[0::3], index[2::3])  # groups are neighbours
    np.testing.assert_array_equal(stream[0].sample, [0, 1, 2, 0, 1, 2])


def test_a_batch_larger_than_the_data_reaches_into_the_next_epochs():
    batch = prompts_of(12)[0]
    assert np.bincount(batch.index[:10]).tolist() == [2] * 5
    np.testing.assert_array_equal(batch.sample, [0] * 5 + [1] * 5 + [2] * 2)


def test_random_access_equals_sequence_and_seed_decides():
    forwards = [prompts_of(2)[step] for step in range(12)]
    stream = prompts_of(2)
    for step in (11, 0, 5, 5):
        chex.assert_trees_all_equal(stream[step], forwards[step])
    other = [prompts_of(2, seed=8)[step].index.tolist() for step in range(12)]
    assert other != [batch.index.tolist() for batch in forwards]


def test_the_smallest_bucket_that_holds_the_batch():
    stream = prompts_of(1, buckets=(5, 3, 2))
    for step in range(5):
        batch = stream[step]
        longest = len(PROMPTS[batch.index[0]])
        assert batch.tokens.shape[1] == {1: 2, 2: 2, 3: 3, 4: 5, 5: 5}[longest]
    with pytest.raises(
        InputError, match=r"row 4 \(from 0\): expected at most 4 tokens, .* got 5; add"
    ):
        prompts_of(1, buckets=(2, 4))


@pytest.mark.parametrize("samples_per_prompt", [1, 2])
def test_process_slices_make_up_the_global_batch(samples_per_prompt):
    options = {"samples_per_prompt": samples_per_prompt, "buckets": (2, 3, 5)}
    for step in range(4):
        whole = prompts_of(4, **options)[step]
        parts = [prompts_of(4, share=Share((i,), 4), **options)[step] for i in range(4)]
        jax.tree.map(
            lambda *x: np.testing.assert_array_equal(np.concatenate(x[1:]), x[0]),
            whole,
            *parts,
        )


def test_sequences_are_right_padded():
    examples = [Example([3, 4], [5, 2])]
    stream = batches.sequence_batches(
        examples, batch_size=1, seed=0, pad_id=9, buckets=[6]
    )
    np.testing.assert_array_equal(stream[0].tokens, [[3, 4, 5, 2, 9, 9]])
    np.testing.assert_array_equal(stream[0].mask, [[1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(stream[0].response_mask, [[0, 0, 1, 1, 0, 0]])


def test_plain_text_has_no_loss_on_its_first_token():
    stream = batches.sequence_batches(
        [Example((), [3, 4, 5])], batch_size=1, seed=0, pad_id=9
    )
    np.testing.assert_array_equal(stream[0].response_mask, [[0, 1, 1]])


def test_pairs_have_one_width():
    pairs = [Pair([3], [4, 5, 2], [6, 2])]
    batch = batches.preference_batches(pairs, batch_size=1, seed=0, pad_id=9)[0]
    np.testing.assert_array_equal(batch.chosen.tokens, [[3, 4, 5, 2]])
    np.testing.assert_array_equal(batch.rejected.tokens, [[3, 6, 2, 9]])
    np.testing.assert_array_equal(batch.chosen.response_mask, [[0, 1, 1, 1]])
    np.testing.assert_array_equal(batch.rejected.response_mask, [[0, 1, 1, 0]])
    np.testing.assert_array_equal(batch.rejected.mask, [[1, 1, 1, 0]])
    assert batch.margin is None


def test_margins_go_with_their_pairs():
    pairs = [Pair([3], [10 + i, 2], [6, 2], margin=float(i)) for i in range(4)]
    stream = batches.preference_batches(pairs, batch_size=4, seed=0, pad_id=9)
    batch = stream[0]
    assert batch.margin.dtype == np.float32
    np.testing.assert_array_equal(batch.margin, batch.chosen.tokens[:, 1] - 10)
    halves = [
        batches.preference_batches(
            pairs, batch_size=4, seed=0, pad_id=9, share=Share((i,), 2)
        )[0]
        for i in range(2)
    ]
    jax.tree.map(
        lambda whole, a, b: np.testing.assert_array_equal(
            np.concatenate([a, b]), whole
        ),
        batch,
        *halves,
    )
    with pytest.raises(InputError, match="a margin on all 5 pairs or on none, got 4"):
        batches.preference_batches(
            [*pairs, Pair([3], [4], [5])], batch_size=1, seed=0, pad_id=9
        )


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (5, {"samples_per_prompt": 2}, "samples_per_prompt=2 divides, got 5; change"),
        (
            6,
            {"share": Share((0,), 4)},
            "4 devices of the axes dcn, data, fsdp and expert divide, got 6",
        ),
        (0, {}, "samples_per_prompt=1 divides, got 0"),
        (4, {"samples_per_prompt": 0}, "samples_per_prompt=0 divides, got 4"),
    ],
)
def test_sizes_that_do_not_divide(batch_size, options, message):
    with pytest.raises(InputError, match=message):
        prompts_of(batch_size, **options)


def test_no_data_and_empty_prompts():
    with pytest.raises(InputError, match="expected at least one row of data, got none"):
        batches.sequence_batches([], batch_size=1, seed=0, pad_id=0)
    with pytest.raises(InputError, match=r"row 1 \(from 0\): expected a prompt of at"):
        batches.prompt_batches([[1], []], batch_size=1, seed=0, pad_id=0)


def test_sequences_in_order_hold_every_example_once():
    examples = [Example([1], [2, 3]), Example([4], [5]), Example([], [6, 7])]
    first, last = batches.sequences_in_order(examples, batch_size=2, pad_id=9)
    np.testing.assert_array_equal(first.tokens, [[1, 2, 3], [4, 5, 9]])
    np.testing.assert_array_equal(first.response_mask, [[0, 1, 1], [0, 1, 0]])
    np.testing.assert_array_equal(last.tokens, [[6, 7, 9], [9, 9, 9]])
    np.testing.assert_array_equal(last.mask, [[1, 1, 0], [1, 0, 0]])
    # Nothing is learned from, or measured on, the row that fills up the batch.
    np.testing.assert_array_equal(last.response_mask, [[0, 1, 0], [0, 0, 0]])
    assert batches.sequences_in_order([], batch_size=2, pad_id=9) == []
