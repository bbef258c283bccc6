"""Renders chat templates in a process with limits of time and memory.

A template comes with a checkpoint and is a program. One that loops forever, or makes a
text of 10 GB, must not end the run. One process renders all conversations, one after
another. It starts when a tokenizer with a template is read, else with the first
conversation, and again after a conversation that exceeded a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.data.text import template_worker

SECONDS = 10.0  # time limit of a conversation, which takes about 0.1 ms

_LOCK = threading.RLock()
_started: list[subprocess.Popen[str]] = []  # the process, if there is one


class TemplateError(Exception):
    """The template raised an error or exceeded a limit."""


def write(
    template: str,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    add_generation_prompt: Sequence[bool],
    variables: Mapping[str, Any],
) -> list[str]:
    """Renders conversations as `transformers` does.

    Args:
      template: a Jinja template.
      conversations: lists of messages.
      add_generation_prompt: for each conversation, whether the template asks for a
        response at its end.
      variables: further inputs of the template, such as the special tokens.

    Raises:
      TemplateError: the template raised an error or exceeded a limit.
    """
    request = {
        "conversations": [
            {"messages": messages, "add_generation_prompt": asks}
            for messages, asks in zip(conversations, add_generation_prompt, strict=True)
        ],
        "chat_template": template,
        **variables,
    }
    with _LOCK:
        begin()
        worker = _started[0]
        assert worker.stdin is not None  # both are pipes
        assert worker.stdout is not None
        try:
            print(json.dumps(request, default=str), file=worker.stdin, flush=True)
            line = worker.stdout.readline()
        except OSError:
            line = ""
        if not line:
            stop()
    if not line:
        if worker.returncode == -signal.SIGALRM:
            raise TemplateError(f"it takes longer than {SECONDS:g} s")
        raise TemplateError(f"its process ended with status {worker.returncode}")
    answered = json.loads(line)
    if "error" in answered:
        raise TemplateError(answered["error"])
    return answered["texts"]


def begin() -> None:
    """Starts the process unless it runs; its imports take a second."""
    with _LOCK:
        if _started and _started[0].poll() is not None:  # it ended meanwhile
            stop()
        if not _started:
            _started.append(_start())


def stop() -> None:
    """Ends the process, if there is one; the next conversation starts another."""
    while _started:
        worker = _started.pop()
        worker.kill()
        with contextlib.suppress(OSError):  # a broken pipe
            worker.communicate()


atexit.register(stop)


def _start() -> subprocess.Popen[str]:
    # -P: modules in the folder of the worker must not shadow others.
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(template_worker.__file__)), str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches the run only
    )
