"""Environments of the runs of tests.

They stand in a module that loads no JAX, as users' environments do: the processes that
play them import it, and importing JAX takes each of them seconds.
"""

import asyncio

from rlhf_jax.environments.protocol import Started, Turn


class Hall:
    """Three turns; a word of the response's own is worth something."""

    def reset(self, row):
        return Started(row["start"], (row["start"], 0))

    def step(self, state, response):
        start, turn = state
        reward = 0.25 * ("key" in response.split()) + 0.5 * (start in response)
        return Turn("door hall", reward, turn == 2, (start, turn + 1))


class Broken(Hall):
    """No turn is answered."""

    def step(self, state, response):
        raise KeyError("key")


class Talk(Hall):
    """Every word is worth something."""

    def step(self, state, response):
        start, turn = state
        reward = 0.25 * len(response.split())
        return Turn("door hall", reward, turn == 2, (start, turn + 1))


class Slow(Hall):
    """Answers late, and some rows later than others."""

    async def step(self, state, response):
        await asyncio.sleep(0.3 * (state[0] in ("left", "go")))
        return super().step(state, response)


class Flaky(Hall):
    """One row is never answered: the tool that it needs is gone."""

    def step(self, state, response):
        if state[0] == "go":
            raise ConnectionError(f"no tool for {len(response)} letters")
        return super().step(state, response)


class Dark:
    """No environment."""


class LongHall:
    """Three turns, each worth something, and the more the longer it is."""

    def reset(self, row):
        return Started(row["start"], (row["start"], 0))

    def step(self, state, response):
        start, turn = state
        reward = 0.25 * len(response.split()) + 0.5 * (start in response)
        return Turn("door hall", reward, turn == 2, (start, turn + 1))


class Late(LongHall):
    """No turn is answered in time."""

    def step(self, state, response):
        raise TimeoutError


class LeftHall:
    """A turn of one or two words ends it; it raises where the second goes left."""

    def reset(self, row):
        return Started(row["prompt"], (row["prompt"].split()[0], 0))

    def step(self, state, response):
        (start, turn), words = state, response.split()
        if "left" in words and turn:
            raise KeyError("left")
        done = len(words) in (1, 2)
        reward = 0.5 * ("key" in words) + 0.25 * (start in words)
        return Turn("door hall", reward, done, (start, turn + 1))
