"""A vLLM server on the CPU, for the duration of a study."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rlhf_jax.functional.checks import StopError


@contextlib.contextmanager
def serving(vllm: str, model: Path, *, context: int, log: Path) -> Iterator[str]:
    """Starts a vLLM server on the CPU, yields its address and stops it.

    Args:
      vllm: path of the program `vllm`.
      context: largest number of tokens of a prompt and its response.
      log: file for the output of the server.

    Raises:
      StopError: the server ended before it was ready.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(vllm, "serve", str(model), "--served-model-name=policy"),
        *("--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"),
        *("--load-format=safetensors", "--logprobs-mode=processed_logprobs"),
        *(f"--max-model-len={context}", "--generation-config=vllm"),
    ]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)  # it is for this environment's packages
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            while not answers(f"{url}/health"):
                if server.poll() is not None:
                    raise StopError(f"{vllm} ended; see {log}")
                time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait()


def answers(url: str) -> bool:
    """Whether the server responds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False
