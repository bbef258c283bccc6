"""The steps that --profile names."""

import dataclasses

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, run
from rlhf_jax.runs.profile import Window
from rlhf_jax.runs.run_config import MAY_DIFFER, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_steps: int | None = 6
    progress: bool = False


def test_a_window_is_read():
    assert Window.parse("5:8") == (5, 8)
    assert Window.parse("0:1") == (0, 1)


@pytest.mark.parametrize(
    "text", ["8:5", "5:5", "x", "", "5", "5:", ":8", "-1:3", "1:2:3", "1.0:2", "٣:٥"]
)
def test_what_is_no_window_is_refused_when_options_are_read(tmp_path, text):
    with pytest.raises(InputError, match=r"^--profile: expected FIRST:END .* got"):
        Config(out=tmp_path / "run", profile=text)


def test_steps_beyond_the_run_are_refused_before_anything_is_loaded(tmp_path):
    Config(out=tmp_path / "run", profile="4:6")
    late = Config(out=tmp_path / "run", profile="4:7")
    message = r"--profile 4:7: expected steps 0 to 5, which the run has, got step 6"
    with pytest.raises(InputError, match=message):
        folder.check_run(late)
    # Where the number of steps follows from the data, when that has been read.
    unknown = dataclasses.replace(late, num_steps=None)
    folder.check_run(unknown)
    with pytest.raises(InputError, match=message):
        run.Run(unknown, num_steps={"sft": 100, "ppo": 6})
    assert not (tmp_path / "run").exists()


def test_a_resume_may_profile_other_steps():
    assert {"profile", "trackio"} <= MAY_DIFFER
