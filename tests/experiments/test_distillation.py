"""The study of distillation, at toy size."""

import json

import jax.numpy as jnp
import pytest
from studies import distillation
from studies.distillation import Config

from rlhf_jax.functional.checks import InputError


def test_compute_is_equal(tmp_path):
    """A student of one parameter takes 28 operations per token, 30 with sampling."""
    options = Config(out=tmp_path, num_steps=300)
    student, teacher = jnp.zeros(1), jnp.zeros(11)
    models = {"student": student, "teacher": teacher}
    assert distillation.steps_of("reverse", options, **models) == 280
    assert distillation.steps_of(distillation.OF_TEACHER, options, **models) == 300


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(InputError, match="num_steps"):
        Config(out=tmp_path, num_steps=0)


@pytest.mark.long
def test_every_way_comes_closer_to_the_teacher(tmp_path):
    distillation.main(
        Config(
            out=tmp_path / "run",
            num_seeds=1,
            num_steps=30,
            batch_size=16,
            teacher_steps=40,
            student_steps=10,
            teacher_size=32,
            student_size=16,
            num_answers=32,
            progress=False,
        )
    )
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    by_way = {row["way"]: row for row in rows}
    start = by_way.pop("start")
    del by_way["teacher"]
    assert set(by_way) == {distillation.OF_TEACHER, *distillation.RECIPES}
    for row in by_way.values():
        assert row["kl_to_teacher"] < start["kl_to_teacher"]
        assert 0 <= row["fluency"] <= 1
