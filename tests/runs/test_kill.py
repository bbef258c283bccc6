"""A killed or stopped run, once resumed, leaves the same bits as an unbroken one.

The run below is the shape of every experiment, with arithmetic in the place of models.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import places
import pytest

from rlhf_jax.runs import command_line, metrics
from rlhf_jax.runs.folder import open_run, read_summary, write_summary
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots.snapshots import Snapshots

STAGES = ("sft", "ppo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_steps: int = 12
    """Steps of each stage."""
    stop_at: tuple[int, ...] = ()
    """Steps at which SIGTERM arrives."""


def run(config: Config) -> None:
    folder = open_run(config)
    x = jnp.zeros(1000)
    with command_line.Interrupt() as interrupt, metrics.Recorder(folder) as record:
        for stage in STAGES:
            x = train(x, stage, config, folder, record, interrupt)
    write_summary(folder, {"sum": float(x.sum())})
    np.save(folder / "x.npy", np.asarray(x))


def train(
    x: jax.Array,
    stage: str,
    config: Config,
    folder: Path,
    record: metrics.Recorder,
    interrupt: command_line.Interrupt,
) -> jax.Array:
    update = jax.jit(_update, donate_argnames="x")
    root = jax.random.fold_in(jax.random.key(config.seed), STAGES.index(stage))
    at = folder / "snapshots" / stage
    with Snapshots(at, keep=config.keep_snapshots) as snapshots:
        start = snapshots.latest() or 0
        if start:
            (x,), meta = snapshots.restore(start, like=(x,))
            assert meta == {"stage": stage}
        record.begin(stage, step=start)
        for step in range(start, config.num_steps):
            if step in config.stop_at and not config.resume:
                signal.raise_signal(signal.SIGTERM)
            x, stats = update(x, key=jax.random.fold_in(root, step))
            record.write(step, stats)
            record.write_samples(step, [{"x": float(x[i])} for i in range(2)])
            last = step + 1 == config.num_steps
            if last or interrupt.requested or (step + 1) % config.snapshot_every == 0:
                record.flush()
                snapshots.save(step + 1, arrays=(x,), meta={"stage": stage})
            interrupt.check()
            time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
    return x


def _update(x, *, key):
    x = 0.9 * x + jax.random.normal(key, x.shape)
    count = jnp.float32(x.size)
    return x, {"mean": (x.sum(), count), "max": (x.max(), None)}


def main(*argv: object) -> None:
    words = [str(word) for word in argv]
    command_line.main(run, Config, description="A tiny run.", argv=words)


def result(folder: Path) -> dict[str, Any]:
    names = ("metrics.jsonl", "samples.jsonl", "x.npy")
    files = {name: (folder / name).read_bytes() for name in names}
    return files | {"summary.json": read_summary(folder)}


def test_a_stopped_run_goes_on_to_the_last_bit(tmp_path, capsys):
    options = ("--snapshot-every", 5, "--seed", 3, "--num-steps", 12)
    main("--out", tmp_path / "whole", *options)
    with pytest.raises(SystemExit) as exit_:
        main("--out", tmp_path / "run", *options, "--stop-at", 6)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert "saved" in capsys.readouterr().err
    # It saved the very step it was stopped in, not the one of five before.
    assert sorted(os.listdir(tmp_path / "run" / "snapshots" / "sft")) == ["5", "7"]
    assert len(metrics.read(tmp_path / "run" / "metrics.jsonl")) == 7
    main("--config", tmp_path / "run" / "config.json", "--resume")
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert not (tmp_path / "run" / "snapshots" / "sft" / "7").exists()


@pytest.mark.slow
def test_other_seeds_differ(tmp_path):
    for seed in (0, 1):
        main("--out", tmp_path / str(seed), "--seed", seed, "--num-steps", 2)
    assert result(tmp_path / "0") != result(tmp_path / "1")


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path):
    """SIGKILL at random moments, also before the first snapshot and in later stages."""
    random = np.random.default_rng(0)
    options = ("--snapshot-every", "2", "--resume")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main("--out", whole, *options)
    command = (sys.executable, __file__, "--out", str(parts), *options)
    root = places.PYTHONPATH
    environment = os.environ | {"SECONDS_A_STEP": "0.03", "PYTHONPATH": root}
    kills = 0
    for rows in (1, 5, 13, 20):
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None and _rows(parts) < rows:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == 4
    subprocess.run(command, env=environment, check=True)
    assert result(parts) == result(whole)
    assert sorted(os.listdir(parts / "snapshots" / "ppo")) == ["10", "12"]


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
