"""Rewards, judges, verifiers and environments with the wrong arguments."""

from rlhf_jax.environments.protocol import Started, Turn


def two(prompts, responses):
    return [0.0 for _ in responses]


def four(prompt, response, row, more):
    return 0.0


def by_keyword(prompts, responses, *, rows):
    return [0.0 for _ in responses]


class Stateless:
    """Its `step` forgets the state."""

    def reset(self, row):
        return Started(row["prompt"], 0)

    def step(self, response):
        return Turn("", 0.0, True, None)


class Rowless:
    """Its `reset` takes no row."""

    def reset(self):
        return Started("the cat", 0)

    def step(self, state, response):
        return Turn("", 0.0, True, None)
