"""Environments of the runs of tests.

Like users' environments, this module does not import JAX: the processes that play
them import it, and importing JAX would take each of them seconds.
"""

import asyncio

from rlhf_jax.environments.protocol import Started, Turn


class Hall:
    """Three turns; a response's own words earn reward."""

    def reset(self, row):
        return Started(row["start"], (row["start"], 0))

    def step(self, state, response):
        start, turn = state
        reward = 0.25 * ("key" in response.split()) + 0.5 * (start in response)
        return Turn("door hall", reward, turn == 2, (start, turn + 1))


class Broken(Hall):
    """Every step fails."""

    def step(self, state, response):
        raise KeyError("key")


class Talk(Hall):
    """Every word earns reward."""

    def step(self, state, response):
        start, turn = state
        reward = 0.25 * len(response.split())
        return Turn("door hall", reward, turn == 2, (start, turn + 1))


class Slow(Hall):
    """Answers late, with delays that differ by row."""

    async def step(self, state, response):
        await asyncio.sleep(0.3 * (state[0] in ("left", "go")))
        return super().step(state, response)


class Flaky(Hall):
    """One row is never answered, as its tool is gone."""

    def step(self, state, response):
        if state[0] == "go":
            raise ConnectionError(f"no tool for {len(response)} letters")
        return super().step(state, response)


class Dark:
    """Not an environment."""


class LongHall:
    """Three turns; each earns more reward the longer it is."""

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
    """A turn of one or two words ends it; raises if the second word is left."""

    def reset(self, row):
        return Started(row["prompt"], (row["prompt"].split()[0], 0))

    def step(self, state, response):
        (start, turn), words = state, response.split()
        if "left" in words and turn:
            raise KeyError("left")
        done = len(words) in (1, 2)
        reward = 0.5 * ("key" in words) + 0.25 * (start in words)
        return Turn("door hall", reward, done, (start, turn + 1))
