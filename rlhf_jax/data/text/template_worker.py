"""A process that writes chat templates, so that none takes all time or memory.

    python template_worker.py SECONDS      a JSON request and its answer, a line each

A template is a program of whoever made the checkpoint: `{{ 'a' * 10**10 }}` is 10 GB.
`templates` starts this file by its path, without this package and so without JAX. The
system ends it when an answer takes too long, whatever becomes of the parent.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2**30  # beyond what the process has when it begins
MAX_CHARACTERS = 10_000_000  # of a conversation, far beyond any context


def answer(request: dict[str, Any], *, seconds: float = 0) -> dict[str, Any]:
    """What the template writes of conversations.

    Args:
      request: "conversations", each with "messages" and "add_generation_prompt", and
        what else `render_jinja_template` takes.
      seconds: for a conversation, after which this process ends; 0 is no limit.

    Returns:
      {"texts": ...}, or {"error": ...} with whatever the template raised.
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
    except Exception as error:  # a template raises what it likes
        return {"error": f"{str(error) or type(error).__name__}"[:1000]}


def _limit_memory() -> None:
    # Systems without this have the time limit alone.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Answers until the input ends, as it does when the parent does."""
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
