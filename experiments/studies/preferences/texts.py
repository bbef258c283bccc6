"""Texts outside the training data, on which forgetting is measured.

Both are written as demonstrations whose response is scored, so that a speech or an
answer is scored from its beginning; blocks of a plain .txt file would cut it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Row = dict[str, str]
SHORTEST, LONGEST = 150, 600  # characters of a speech


def shakespeare(play: str, *, rows: int) -> list[Row]:
    """The last speeches of the file with SHORTEST to LONGEST characters.

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
