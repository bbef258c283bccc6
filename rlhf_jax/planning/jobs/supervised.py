"""SFT, the training of a reward model and DPO as shapes.

    sft            learning
    reward-model   learning
    dpo            the reference ─> learning

Each is the update that its trainer compiles, on rows padded to one width. A row of DPO
holds one pair, both texts end to end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms import dpo, reward_model, sft
from rlhf_jax.algorithms.batch import PackedPreferences, Preferences, Sequences
from rlhf_jax.algorithms.dpo import DPO
from rlhf_jax.algorithms.state import SupervisedState, supervised_state
from rlhf_jax.models import decoder
from rlhf_jax.models.lora import init
from rlhf_jax.planning import model_flops, run_shape
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.planning.run_shape import Options
from rlhf_jax.planning.workload import Program, Workload
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference.frozen import Frozen

PyTree = Any
BASE = "base of the adapters"
OPTIMIZER = optax.adamw(1e-5)


def sft_workload(options: Options, *, texts: Texts) -> Workload:
    """A step of `rlhf-jax sft`: one update on `batch_size` rows.

    Args:
      options: sizes, and how the base of adapters is stored.
      texts: the lengths of a batch.

    Raises:
      InputError: sizes that do not fit.
    """
    model, lora = run_shape.model_of(options), run_shape.lora(options)
    batch = jax.eval_shape(lambda: _sequences(options.batch_size, options.columns))

    def learn(state: SupervisedState, base: Frozen | None, batch: Sequences) -> Any:
        return sft.update(
            state,
            batch=batch,
            model=model,
            optimizer=OPTIMIZER,
            micro_batch_size=options.micro_batch_size,
            base=base,
            lora=lora,
        )

    return _supervised(options, learn, batch, texts=texts, role="policy", head=True)


def reward_model_workload(options: Options, *, texts: Texts) -> Workload:
    """A step of `rlhf-jax reward-model`: one update on `batch_size` pairs.

    Args:
      options: sizes, and how the base of adapters is stored.
      texts: the lengths of both texts of a batch's pairs.

    Raises:
      InputError: sizes that do not fit.
    """
    model, lora = run_shape.model_of(options), run_shape.lora(options)

    def pairs() -> Preferences:
        side = _sequences(options.batch_size, options.columns)
        return Preferences(chosen=side, rejected=side)

    def learn(state: SupervisedState, base: Frozen | None, batch: Preferences) -> Any:
        return reward_model.update(
            state,
            batch=batch,
            model=model,
            optimizer=OPTIMIZER,
            micro_batch_size=options.micro_batch_size,
            base=base,
            lora=lora,
        )

    batch = jax.eval_shape(pairs)
    return _supervised(
        options, learn, batch, texts=texts, role="reward model", head=False
    )


def dpo_workload(options: Options, *, texts: Texts) -> Workload:
    """A step of `rlhf-jax dpo`: one update on `batch_size` rows of a pair each.

    Args:
      options: sizes, and how reference and base are stored.
      texts: the lengths of both texts of a batch's pairs.

    Raises:
      InputError: sizes that do not fit, or a reference that cannot be stored so.
    """
    model = run_shape.model_of(options)
    algorithm = DPO(
        model=model,
        optimizer=OPTIMIZER,
        micro_batch_size=options.micro_batch_size,
        lora=run_shape.lora(options),
        reference_free=options.reference == "none",
    )
    batch = jax.eval_shape(lambda: _pairs(options.batch_size, 2 * options.columns))

    def ref_logprobs(reference: Frozen, batch: PackedPreferences) -> Any:
        return dpo.reference_logprobs(reference, batch=batch, dpo=algorithm)

    def learn(
        state: SupervisedState, base: Frozen | None, batch: PackedPreferences, ref: Any
    ) -> Any:
        # Where there is a reference, its log-probs are made by a program of their own.
        return dpo.update(
            state, batch=batch, dpo=algorithm, ref_logprobs=ref, base=base
        )

    ref = None
    if not algorithm.reference_free:
        ref = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32)
    work = _supervised(
        options, learn, batch, ref, texts=texts, role="policy", head=True
    )
    if ref is None:
        return work
    reference = work.parts.get(BASE)
    name, parts = BASE, work.parts
    if options.reference != "base":
        name = "reference"
        reference = jax.eval_shape(
            lambda: run_shape.freeze(_params(options), options.reference)
        )
        parts = {**parts, name: reference}
    scoring = Program(
        name="the reference",
        function=ref_logprobs,
        args=(reference, batch),
        reads=(name,),
        batch=(1,),
        stage="score",
        model_flops=model_flops.forward(model, texts, head=True),
    )
    return work._replace(parts=parts, programs=[scoring, *work.programs])


def _supervised(
    options: Options, learn: Any, *batch: PyTree, texts: Texts, role: str, head: bool
) -> Workload:
    """One update of a role, all that SFT and the training of a reward model are."""
    model = run_shape.model_of(options)
    make = functools.partial(_state, options=options, score=role == "reward model")
    state, base = jax.eval_shape(make)
    parts = {role: state.params, f"{role}'s optimizer": state.opt}
    if base is not None:
        parts = {BASE: base, **parts}
    flops = model_flops.training(
        model,
        texts,
        head=head,
        adapters=run_shape.adapter_count(options, state.params),
    )
    program = Program(
        name="learning",
        function=learn,
        args=(state, base, *batch),
        reads=tuple(parts),
        batch=tuple(range(2, 2 + len(batch))),
        stage="update",
        model_flops=flops,
        donate=(0,),
    )
    return Workload(model, parts, [program], tokens=texts.tokens, within={})


def _params(options: Options) -> PyTree:
    return decoder.init(jax.random.key(0), model=run_shape.model_of(options))


def _state(*, options: Options, score: bool) -> tuple[SupervisedState, Frozen | None]:
    """What is trained, and the base that it adapts; for `jax.eval_shape` alone."""
    model, lora = run_shape.model_of(options), run_shape.lora(options)
    key, params, base = jax.random.key(0), _params(options), None
    if lora is not None:
        base = run_shape.freeze(params, options.base)
        make = rewards.from_base if score else init
        params = make(key, model=model, lora=lora)
    elif score:
        params = rewards.init(key, params, model=model)
    return supervised_state(params, optimizer=OPTIMIZER), base


def _sequences(rows: int, columns: int) -> Sequences:
    mask = jnp.zeros((rows, columns), bool)
    return Sequences(
        tokens=jnp.zeros((rows, columns), jnp.int32), mask=mask, response_mask=mask
    )


def _pairs(rows: int, columns: int) -> PackedPreferences:
    tokens = jnp.zeros((rows, columns), jnp.int32)
    return PackedPreferences(
        tokens=tokens,
        segments=tokens,
        response_mask=jnp.zeros((rows, columns), bool),
        pairs=jnp.zeros((rows, 1), bool),
        index=jnp.zeros(rows, jnp.int32),
    )
