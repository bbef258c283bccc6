"""An environment with concurrent calls, for processes to import."""

import asyncio
import functools
import os
import time
from pathlib import Path

from rlhf_jax.environments.protocol import Started, Turn


class Slow:
    """Each response is a command."""

    async def reset(self, row):
        return Started(row["prompt"], 0)

    async def step(self, state, response):
        word, _, rest = response.partition(" ")
        match word:
            case "meet":  # goes on once so many calls are here
                await barrier(int(rest)).wait()
            case "nap":
                await asyncio.sleep(0.3)
            case "hang":
                await asyncio.sleep(1000)
            case "block":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("gold")
            case "cancel":
                raise asyncio.CancelledError
            case "late":
                raise TimeoutError("of a server")
            case "made":
                try:
                    Path(rest).touch()
                    await asyncio.sleep(1000)
                finally:
                    Path(rest).unlink()
        return Turn(f"{os.getpid()}", 0.5, False, state + 1)


@functools.cache
def barrier(size):
    return asyncio.Barrier(size)


class Wrapped(Slow):
    """Hides that its step is a coroutine function."""

    def step(self, state, response):
        return super().step(state, response)
