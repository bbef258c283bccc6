"""The protocol of a sampler, which gets parameters and draws responses to prompts.

    sampler.hand_over(params, version=3)
    drawn = sampler.draw(prompts, key=key, version=3)
    rollout = protocol.rollout_of(prompts, drawn, version=3)

Prompts and responses are on the host, since a sampler may be another process or
program. A sampler keeps only the version of the parameters that was handed over last. A
draw is a function of the prompts, the key and the weights, so it can be repeated after
a `TransientError` with the same responses (`Retries`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.samplers import TRIES

Array = jax.Array
Params = Any
Result = TypeVar("Result")
SECONDS = 1.0  # pause before the second try
MOST_SECONDS = 60.0  # longest pause


class Drawn(NamedTuple):
    """Responses of a sampler, in NumPy arrays; row b answers row b of the prompts.

    column     0    1    2    3      R = 4
    tokens    sat  down EOS   ·      lengths 3
    """

    tokens: Any  # i32[B, R], including the stop token if one ended the response
    # f32[B, R], nats, under the distribution that drew each token; 0 after a response
    sampler_logprobs: Any
    lengths: Any  # i32[B], 1 to R
    entropy: Any = None  # f32[B, R], nats, 0 after the response; None if not reported
    # i32[B, P + R, L, k], of the prompts' tokens too, as in `Rollout`; None: no record
    experts: Any = None


class Sampler(Protocol):
    """Draws responses with parameters that were handed over before."""

    def hand_over(self, params: Params, *, version: int) -> float:
        """Sets the parameters of the next draws, and checks that the sampler uses them.

        Args:
          params: of the policy, on its devices or the host.
          version: of the policy: the number of iterations done.

        Returns:
          The distance of the sampler's log-probs from the trainer's, nats per token:
          the largest mean distance of a response; 0 if the parameters themselves were
          compared.

        Raises:
          StopError: the sampler did not take the parameters.
          SelfCheckError: the sampler draws with other parameters.
        """
        ...

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """Draws a response to every prompt.

        Args:
          prompts: Prompts[B, P], on the host.
          key: of the step; the draws of a row are seeded with it, `prompts.index` and
            `prompts.sample`.
          version: the version that was handed over last.

        Raises:
          StopError: the sampler failed or returned an invalid response.
        """
        ...

    def close(self) -> None:
        """Ends the sampler's processes and requests, and removes its files."""
        ...


def rollout_of(prompts: Prompts, drawn: Drawn, *, version: int | None) -> Rollout:
    """Joins prompts and responses into a rollout of NumPy arrays.

    The sampler's log-probs become `old_logprobs`, so probability ratios, or the
    importance weights of a `sampler_correction`, correct for differences between
    sampler and trainer. If the sampler reports no entropy, it is estimated by -log μ of
    the drawn token, whose expectation it is.

    Args:
      prompts: Prompts[B, P], on the host.
      drawn: responses of R columns.
      version: of the policy that drew; None records no version.

    Returns:
      Rollout[B, P + R].
    """
    rows, width = drawn.tokens.shape
    response = np.arange(width) < np.asarray(drawn.lengths)[:, None]
    entropy = drawn.entropy
    if entropy is None:
        entropy = -drawn.sampler_logprobs
    before = prompts.tokens.shape[1]

    def beside(prompt: Any, of_response: Any) -> Any:
        return np.concatenate([np.asarray(prompt), of_response], axis=1)

    def behind(of_response: Any) -> Any:
        of_rows = np.where(response, of_response, 0.0).astype(np.float32)
        return beside(np.zeros((rows, before), np.float32), of_rows)

    response_mask = beside(np.zeros((rows, before), bool), response)
    stamped = None
    if version is not None:
        stamped = np.where(response_mask, version, 0).astype(np.int32)
    arrays: dict[str, Any] = {
        "index": np.asarray(prompts.index),
        "sample": np.asarray(prompts.sample),
        "version": stamped,
        "experts": drawn.experts,
    }
    return Rollout(
        tokens=beside(prompts.tokens, drawn.tokens).astype(np.int32),
        mask=beside(prompts.mask, response),
        response_mask=response_mask,
        old_logprobs=behind(drawn.sampler_logprobs),
        entropy=behind(entropy),
        **arrays,
    )


class TransientError(StopError):
    """A failure after which the same call may succeed."""


class Retries:
    """Repeats calls after a `TransientError`, and counts the repetitions."""

    def __init__(self, tries: int = TRIES) -> None:
        """Allows at most `tries` attempts of a call, including the first."""
        checks.positive(tries=tries)
        self.tries, self.count = tries, 0

    def __call__(
        self,
        call: Callable[[], Result],
        *,
        after: type[TransientError] = TransientError,
    ) -> Result:
        """Returns the result of `call`, repeating it if necessary.

        Args:
          after: the failures after which `call` is repeated.

        Raises:
          StopError: all tries failed. Other errors of `call` are raised at once.
        """
        number, pause = 1, SECONDS
        while True:
            number += 1
            try:
                return call()
            except after as error:
                if number > self.tries:
                    why = f"{error} (tried {self.tries} times)"
                    raise StopError(why) from error
                print(
                    f"sampler: try {number} of {self.tries} in {pause:g} s, as the one "
                    f"before failed: {error}",
                    file=sys.stderr,
                )
            self.count += 1
            time.sleep(pause)
            pause = min(2 * pause, MOST_SECONDS)
