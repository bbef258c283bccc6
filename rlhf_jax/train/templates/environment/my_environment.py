"""A task of several turns, as `--environment my_environment`.

The model asks for the letters of a word, one by one, and then says the word. Rows have
the word. It runs in processes of its own, which load no JAX: what an episode remembers
stands in its state.
"""

import dataclasses

from rlhf_jax.environments.protocol import Started, Turn


@dataclasses.dataclass(frozen=True)
class Spelling:
    """1 for the word, within some turns."""

    max_turns: int = 12

    def reset(self, row):
        """The prompt and the first state of a row."""
        word = row["word"]
        prompt = f"A word of {len(word)} letters. Ask for one by its number.\n"
        return Started(prompt, state=(word, 0))

    def step(self, state, response):
        """What a response is answered: a letter, or the end."""
        word, turns = state
        answer = response.strip()
        if answer == word or turns + 1 == self.max_turns:
            return Turn("", reward=float(answer == word), done=True, state=None)
        known = answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(word)
        letter = word[int(answer) - 1] if known else "error: no such letter"
        return Turn(f"{letter}\n", reward=0.0, done=False, state=(word, turns + 1))


def expert(row, turns):
    """What an expert writes next; `demonstrations` makes rows for SFT of it."""
    asked = len(turns) // 2
    return str(asked + 1) if asked < len(row["word"]) else row["word"]
