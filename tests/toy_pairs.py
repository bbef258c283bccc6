"""Rewards, a judge and an environment for runs of pairs.py, for processes to import."""

from rlhf_jax.environments.protocol import Started, Turn


def value(response):
    """The number of different words, plus a little for each letter."""
    return len(set(response.split())) + 0.01 * len(response)


def score(prompts, responses, rows):
    return [value(response) for response in responses]


def check(prompt, response, row):
    return value(response)


def judge(prompts, responses, rows):
    return [-value(response) for response in responses]


class Hall:
    """At most two turns; words earn reward."""

    def reset(self, row):
        return Started(row["prompt"], 0)

    def step(self, state, response):
        return Turn("the dog", 0.1 * value(response), state == 1, state + 1)
