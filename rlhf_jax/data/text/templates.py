"""Chat templates, written by a process with limits of time and memory.

A template comes with a checkpoint and is a program: one that loops for ever, or makes a
text of 10 GB, must not take the run with it. One process writes all conversations, one
after another. It is started by whoever reads a tokenizer that has a template, or by the
first conversation, and again after one that it was ended for.
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

SECONDS = 10.0  # for a conversation, which takes some 0.1 ms

_LOCK = threading.RLock()
_started: list[subprocess.Popen[str]] = []  # the process, if there is one


class TemplateError(Exception):
    """What a template raised, or which limit it went beyond."""


def write(
    template: str,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    add_generation_prompt: Sequence[bool],
    variables: Mapping[str, Any],
) -> list[str]:
    """The texts of conversations, as `transformers` writes them.

    Args:
      template: in Jinja.
      conversations: of messages.
      add_generation_prompt: whether the template asks for a response at the end of
        each.
      variables: what else the template reads, as the special tokens.

    Raises:
      TemplateError: the template raised an error, or took too long or too much.
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
    """Starts the process, unless it runs. Its imports take a second."""
    with _LOCK:
        if _started and _started[0].poll() is not None:  # somebody ended it
            stop()
        if not _started:
            _started.append(_start())


def stop() -> None:
    """Ends the process, if there is one; the next conversation starts another."""
    while _started:
        worker = _started.pop()
        worker.kill()
        with contextlib.suppress(OSError):  # what was left in a pipe
            worker.communicate()


atexit.register(stop)


def _start() -> subprocess.Popen[str]:
    # -P: the modules beside the worker's file are not to be imported by their names.
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(template_worker.__file__)), str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # a Ctrl-C is the run's alone
    )
