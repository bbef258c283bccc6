"""A task of several turns, for `--environment my_environment`.

The model asks for the letters of a word, one by one, and then writes the word. Rows
have the field "word". The environment runs in separate processes, which load no JAX.
Everything that an episode remembers is in its state.
"""

import dataclasses

from rlhf_jax.environments.protocol import Started, Turn


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A reward of 1 for the word, within `max_turns` turns."""

    max_turns: int = 12

    def reset(self, row):
        """Returns the prompt and the initial state of a row."""
        word = row["word"]
        prompt = f"A word of {len(word)} letters. Ask for one by its number.\n"
        return Started(prompt, state=(word, 0))

    def step(self, state, response):
        """Answers a response with a letter, or ends the episode."""
        word, turns = state
        answer = response.strip()
        if answer == word or turns + 1 == self.max_turns:
            return Turn("", reward=float(answer == word), done=True, state=None)
        known = answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(word)
        letter = word[int(answer) - 1] if known else "error: no such letter"
        return Turn(f"{letter}\n", reward=0.0, done=False, state=(word, turns + 1))


def expert(row, turns):
    """Returns an expert's next response, from which `demonstrations` makes SFT rows."""
    asked = len(turns) // 2
    return str(asked + 1) if asked < len(row["word"]) else row["word"]
