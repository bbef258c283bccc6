"""A run of arithmetic whose folder is in object storage, and a bucket on loopback.

    python tests/toy_storage.py --out gs://bucket/run --num-steps 12 --snapshot-every 2

In the environment SECONDS_A_STEP slows it down, and STOP_AT is the step of the second
stage at which it ends as by a second Ctrl-C.
"""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import places

from rlhf_jax.runs import command_line
from rlhf_jax.runs.folder import read_summary, write_summary
from rlhf_jax.runs.run import Run
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots import resume

STAGES = ("sft", "ppo")
BUCKET = "bucket"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_steps: int = 6
    """Steps of each stage."""
    snapshot_every: int = 2
    progress: bool = False


def play(config: Config) -> None:
    """Runs two stages; writes a model with its manifest, and the summary."""
    from rlhf_jax.runs.proof import exported

    x = jnp.zeros(1000)
    root = jax.random.key(config.seed)
    update = jax.jit(_update)
    with Run(config, num_steps=dict.fromkeys(STAGES, config.num_steps)) as job:
        for number, name in enumerate(STAGES):
            with job.stage(name, {"x": x}, meta={}) as stage:
                for step in stage.steps():
                    key = jax.random.fold_in(root, 1000 * number + step)
                    if number and str(step) == os.environ.get("STOP_AT"):
                        raise KeyboardInterrupt
                    x, stats = update(stage.state["x"], key=key)
                    stage.state["x"] = x
                    stage.end_step(step, stats)
                    time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
                x = stage.state["x"]
    model = job.folder / "model"
    new = not model.exists()
    if new:
        partial = job.folder / ".model.partial"
        partial.mkdir(exist_ok=True)
        np.save(partial / "x.npy", np.asarray(x))
        partial.rename(model)
    exported.write(model, anew=new)
    write_summary(job.folder, {"sum": float(x.sum())})


def _update(x, *, key):
    x = 0.9 * x + jax.random.normal(key, x.shape)
    return x, {"mean": (x.sum(), jnp.float32(x.size))}


def main(*argv: object) -> None:
    words = [str(word) for word in argv]
    command_line.main(play, Config, description="A tiny run.", argv=words)


def results(folder: Path) -> dict[str, object]:
    """The outputs that must be equal however often the run was stopped."""
    names = ("metrics.jsonl", "model/x.npy", "model.sha256")
    contents = {name: (folder / name).read_bytes() for name in names}
    snapshots = {
        f"{stage.name}/{step}"
        for stage in (folder / "snapshots").iterdir()
        for step in resume.steps(stage)
    }
    return contents | {"summary": read_summary(folder), "snapshots": snapshots}


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """The address of a local server of Google's storage API with one bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = (sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1")
    options = (f"--port={port}", "--in-memory", "--quiet", f"--default-bucket={BUCKET}")
    server = subprocess.Popen((*module, *options), stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def start(url: str, *options: str, spool: object, endpoint: str) -> subprocess.Popen:
    """Starts the run in its own process with this spool."""
    environment = os.environ | {
        "PYTHONPATH": places.PYTHONPATH,
        "JAX_PLATFORMS": "cpu",
        "RLHF_JAX_SPOOL": str(spool),
        "STORAGE_EMULATOR_HOST": endpoint,
    }
    return subprocess.Popen(
        (sys.executable, __file__, "--out", url, *options),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
