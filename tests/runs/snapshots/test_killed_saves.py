"""A run killed by SIGKILL at a chosen moment of a save resumes to the last bit.

The moments are what the process does to files, as Python's audit events tell them.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import places
import pytest

from rlhf_jax.runs import run
from rlhf_jax.runs.folder import write_summary
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots import files, resume
from rlhf_jax.runs.snapshots.integrity import LIST
from rlhf_jax.train.queries import verify

STEPS = 6  # with snapshots 2, 4 and 6, of which two are kept
AT = "KILLED_AT"  # environment variable: an event and a part of its path
# Of each, what is there when the process is killed.
MOMENTS = {
    "os.rename 2/deleted/": {"deleted", "2", "4", "6"},
    f"open 6/{LIST}": {"deleted", "4", "6"},
    f"os.rename 6/{LIST}": {"deleted", "4", "6"},
    "shutil.rmtree deleted": {"deleted", "4", "6"},
    "os.remove commit_success.txt": {"deleted", "4", "6"},  # of 2
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    snapshot_every: int = 2
    progress: bool = False


@jax.jit
def update(x, key):
    x = 0.9 * x + jax.random.normal(key, x.shape)
    return x, x.sum()


def play(out, **options):
    config = Config(out=out, **options)
    with run.Run(config, num_steps={"toy": STEPS}) as job:
        state = {"x": jnp.zeros(100)}
        with job.stage("toy", state, meta={}) as stage:
            for step in stage.steps():
                key = jax.random.fold_in(jax.random.key(0), step)
                x, total = update(stage.state["x"], key)
                stage.state = {"x": x}
                stage.end_step(step, {"total": (total, None)})
    write_summary(out, {})
    return stage.state["x"].tolist()


def names(out):
    return sorted(
        path.relative_to(out).as_posix()
        for path in out.rglob("*")
        # Files of arrays are numbered as they come.
        if len(path.relative_to(out).parts) < 4 or path.name == LIST
    )


def killed_at(out, moment):
    """A run that kills itself at a moment of its last save."""
    ended = subprocess.run(
        [sys.executable, __file__, str(out)],
        env=os.environ | {"PYTHONPATH": places.PYTHONPATH, AT: moment},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, play(out)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_as_it_saves_goes_on(whole, tmp_path, moment, capsys):
    out = tmp_path / "run"
    killed_at(out, moment)
    saved = out / "snapshots" / "toy"
    assert {path.name for path in saved.iterdir()} == MOMENTS[moment]
    for step in resume.steps(saved):
        assert files.check(saved, step).damage is None
    verify.verify(out)
    doubted = f"{LIST} is" in capsys.readouterr().out
    assert doubted == (not (saved / "6" / LIST).exists())
    expected, x = whole
    assert play(out, resume=True) == x
    assert names(out) == names(expected)
    assert (saved / "6" / LIST).exists()
    rows = "metrics.jsonl"
    assert (out / rows).read_bytes() == (expected / rows).read_bytes()
    checked = run_files.check(out)
    assert checked == (run_files.check(expected).whole, [], [], [], [])


def main(out):
    event, place = os.environ[AT].split()

    def kill(name, arguments):
        if name != event or not (out / "snapshots" / "toy" / str(STEPS)).exists():
            return
        path = "/".join(str(argument) for argument in arguments[:2])
        if place in path.replace(f"{out.absolute()}/snapshots/toy/", ""):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    play(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
