"""What a sampler is: it is handed parameters, and draws responses to prompts.

    sampler.hand_over(params, version=3)
    drawn = sampler.draw(prompts, key=key, version=3)
    rollout = protocol.rollout_of(prompts, drawn, version=3)

Prompts and responses are on the host: a sampler may be another process, or another
program. It keeps the parameters of one version, the last that was handed over. A draw
is a function of the prompts, the key and the weights, so that asking again after a
`TransientError` is safe and gives the same responses (`Retries`).
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
SECONDS = 1.0  # before the second try
MOST_SECONDS = 60.0


class Drawn(NamedTuple):
    """Responses of a sampler, in NumPy arrays; row b answers row b of the prompts.

    column     0    1    2    3      R = 4
    tokens    sat  down EOS   ·      lengths 3
    """

    tokens: Any  # i32[B, R], a stop token included where one ended the response
    # f32[B, R], nats, of the distribution that each token was drawn from; 0 behind
    sampler_logprobs: Any
    lengths: Any  # i32[B], 1 to R
    entropy: Any = None  # f32[B, R], nats, 0 behind; None where a sampler has none


class Sampler(Protocol):
    """Draws responses with parameters that were handed over before."""

    def hand_over(self, params: Params, *, version: int) -> float:
        """Has the next draws made with these parameters, and checks that they are.

        Args:
          params: of the policy, on its devices or the host.
          version: of the policy, iterations done.

        Returns:
          How far the sampler's log-probs are from the trainer's, nats per token: the
          largest mean distance of a response of the check; 0 where the parameters
          themselves were compared.

        Raises:
          StopError: the sampler did not take them.
          SelfCheckError: it draws with others.
        """
        ...

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """A response to every prompt.

        Args:
          prompts: Prompts[B, P], on the host.
          key: of the step; a row's draws are seeded with it, with `prompts.index` and
            with `prompts.sample`.
          version: that was handed over last.

        Raises:
          StopError: the sampler failed, or what it returned is no such response.
        """
        ...

    def close(self) -> None:
        """Ends what the sampler has started, and removes its files."""
        ...


def rollout_of(prompts: Prompts, drawn: Drawn, *, version: int | None) -> Rollout:
    """Prompts and responses as the record of an iteration, in NumPy arrays.

    The sampler's log-probs are `old_logprobs`: a ratio to them corrects for a sampler
    that is not quite the trainer, or the importance weights of a `sampler_correction`
    do. Without an entropy of the sampler's, that of a token is estimated by -log μ of
    the token that was drawn, whose expectation it is.

    Args:
      prompts: Prompts[B, P], on the host.
      drawn: of R columns.
      version: of the policy that drew; None stamps no token.

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
    """Tries calls again after a `TransientError`; counts how often."""

    def __init__(self, tries: int = TRIES) -> None:
        """At most `tries` of a call, the first included."""
        checks.positive(tries=tries)
        self.tries, self.count = tries, 0

    def __call__(
        self,
        call: Callable[[], Result],
        *,
        after: type[TransientError] = TransientError,
    ) -> Result:
        """What `call` returns, by the last try at the latest.

        Args:
          after: failures that it is tried again after.

        Raises:
          StopError: all tries failed. Whatever else `call` raises, at once.
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
