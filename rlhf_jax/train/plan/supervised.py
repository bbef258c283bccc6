"""An update of SFT, reward model or DPO as shapes, with the models of `build`.

    sft            learning
    reward-model   learning
    dpo            the reference ─> learning

Rows are padded to one width. A row of DPO holds one pair, both texts end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.algorithms import dpo
from rlhf_jax.algorithms.batch import PackedPreferences, Preferences, Sequences
from rlhf_jax.algorithms.state import SupervisedState
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.planning import model_flops
from rlhf_jax.planning.workload import Program, Workload
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.supervised import build, reward_model, sft
from rlhf_jax.train.supervised import dpo as dpo_command
from rlhf_jax.train.supervised.task import Task

PAIRS = ("reward-model", "dpo")  # commands whose rows are pairs of texts
TASKS: dict[str, type[Task[Any]]] = {
    "sft": sft.SFT,
    "reward-model": reward_model.RewardModel,
    "dpo": dpo_command.Learner,
}


def workload_of(
    config: SupervisedConfig,
    start: Pretrained,
    *,
    mesh: Mesh,
    columns: int,
    texts: Sequence[Text],
) -> Workload:
    """Returns the workload of one update.

    Args:
      columns: of a text, tokens.
    """
    task = TASKS[config.name](config)
    model, optimizer = start.model, config.optimizer.make(config.num_steps or 1)
    initial, models = build.shapes_of(task, start, mesh=mesh)
    update = task.update(model=model, optimizer=optimizer)
    batch = _batch(config.name, config.batch.batch_size, columns)
    resident = build.parts(task, initial, models, mesh=mesh)
    parts = {part.name: part.shapes for part in resident}
    of_step, ref = [], None
    if models.reference is not None:
        is_base = "reference" not in parts
        ref = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32)
        of_step.append(_reference(task, models.reference, batch, texts, is_base))

    def learn(state: SupervisedState, base: Frozen | None, batch: Any, ref: Any) -> Any:
        inputs = {} if ref is None else {"ref_logprobs": ref}
        return update(state, batch=batch, base=base, **inputs)

    adapters = None
    if config.start.lora is not None:
        adapters = sum(leaf.size for leaf in jax.tree.leaves(initial.params))
    learning = Program(
        name="learning",
        function=learn,
        args=(initial, models.base, batch, ref),
        reads=tuple(name for name in parts if name != "reference"),
        batch=(2, 3),
        stage="update",
        model_flops=model_flops.training(
            model, texts, head=task.role == "policy", adapters=adapters
        ),
        donate=(0,),
    )
    programs = [*of_step, learning]
    return Workload(model, parts, programs, tokens=sum(map(sum, texts)), within={})


def _reference(
    task: Any, reference: Frozen, batch: Any, texts: Sequence[Text], is_base: bool
) -> Program:
    def logprobs(reference: Frozen, batch: PackedPreferences) -> Any:
        return dpo.reference_logprobs(reference, batch=batch, dpo=task.algorithm)

    shape = frozen.shape_of(reference, policy=task.algorithm.model)
    return Program(
        name="the reference",
        function=logprobs,
        args=(reference, batch),
        reads=("base",) if is_base else ("reference",),
        batch=(1,),
        stage="score",
        model_flops=model_flops.forward(shape, texts, head=True),
    )


def _batch(name: str, rows: int, columns: int) -> Any:
    """Returns the shapes of a batch of a command."""

    def sequences() -> Sequences:
        mask = jnp.zeros((rows, columns), bool)
        tokens = jnp.zeros((rows, columns), jnp.int32)
        return Sequences(tokens=tokens, mask=mask, response_mask=mask)

    def pairs() -> PackedPreferences:
        tokens = jnp.zeros((rows, 2 * columns), jnp.int32)
        return PackedPreferences(
            tokens=tokens,
            segments=tokens,
            response_mask=jnp.zeros((rows, 2 * columns), bool),
            pairs=jnp.zeros((rows, 1), bool),
            index=jnp.zeros(rows, jnp.int32),
        )

    def both() -> Preferences:
        return Preferences(chosen=sequences(), rejected=sequences())

    makers = {"sft": sequences, "reward-model": both, "dpo": pairs}
    return jax.eval_shape(makers[name])
