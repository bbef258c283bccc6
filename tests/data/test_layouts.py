"""Packed rows against loops: every token once, nothing mixed, in few sizes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax import batch
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.data.layouts.sizes import best_form
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.packing import NONE

FORM = Form(rows=6, num_minibatches=2, max_new_tokens=5, width=9)
ORDER = np.array([[0, 3, 5], [4, 1, 2], [2, 5, 1], [0, 4, 3]])


@st.composite
def runs(draw):
    """Draws (form, lengths of a batch, columns of its padded prompts)."""
    form = dataclasses.replace(
        FORM,
        devices=draw(st.sampled_from([1, 2, 3])),
        after_stop=draw(st.booleans()),
        width=draw(st.integers(9, 14)),
        max_tokens=draw(st.sampled_from([None, 14, 30])),
    )
    text = st.tuples(st.integers(0, 4), st.integers(0, form.max_new_tokens))
    lengths = draw(st.lists(text, min_size=form.rows, max_size=form.rows))
    return form, np.array(lengths), draw(st.integers(4, 6))


def expected(lengths, *, form, prompt_columns):
    """{padded token: the token before it}, for every token that a head predicts."""
    sources = {}
    columns = prompt_columns + form.max_new_tokens
    for row, (prompt, response) in enumerate(lengths.tolist()):
        first, end = prompt_columns - prompt, prompt_columns + response
        last = end + (form.after_stop and 0 < response < form.max_new_tokens)
        for column in range(prompt_columns, last):
            if column > first and response:
                sources[row * columns + column] = row * columns + column - 1
    return sources


def check(packing, members, lengths, *, form, prompt_columns):
    """Checks by loops that one part contains `expected` of its members."""
    columns = prompt_columns + form.max_new_tokens
    source, segments = np.asarray(packing.source), np.asarray(packing.segments)
    groups = packing.states.shape[0]
    np.testing.assert_array_equal(source == NONE, segments == 0)
    placed = source[source != NONE]
    assert len({*placed.tolist()}) == len(placed)
    owner = {}
    for row, (tokens, texts) in enumerate(zip(source, segments, strict=True)):
        for text in {*texts.tolist()} - {0}:
            (where,) = np.nonzero(texts == text)
            np.testing.assert_array_equal(where, where[0] + np.arange(len(where)))
            mine = tokens[where]
            np.testing.assert_array_equal(mine, mine[0] + np.arange(len(mine)))
            padded_row = int(mine[0]) // columns
            assert int(mine[0]) % columns == prompt_columns - lengths[padded_row, 0]
            assert owner.setdefault(padded_row, row) == row  # in one packed row
            assert members[padded_row]
    states = {}
    of_groups = source.reshape(groups, -1)
    for group in range(groups):
        for column in range(1, packing.about.shape[1]):
            token = int(packing.about[group, column])
            state = int(packing.states[group, column - 1])
            assert (token == NONE) == (state == NONE)
            if token != NONE:
                states[token] = int(of_groups[group, state])
                assert packing.columns[group, state] == column - 1
                at = packing.places.reshape(-1)[token]
                assert at == group * packing.about.shape[1] + column
    assert (packing.about[:, 0] == NONE).all()
    assert (np.asarray(packing.places) != NONE).sum() == len(states)
    assert (np.asarray(packing.columns) != NONE).sum() == len(states)
    return states


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_token_stands_once_beside_its_text(run):
    form, lengths, prompt_columns = run
    packer = layouts.Packer(form, sample=lengths)
    columns = prompt_columns + form.max_new_tokens
    packed = packer(lengths, ORDER, columns=columns)
    if packed is None:
        assert form.max_tokens is None  # else rows would not fit into memory
        return
    batch = packed.batch.cut(*packed.batch.sizes[packed.batch.size])
    shape = {"form": form, "prompt_columns": prompt_columns}
    every = expected(lengths, **shape)
    members = np.ones(len(lengths), bool)
    assert check(numpy_of(batch), members, lengths, **shape) == every
    assert packed.members.shape[0] == len(ORDER)
    for step, rows in enumerate(ORDER):
        own = np.asarray(packed.members[step])
        np.testing.assert_array_equal(own.sum(axis=0), 1)  # each row in one part
        states = {}
        for part in range(own.shape[0]):
            sized = jax.tree.map(lambda x, at=(step, part): x[at], packed.minibatches)
            rows_per_device, reads = sized.sizes[sized.size]
            if form.max_tokens is not None:
                assert rows_per_device * form.width <= form.max_tokens
            cut = numpy_of(sized.cut(rows_per_device, reads))
            assert cut.source.shape == (rows_per_device * form.devices, form.width)
            assert cut.states.shape == (form.devices, reads)
            states |= check(cut, own[part], lengths[rows], **shape)
        assert states == expected(lengths[rows], **shape)


def visible_from(packing, group, state):
    """The padded tokens visible to a state, by segments and prefixes alone."""
    rows = packing.source.shape[0] // packing.states.shape[0]
    width = packing.source.shape[1]
    row, column = group * rows + state // width, state % width
    segments, prefixes = packing.segments[row], packing.prefixes[row]
    visible = (segments == segments[column]) | (segments == prefixes[column])
    visible &= (segments > 0) & (np.arange(width) <= column)
    return packing.source[row][visible].tolist()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs(), st.sampled_from([2, 3]))
def test_a_group_s_prompt_stands_once_and_each_response_sees_it(run, group_size):
    form, lengths, prompt_columns = run
    form = dataclasses.replace(form, group_size=group_size)
    lengths[:, 0] = np.repeat(lengths[::group_size, 0], group_size)
    columns = prompt_columns + form.max_new_tokens
    packed = layouts.Packer(form, sample=lengths)(lengths, ORDER, columns=columns)
    if packed is None:
        assert form.max_tokens is None
        return
    whole = (packed.batch, lengths, np.arange(len(lengths)))
    parts = [
        (
            jax.tree.map(lambda x, at=(step, part): x[at], packed.minibatches),
            lengths[rows],
            rows,
        )
        for step, rows in enumerate(ORDER)
        for part in range(packed.members.shape[1])
    ]
    for number, (sized, of_rows, rows) in enumerate([whole, *parts]):
        cut = numpy_of(sized.cut(*sized.sizes[sized.size]))
        sources = expected(of_rows, form=form, prompt_columns=prompt_columns)
        for group, column in zip(*np.nonzero(cut.about != NONE), strict=True):
            token = int(cut.about[group, column])
            row, at = divmod(token, columns)
            assert sources.pop(token) == token - 1
            text = range(prompt_columns - of_rows[row, 0], at)  # columns before it
            visible = visible_from(cut, group, cut.states[group, column - 1])
            assert [place % columns for place in visible] == [*text]
            for place in visible:  # of its own row, or the prompt of its group
                other = place // columns
                own_group = rows[other] // group_size == rows[row] // group_size
                assert other == row or (own_group and place % columns < prompt_columns)
        if number == 0:
            assert not sources
            # In a packed row no prompt stands twice.
            for texts in cut.source:
                prompts = [
                    t for t in texts if t != NONE and t % columns < prompt_columns - 1
                ]
                spots = [(t // columns // group_size, t % columns) for t in prompts]
                assert len({*spots}) == len(spots)


def numpy_of(packing):
    return jax.tree.map(np.asarray, packing)


def test_the_ends_of_texts_by_hand():
    """A reward model reads the state of each text's last token."""
    form = Form(rows=2, num_minibatches=1, max_new_tokens=3, width=8, ends=True)
    lengths = np.array([[1, 2], [2, 2]])
    packer = layouts.Packer(form, sample=lengths)
    output = numpy_of(packer.whole(lengths, columns=5).packing)
    np.testing.assert_array_equal(output.source, [[5, 6, 7, 8, 1, 2, 3, NONE]])
    np.testing.assert_array_equal(output.states[0, :3], [3, 6, NONE])
    np.testing.assert_array_equal(output.about[0, :4], [NONE, 9, 4, NONE])


def test_an_iteration_by_hand():
    """The example of models/packing.py: prompts a and d e, responses b c and f g."""
    form = Form(rows=2, num_minibatches=1, max_new_tokens=3, width=6)
    lengths = np.array([[1, 2], [2, 2]])
    packer = layouts.Packer(form, sample=lengths)
    packed = packer(lengths, np.array([[1, 0]]), columns=5)
    output = numpy_of(packed.batch.packing)
    # The longer first: d e f of row 1, then a b of row 0.
    np.testing.assert_array_equal(output.source, [[5, 6, 7, 1, 2, NONE]])
    np.testing.assert_array_equal(output.segments, [[1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(output.about[0, :5], [NONE, 7, 8, 2, 3])
    np.testing.assert_array_equal(output.states[0, :5], [1, 2, 3, 4, NONE])
    np.testing.assert_array_equal(
        output.places,
        [[NONE, NONE, 3, 4, NONE], [NONE, NONE, 1, 2, NONE]],
    )
    # In the minibatch row 1 of the batch is row 0.
    minibatch = numpy_of(packed.minibatches.packing)
    np.testing.assert_array_equal(minibatch.source[0, 0], [[0, 1, 2, 6, 7, NONE]])
    assert packer.used == {("batch", 0): 1, ("minibatch", 0): 1}


def test_sizes_of_a_long_run_are_few_and_hold_what_comes():
    """Lengths like the sample's are packed; equal full lengths stay padded."""
    rng = np.random.default_rng(0)
    form = Form(rows=64, num_minibatches=4, max_new_tokens=48, width=64)

    def drawn():
        responses = np.clip(rng.lognormal(np.log(14) - 0.32, 0.8, 64), 1, 48)
        return np.stack([rng.integers(8, 17, 64), responses], axis=1).astype(int)

    packer = layouts.Packer(form, sample=drawn())
    padded = 0
    for _ in range(30):
        order = rng.permutation(64).reshape(4, 16)
        padded += packer(drawn(), order, columns=64) is None
    assert padded <= 3
    for sizes in (packer.batch, packer.minibatch):
        assert len(sizes.sizes) <= 5  # and padded rows
        assert sizes.sizes == tuple(sorted(set(sizes.sizes)))
    ideal = 16 * (12 + 14) / 64  # packed rows of a minibatch without any gap
    assert ideal <= packer.minibatch.sizes[0][0] <= 1.3 * ideal
    counts = [rows for rows, _ in packer.batch.sizes[: packer.batch.expected]]
    saved = [1 - few / more for few, more in itertools.pairwise(counts)]
    assert all(share >= 1 / 6 for share in saved)
    full = np.tile([16, 48], (64, 1))
    assert packer(full, np.arange(64).reshape(4, 16), columns=64) is None
    assert packer.used["padded", 0] == padded + 1


def test_a_reserve_has_a_branch_where_a_batch_needs_it_and_nowhere_else():
    form = Form(rows=16, num_minibatches=2, max_new_tokens=32, width=48)
    order = np.arange(16).reshape(2, 8)
    short, longer = (
        np.stack([np.full(16, 8), np.full(16, count)], axis=1) for count in (8, 12)
    )
    packer = layouts.Packer(form, sample=short)
    sizes = packer.minibatch
    assert len(sizes.sizes) == sizes.expected + 1
    for lengths, branches in (
        (short, sizes.sizes[: sizes.expected]),
        (longer, sizes.sizes),
        (short, sizes.sizes[: sizes.expected]),  # as before: a pure function
    ):
        packed = packer(lengths, order, columns=40)
        assert packed.minibatches.sizes == branches
        whole = numpy_of(packed.batch.cut(*packed.batch.sizes[packed.batch.size]))
        last = len(lengths)  # the last token of a text predicts nothing
        assert (whole.source != NONE).sum() == lengths.sum() - last
        assert whole.source.shape[0] <= packed.batch.sizes[-1][0]
    bounded = dataclasses.replace(form, max_tokens=8 * 48, may_pad=False)
    bounded = layouts.Packer(bounded, sample=short)
    packed = bounded(short, order, columns=40)
    assert packed.minibatches.sizes == bounded.minibatch.sizes  # all of them


def half_prompts(responses):
    """64 texts whose prompts fill half of a padded row of 64 columns."""
    return np.stack([np.full(64, 32), responses], axis=1).astype(int)


def widths():
    shape = {"rows": 64, "num_minibatches": 4, "max_new_tokens": 32, "columns": 64}
    return [Form(width=width, **shape) for width in (64, 80, 96)]


def test_the_width_is_the_narrowest_that_packs_well():
    # Two texts of 32 + 8 tokens fit in 80, of 32 + 14 in 96, and of 32 + 32 in neither.
    for response, width in ((8, 80), (14, 96), (32, 64)):
        form = best_form(widths(), half_prompts(np.full(64, response)))
        assert form.width == width


@pytest.mark.parametrize(
    ("bound", "left"),
    [
        ({}, True),
        ({"max_tokens": 192}, True),
        ({"max_tokens": 192, "may_pad": False}, False),
    ],
)
def test_texts_that_grew_alone_in_wide_rows_are_left_padded(bound, left):
    """64 rows of 96 columns are more than 64 padded rows of 64 columns."""
    form = dataclasses.replace(widths()[-1], **bound)
    packer = layouts.Packer(form, sample=half_prompts(np.full(64, 14)))
    order = np.arange(64).reshape(4, 16)
    assert packer(half_prompts(np.full(64, 14)), order, columns=64) is not None
    grown = packer(half_prompts(np.full(64, 32)), order, columns=64)
    assert (grown is None) == left


def test_equal_lengths_are_left_padded():
    lengths = np.tile([4, 5], (6, 1))
    packer = layouts.Packer(FORM, sample=lengths)
    assert packer.batch is None
    assert packer(lengths, ORDER, columns=9) is None


def test_what_does_not_fit_is_told():
    with pytest.raises(InputError, match=r"width of --packing: .*; the longest row"):
        layouts.Packer(
            dataclasses.replace(FORM, width=7), sample=np.tile([4, 5], (6, 1))
        )
    with pytest.raises(
        InputError, match="max_tokens_per_device of --packing: expected"
    ):
        dataclasses.replace(FORM, max_tokens=8)


def test_spans_count_tokens():
    """Spans of the prompt and of all that follows; the last row observes two tokens."""
    mask = [[0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0]]
    response = [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1, 0]]
    nothing = np.zeros((3, 7), np.float32)
    rollout = batch.Rollout(
        tokens=jnp.zeros((3, 7), jnp.int32),
        mask=jnp.array(mask, bool),
        response_mask=jnp.array(response, bool),
        old_logprobs=nothing,
        entropy=nothing,
        index=jnp.arange(3),
        sample=jnp.zeros(3, jnp.int32),
    )
    np.testing.assert_array_equal(layouts.spans(rollout), [[1, 2], [2, 1], [1, 4]])
