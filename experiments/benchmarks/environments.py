"""The participants of `iteration.py`, and their virtual environments."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import line_protocol

FOLDER = Path(line_protocol.__file__).parent
OURS = "rlhf_jax"
OURS_PADDED = "rlhf_jax, padded"
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "trl": (
        "trl==1.12.0",
        "torch==2.13.0",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
    ),
    "trl-grpo": (
        "trl==1.16.0",
        "torch==2.13.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
    ),
    "tunix": (
        "google-tunix==0.1.7",
        "optax==0.2.8",
        "jax==0.12.0.1; python_version >= '3.12'",
        "flax==0.12.12; python_version >= '3.12'",
        "jax==0.10.2; python_version < '3.12'",
        "flax==0.12.8; python_version < '3.12'",
    ),
    "audits": (
        "trl==1.16.0",
        "torch==2.13.0",
        "transformers==5.24.0",
        "jax==0.10.2",
        "jaxtyping==0.3.11",
        "ray==2.60.0",  # this and the rest are imported by verl's losses
        "tensordict==0.10.0",
        "omegaconf==2.4.0",
        "hydra-core==1.3.8",
        "codetiming==1.4.0",
    ),
}
"""{environment: pinned packages that pip installs}."""
ALONE: dict[str, tuple[str, ...]] = {"audits": ("verl==0.9.1", "openrlhf==0.11.2")}
"""{environment: packages installed without their dependencies}, which conflict or need
a GPU to be built; the functions that are called do not use them."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A participant."""

    script: str  # file in peers/
    environment: str | None  # None is the Python that runs the benchmark
    differs: str  # its differences, printed; the script's docstring has the details
    arguments: tuple[str, ...] = ()  # arguments of the script
    uneven: bool = False  # takes part only if response lengths differ


PEERS = {
    OURS: Peer(
        "rlhf_jax_ppo.py",
        None,
        "whole iteration in one program, and its phases once more as four; of tiny "
        "programs on two virtual devices, one the critic's; words padded to multiples "
        "of 64, which are 128 if nothing is said",
    ),
    OURS_PADDED: Peer(
        "rlhf_jax_ppo.py",
        None,
        "the same without packed rows: one program reads every column",
        arguments=("--padded",),
        uneven=True,
    ),
    "trl": Peer(
        "trl_ppo.py",
        "trl",
        "keeps all logits and hidden states, head at prompt positions too, entropy a "
        "minibatch, garbage collection an iteration; uneven rows padded, as PPO has no "
        "padding-free mode there",
    ),
    "torch": Peer(
        "torch_ppo.py",
        "trl",
        "eager, by hand: none of TRL's extra work; minibatches cut to the longest row",
    ),
    "tunix": Peer(
        "tunix_ppo.py",
        "tunix",
        "a Qwen2 of the same size; samples and scores a minibatch at a time, log-probs "
        "once more after sampling, critic's values outside of any program; uneven rows "
        "packed, a row an optimizer step",
    ),
}


class PeerError(RuntimeError):
    """A participant failed; the others continue."""


def python_of(environment: str | None, *, folder: Path) -> Path:
    """The interpreter of an environment, which is created if it is incomplete.

    Raises:
      PeerError: the environment cannot be created.
    """
    if environment is None:
        return Path(sys.executable)
    home = folder / environment
    python = home / "bin" / "python"
    packages, alone = ENVIRONMENTS[environment], ALONE.get(environment, ())
    if python.exists() and _complete(python, (*packages, *alone)):
        return python
    print(
        f"installing {' '.join((*packages, *alone))} into {home}: takes minutes",
        flush=True,
    )
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, *packages], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise PeerError(
            f"expected an environment with {packages[0]} at {home}, got: {error}; make "
            f"one by hand (python -m venv, pip install {' '.join(packages)}) and name "
            f"its parent with --environments, or leave the peer out"
        ) from None
    return python


def _complete(python: Path, packages: Sequence[str]) -> bool:
    pins = [pin.split("==") for pin in packages if ";" not in pin]
    code = (
        "import sys, json; from importlib.metadata import version\n"
        "pins = json.loads(sys.argv[1])\n"
        # 2.13.0+cpu is the release 2.13.0 built for CPUs.
        "assert all(version(n).split('+')[0] == v for n, v in pins)"
    )
    command = [python, "-c", code, json.dumps(pins)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def surroundings(environment: str | None) -> dict[str, str]:
    """Environment variables of a participant: offline, without preallocated memory.

    All participants use huge pages of glibc unless the caller has set GLIBC_TUNABLES.
    """
    variables = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    variables.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if environment is not None:  # our packages must not shadow the environment's
        variables.pop("PYTHONPATH", None)
    return variables
