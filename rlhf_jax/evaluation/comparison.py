"""Win rates of the policy's responses over the reference's, prompt by prompt.

Scores compare every response of one model with every response of the other. A judge is
asked about each pair in both orders, because many judges prefer the response that they
read first (Zheng et al. 2023, arXiv:2306.05685); the mean over both orders cancels it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards.transcripts import Prompt

Row = Mapping[str, Any]  # of the user's data
# (prompts, first responses, second responses, rows) -> for each pair the probability
# that its first response is better. A prompt is a text, or a list of messages if the
# row has one.
TAKES = ("prompts", "responses", "others", "rows")
PairFunction = Callable[[list[Any], list[str], list[str], list[Row]], Sequence[float]]


def win_rate(scores: Sequence[float], ref_scores: Sequence[float]) -> float:
    """Probability that a response of the policy scores above one of the reference.

        (1/nm) Σ_ij [s_i > r_j] + ½[s_i = r_j]

    s are the scores of the policy's n responses to a prompt and r those of the
    reference's m, in reward units. The result is a share, ½ for equal scores.

    Raises:
      InputError: one of the models has no scores.
    """
    if not len(scores) or not len(ref_scores):
        raise InputError(
            f"expected scores of policy and reference, got {len(scores)} and "
            f"{len(ref_scores)}; score a response of each"
        )
    ours = np.asarray(scores, float)[:, None]
    theirs = np.asarray(ref_scores, float)[None, :]
    return float(np.mean((ours > theirs) + 0.5 * (ours == theirs)))


class Verdict(NamedTuple):
    """A judge's probabilities for one pair, asked in both orders."""

    # Probability that the policy's response is better, if read first and second.
    policy_first: float
    policy_second: float

    @property
    def win(self) -> float:
        """Probability that the policy's response is the better one."""
        return (self.policy_first + self.policy_second) / 2

    @property
    def first(self) -> float:
        """Probability of choosing the response that is read first; ½ is unbiased."""
        return (self.policy_first + 1 - self.policy_second) / 2


def judged(
    judge: PairFunction,
    *,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    ref_responses: Sequence[str],
    rows: Sequence[Row],
    called: str = "the judge",
) -> list[Verdict]:
    """Asks a judge about pairs of responses, in both orders.

    Args:
      called: name of the judge in messages, such as "--judge my_judges:better".

    Returns:
      A verdict for each pair.

    Raises:
      InputError: the judge raised, or did not return a probability for each pair.
      StopError: the judge called `sys.exit`.
    """

    def probabilities(first: Sequence[str], second: Sequence[str]) -> list[float]:
        try:
            returned = judge(
                copy.deepcopy([*prompts]),
                [*first],
                [*second],
                [copy.deepcopy(row) for row in rows],
            )
            if isinstance(returned, Iterator):  # runs a generator's code in this `try`
                returned = list(returned)
        except SystemExit as stop:
            raise StopError(
                f"{called} called sys.exit({stop.code!r:.80}); return a probability, "
                f"or raise an error to stop the run"
            ) from stop
        except Exception as error:  # the user's code may raise anything
            raise InputError(
                f"{called} raised {type(error).__name__}: {error} for a batch of "
                f"{len(prompts)} pairs, the first with the prompt {prompts[0]!r:.80}; "
                f"mend it"
            ) from error
        return _probabilities(returned, count=len(prompts), called=called)

    if not prompts:
        return []
    policy_first = probabilities(responses, ref_responses)
    policy_second = [1 - p for p in probabilities(ref_responses, responses)]
    return list(map(Verdict, policy_first, policy_second))


def _probabilities(returned: Any, *, count: int, called: str) -> list[float]:
    numbers: list[float] = []
    got = f"{returned!r:.80}"
    with contextlib.suppress(TypeError, ValueError):
        numbers = [float(number) for number in returned]
        got = str(len(numbers))
    wrong = [place for place, p in enumerate(numbers) if not 0 <= p <= 1]  # or NaN
    if len(numbers) == count and wrong:
        got = f"{numbers[wrong[0]]} at index {wrong[0]}"
    if len(numbers) != count or wrong:
        raise InputError(
            f"expected {called} to return {count} probabilities, one for each pair, "
            f"that the first response is better, got {got}; return a list of {count} "
            f"numbers from 0 to 1"
        )
    return numbers
