"""A process that renders chat templates, with limits of time and memory.

    python template_worker.py SECONDS      a JSON request and its answer, a line each

A template is a program by whoever made the checkpoint: `{{ 'a' * 10**10 }}` is 10 GB.
`templates` starts this file by its path, without this package and hence without JAX.
An alarm ends the process if an answer takes too long, even if the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2**30  # in addition to what the process uses at its start
MAX_CHARACTERS = 10_000_000  # of a conversation, far beyond any context


def answer(request: dict[str, Any], *, seconds: float = 0) -> dict[str, Any]:
    """Renders conversations.

    Args:
      request: "conversations", each with "messages" and "add_generation_prompt", and
        further arguments of `render_jinja_template`.
      seconds: time limit per conversation, after which this process ends; 0 is none.

    Returns:
      {"texts": ...}, or {"error": ...} with the error that the template raised.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = []
    try:
        for conversation in request["conversations"]:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process
            (text,), _ = render_jinja_template(
                **request
                | {
                    "conversations": [conversation["messages"]],
                    "add_generation_prompt": conversation["add_generation_prompt"],
                }
            )
            if len(text) > MAX_CHARACTERS:
                return {"error": f"it writes more than {MAX_CHARACTERS} characters"}
            texts.append(text)
        return {"texts": texts}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything
        return {"error": f"{str(error) or type(error).__name__}"[:1000]}


def _limit_memory() -> None:
    # Systems without these have only the time limit.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Answers requests until the input ends, which it does when the parent ends."""
    empty = {"messages": [], "add_generation_prompt": False}
    answer({"conversations": [empty], "chat_template": ""})  # imports before the limit
    _limit_memory()
    seconds = float(sys.argv[1])
    for line in sys.stdin:
        answered = answer(json.loads(line), seconds=seconds)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answered), flush=True)


if __name__ == "__main__":
    main()
