"""Rewards: anything that maps a rollout to one score a response.

    reward(rollout) -> f32[B], reward units

A trained reward model, a JAX function of tokens and a Python function of decoded texts
all have this shape, so that swapping one for another is one line. The first two are
pytrees or plain functions and run inside `jit`; `TextReward` runs on the host between
two programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder, heads
from rlhf_jax.models import lora as lora_
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import adapted, frozen, storage
from rlhf_jax.roles.frozen import Frozen

Array = jax.Array
Params = Any
Row = Mapping[str, Any]  # one row of the user's data, every field of it
TextFunction = Callable[[list[str], list[str], list[Row]], Sequence[float]]


class Responses(Protocol):
    """What a reward reads of `batch.Rollout`."""

    @property
    def tokens(self) -> Array: ...  # i32[B, S]
    @property
    def mask(self) -> Array: ...  # bool[B, S], not padding
    @property
    def response_mask(self) -> Array: ...  # bool[B, S]
    @property
    def index(self) -> Array: ...  # i32[B], row of the data set


def init(key: Array, trunk: Params, *, model: ModelConfig) -> Params:
    """Reward-model parameters: a copy of a decoder's trunk under a fresh head.

    Args:
      key: key[], draws the head.
      trunk: the decoder's parameters, usually after SFT; a head is not read.

    Returns:
      {"trunk": ..., "score": {"kernel": [D], "bias": []}}, as in `critic.py`.
    """
    kept = {name: trunk[name] for name in ("embed", "layers", "final_norm")}
    return {
        "trunk": storage.store(kept),
        "score": heads.init_score(key, model=model),
    }


def from_base(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """Reward-model parameters over a base: adapters that change nothing, a fresh head.

    Args:
      key: key[], draws the adapters and the head.

    Returns:
      {"trunk": adapters, "score": ...}, to be run with its base (`adapted.params`).

    Raises:
      InputError: as `lora.targets`.
    """
    trunk_key, score_key = jax.random.split(key)
    return {
        "trunk": lora_.init(trunk_key, model=model, lora=lora),
        "score": heads.init_score(score_key, model=model),
    }


def sequence_scores(
    params: Params, *, model: ModelConfig, tokens: Array, mask: Array
) -> Array:
    """score(x, y) = head(hidden state of the last token that is not padding).

    Args:
      params: {"trunk": ..., "score": {"kernel": [D], "bias": []}}.
      tokens: i32[B, S], prompt and response, padded on either side.
      mask: bool[B, S], True at tokens.

    Returns:
      f32[B], reward units.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4.
    """
    hidden = decoder.hidden_states(
        params["trunk"], model=model, tokens=tokens, mask=mask
    )
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    final = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return heads.scores(params["score"], final)


def from_model(
    reference: Frozen,
    *,
    model: ModelConfig,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> jax.tree_util.Partial:
    """A frozen reward model as `reward(rollout)`: a callable that is a pytree.

    Pass it to `jit` as an argument; its parameters then are arguments too.

    Args:
      reference: of its parameters, or of adapters and score over `base`.
      base, lora: with adapters, else None (`adapted.params`).
    """
    return jax.tree_util.Partial(_Scores(model, lora), reference, base)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Hashable by its options, so that equal reward models share one program."""

    model: ModelConfig
    lora: LoRA | None

    def __call__(
        self, reference: Frozen, base: Frozen | None, rollout: Responses
    ) -> Array:
        return sequence_scores(
            adapted.params(frozen.read(reference), base=base, lora=self.lora),
            model=self.model,
            tokens=rollout.tokens,
            mask=rollout.mask,
        )


def normalise(
    params: Params, *, scores: Array, mean: float = 0.0, std: float | None = 1.0
) -> Params:
    """Folds gain and bias into the head so that `scores` get the mean and std given.

    Args:
      params: reward-model parameters.
      scores: f32[N], what this model says of samples of the reference (OAI), or of
        demonstrations, whose mean alone is moved (N+).
      mean: wanted, reward units.
      std: wanted, reward units; None keeps the spread and moves the bias alone.

    Returns:
      The parameters with another head; the trunk is shared, not copied.

    Raises:
      InputError: the scores are not finite, or do not vary, so that no gain can help.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.1; the bias alone is Huang
    et al. 2024, arXiv:2403.17031.
    """
    head = params["score"]
    if std is None:
        centre = float(scores.mean())
        if not math.isfinite(centre):
            raise InputError(
                f"expected finite scores to normalise by, got {scores.size} scores "
                f"with mean {centre}; is the reward model trained?"
            )
        return {**params, "score": {**head, "bias": head["bias"] + (mean - centre)}}
    spread = float(scores.std())
    if not 0 < spread < math.inf:
        raise InputError(
            f"expected scores that vary to normalise by, got {scores.size} scores with "
            f"standard deviation {spread}; is the reward model trained?"
        )
    gain = std / spread
    bias = mean - gain * scores.mean()
    score = {"kernel": gain * head["kernel"], "bias": gain * head["bias"] + bias}
    return {**params, "score": score}


@flax.struct.dataclass
class RunningMoments:
    """Mean and variance of every score seen so far. Part of every snapshot."""

    count: Array  # f32[], scores
    mean: Array  # f32[], reward units
    variance: Array  # f32[], reward units²


def no_moments() -> RunningMoments:
    """Nothing seen yet; a function, since a shared array would die by donation."""
    return RunningMoments(
        count=jnp.zeros((), jnp.float32),
        mean=jnp.zeros((), jnp.float32),
        variance=jnp.zeros((), jnp.float32),
    )


def update_moments(moments: RunningMoments, scores: Array) -> RunningMoments:
    """Moments of the scores seen before and of these together.

    Args:
      scores: f32[B], reward units; those that are not finite are left out, since a NaN
        would stay for the rest of the run.

    Source: Chan, Golub & LeVeque 1979, the pairwise update.
    """
    finite = jnp.isfinite(scores)
    size = finite.sum(dtype=jnp.float32)
    count = moments.count + size
    share = size / jnp.maximum(count, 1.0)
    mean = masked.masked_mean(scores, mask=finite)
    spread = masked.masked_var(scores, mask=finite)
    delta = mean - moments.mean
    return RunningMoments(
        count=count,
        mean=moments.mean + share * delta,
        variance=(1 - share) * (moments.variance + share * delta**2) + share * spread,
    )


@dataclasses.dataclass(frozen=True)
class TextReward:
    """A Python function of decoded texts and data rows, run on the host.

    Args:
      function: (prompts, responses, rows) -> one number a response; the three lists
        have one entry a response, and rows hold every field of the user's data.
      decode: token ids -> text; the tokenizer's, with special tokens left out.
      rows: the data set that `rollout.index` points into.
    """

    function: TextFunction
    decode: Callable[[list[int]], str]
    rows: Sequence[Row]

    def __call__(self, rollout: Responses) -> np.ndarray:
        """f32[B].

        Raises:
          InputError: the function raised, or returned anything but B finite numbers;
            names the prompt.
        """
        tokens, mask, response_mask, index = (
            np.asarray(array)
            for array in jax.device_get(
                (rollout.tokens, rollout.mask, rollout.response_mask, rollout.index)
            )
        )
        prompts = _decode_rows(self.decode, tokens, mask & ~response_mask)
        responses = _decode_rows(self.decode, tokens, response_mask)
        rows = [self.rows[i] for i in index]
        call = functools.partial(_call, self.function)
        try:
            returned = call(prompts, responses, rows)
            return _checked(returned, prompts=prompts, index=index)
        except _RewardFailed as failure:
            # One at a time, to find which prompt it was.
            for i, one in enumerate(zip(prompts, responses, rows, strict=True)):
                try:
                    call(*([item] for item in one))
                except _RewardFailed as single:
                    raise InputError(
                        f"the reward function raised {single} for prompt "
                        f"{_show(prompts[i], index[i])} and response {responses[i]!r}; "
                        f"mend it, or return a score for such a response"
                    ) from single.__cause__
            raise InputError(
                f"the reward function raised {failure} for a batch of {len(prompts)}, "
                f"though for none of its responses alone; mend it"
            ) from failure.__cause__


class _RewardFailed(Exception):
    pass


def _call(function: TextFunction, *lists: Any) -> Any:
    try:
        return function(*lists)
    except Exception as error:
        raise _RewardFailed(f"{type(error).__name__}: {error}") from error


def _checked(returned: Any, *, prompts: list[str], index: np.ndarray) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # too large is inf, which is named below
            scores = np.asarray(returned, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"expected the reward function to return {len(prompts)} numbers, got "
            f"{type(returned).__name__}: {error}"
        ) from error
    if scores.shape != (len(prompts),):
        raise InputError(
            f"expected the reward function to return {len(prompts)} numbers, one a "
            f"response, got shape {scores.shape}; return a list or a 1-D array"
        )
    if not np.isfinite(scores).all():
        bad = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise InputError(
            f"expected finite scores, got {scores[bad]} for prompt "
            f"{_show(prompts[bad], index[bad])}; return a number for every response"
        )
    return scores


def _decode_rows(
    decode: Callable[[list[int]], str], tokens: np.ndarray, mask: np.ndarray
) -> list[str]:
    return [decode(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]


def _show(prompt: str, index: Any) -> str:
    return f"{prompt!r} (row {int(index)} of the data)"
