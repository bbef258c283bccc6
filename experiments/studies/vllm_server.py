"""A vLLM server on the CPU, for as long as a study needs it."""

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
    """The address of a vLLM server of a model, on the CPU; ends it.

    Args:
      vllm: its program.
      context: tokens that a prompt and its response have at most.
      log: file for what the server prints.

    Raises:
      StopError: it ended before it was up.
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
    environment.pop("PYTHONPATH", None)  # of this environment, not of the server's
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
    """Whether a server is up."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False
