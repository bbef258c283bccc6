"""A reward model: one score per response, from the last token of a decoder."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.lora import init as init_adapters
from rlhf_jax.models.packing import Packing, SizedPacking, at_size, texts_of
from rlhf_jax.roles.critic import values_of_hidden
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params
from rlhf_jax.roles.rewards.transcripts import Responses

Array = jax.Array
Params = Any


def init(key: Array, trunk: Params, *, model: ModelConfig) -> Params:
    """Reward-model parameters: a copy of a decoder's trunk and a new head.

    Args:
      trunk: the decoder's parameters, usually after SFT; its head is not read.
    """
    trained = {name: trunk[name] for name in ("embed", "layers", "final_norm")}
    return {
        "trunk": storage.store(trained),
        "score": decoder.init_score(key, model=model),
    }


def from_base(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """Reward-model parameters over a base: adapters, with B = 0, and a new head.

    Returns:
      {"trunk": adapters, "score": ...}, to be run with the base (`adapted_params`).
    """
    trunk_key, score_key = jax.random.split(key)
    return {
        "trunk": init_adapters(trunk_key, model=model, lora=lora),
        "score": decoder.init_score(score_key, model=model),
    }


def sequence_scores(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    packing: Packing | None = None,
) -> Array:
    """score(x, y) = head(hidden state of the last token that is not padding).

    Args:
      packing: of these rows with one more column, so that the state after the last
        token is read too (`Form.ends`); None runs on padded rows.

    Returns:
      f32[B], reward units.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4.
    """
    # i32[B], searched from the right: responses end at different columns.
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    if packing is not None:
        wider, known = (jnp.pad(x, ((0, 0), (0, 1))) for x in (tokens, mask))
        texts = texts_of(wider, known, first_column=1, packing=packing)
        hidden = texts.hidden_states(params["trunk"], model=model)
        after = texts.padded(values_of_hidden(params["score"], hidden, mask=texts.mask))
        return jnp.take_along_axis(after, last[:, None] + 1, axis=1)[:, 0]
    hidden = decoder.hidden_states(
        params["trunk"], model=model, tokens=tokens, mask=mask
    )
    if axes.cut_of(tokens.shape[0]) is not None:  # devices share the columns of a row
        of_all = axes.per_token(
            functools.partial(decoder.scores, params["score"]), hidden
        )
        return jnp.take_along_axis(of_all, last[:, None], axis=1)[:, 0]
    # [B, D]: the head reads one state per row, not all S.
    final = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return decoder.scores(params["score"], final)


def from_model(
    reference: Frozen,
    *,
    model: ModelConfig,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> jax.tree_util.Partial:
    """A frozen reward model as `reward(rollout)`: a callable that is a pytree.

    Pass it to `jit` as an argument, so that its parameters are arguments too. With a
    second argument, a `SizedPacking`, it runs on packed rows (`sequence_scores`).

    Args:
      reference: its frozen parameters, or adapters and score over `base`.
    """
    return jax.tree_util.Partial(_Scores(model, lora), reference, base)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """The call of a reward model; hashable, so that equal ones share one program."""

    model: ModelConfig
    lora: LoRA | None

    @jax.named_scope("reward")
    def __call__(
        self,
        reference: Frozen,
        base: Frozen | None,
        rollout: Responses,
        packing: SizedPacking | None = None,
    ) -> Array:
        params = adapted_params(frozen.read(reference), base=base, lora=self.lora)

        def compute(packing: Packing | None) -> Array:
            return sequence_scores(
                params,
                model=self.model,
                tokens=rollout.tokens,
                mask=rollout.mask,
                packing=packing,
            )

        return at_size(packing, compute)
