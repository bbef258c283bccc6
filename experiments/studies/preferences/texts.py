"""Texts that the policy was not trained on here, to see what it forgets.

Both are written as demonstrations, of which the response is read: so a speech or an
answer begins where it does, which blocks of a plain .txt file would not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Row = dict[str, str]
SHORTEST, LONGEST = 150, 600  # characters of a speech


def shakespeare(play: str, *, rows: int) -> list[Row]:
    """The last speeches of the file that are neither short nor long.

    First Citizen:      the prompt
    Before we ...       the response
    """
    speeches = re.findall(r"(?m)^([A-Z][^\n:]*:)\n((?:[^\n]+\n)+)", play + "\n")
    fit = [
        {"prompt": f"{speaker}\n", "response": speech.strip()}
        for speaker, speech in speeches
        if SHORTEST <= len(speech) <= LONGEST
    ]
    return fit[-rows:]


def gsm8k(questions: Iterable[Mapping[str, str]], *, rows: int) -> list[Row]:
    """The first questions with their worked answers."""
    return [
        {"prompt": f"{row['question']}\n", "response": row["answer"]}
        for row, _ in zip(questions, range(rows), strict=False)
    ]
