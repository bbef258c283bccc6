"""Lengths read from files, and the batch that represents them."""

import jax
import numpy as np
import planned
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import histogram, workload
from rlhf_jax.train.plan import job


def test_integers_and_objects_a_line(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('7\n{"length": 3, "text": "x"}\n\n 12 \n{"length": 3}\n')
    assert histogram.read(path) == (3, 3, 7, 12)


@pytest.mark.parametrize(
    "line", ["1.5", "0", "-3", "true", '{"len": 3}', '{"length": "3"}', "[3]", "word"]
)
def test_a_line_of_another_form_is_named(tmp_path, line):
    path = tmp_path / "lengths.txt"
    path.write_text(f"4\n{line}\n")
    with pytest.raises(InputError, match=r"lengths.txt:2: expected an integer of 1"):
        histogram.read(path)


def test_no_file_and_an_empty_one(tmp_path):
    with pytest.raises(
        InputError, match=r"none: expected a file of lengths, got .*No such"
    ):
        histogram.read(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(InputError, match=r"of lengths, got an empty one; write one"):
        histogram.read(empty)


def test_the_batch_has_the_quantiles_of_the_file():
    lengths = tuple(range(1, 241))
    assert histogram.spread(lengths, rows=240) == lengths
    rows = histogram.spread(lengths, rows=48)
    assert np.mean(rows) == pytest.approx(np.mean(lengths), abs=1)
    assert histogram.spread((2, 9), rows=4) == (2, 2, 9, 9)
    assert histogram.spread((2, 9, 11), rows=1) == (9,)


@pytest.mark.slow
def test_what_a_histogram_changes_of_a_plan():
    """Tokens, model FLOPs and the sampler's turns change; shapes do not, by padding."""
    config, options = planned.parsed("ppo", "--batch-size=4", "--max-new-tokens=200")
    target = planned.target_of(config, options)

    def of(lengths=None):
        return job.Job(options, target, lengths).workload_of(config)

    full, short = of(), of((10, 20, 130, 130))
    assert full.tokens == 4 * 206
    assert short.tokens == 4 * 6 + 290
    for one, other in zip(full.programs, short.programs, strict=True):
        assert other.model_flops < one.model_flops
        assert [leaf.shape for leaf in _leaves(one)] == [
            leaf.shape for leaf in _leaves(other)
        ]
    # The windows of the cache end at 128 and 206 columns; 135 are run.
    assert full.programs[0].trips == (122, 77)
    assert short.programs[0].trips == (122, 7)
    assert workload.decoding_turns(6, 200, longest=20) == (19, 0)
    with pytest.raises(InputError, match=r"at most 200, got 201"):
        of((1, 201))


def _leaves(program):
    return jax.tree.leaves(program.args)
