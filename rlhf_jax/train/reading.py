"""Reads the checkpoint, prompts and texts of a command, before training begins."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, digests, tokenization
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.data.text import Question
from rlhf_jax.data.text.messages import Written
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.models import axes, layout
from rlhf_jax.models.lora import targets
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.models import Trained
from rlhf_jax.train.config.watch import WatchTexts
from rlhf_jax.train.rewards import RewardPools
from rlhf_jax.train.rows import ReadRows, Responder


def receipt_of(receipts: Receipts, *, start: Pretrained) -> dict[str, Any]:
    """Returns the receipt of a run's data, which it prints and keeps as data.json."""
    decode = functools.partial(tokenization.decode, start.tokenizer)
    (unprompted,) = start.contract().prompts([Question("")])
    return receipts.to_json(decode=decode, unprompted=unprompted)


def prompts_given(written_prompts: Iterable[Written]) -> dict[str, str]:
    """Snapshot metadata on whether a user's function is given prompts as messages."""
    of_texts = all(isinstance(prompt, str) for prompt in written_prompts)
    return {} if of_texts else {"prompts_given": "messages"}


def load_start(options: Any, *, mesh: Mesh, start: Pretrained) -> Pretrained:
    """Loads --model with its tokenizer, sharded over `mesh`.

    Args:
      options: of a model that is trained, `Trained`, or only run, `Compute`.
      start: --model without parameters.
    """
    path, sizes = options.model, dict(mesh.shape)
    context, experts = (
        sizes.get(axis, 1) for axis in (axes.CONTEXT_AXIS, axes.EXPERT_AXIS)
    )
    layout.refuse_context(options.attention, context=context, model=start.model)
    layout.refuse_expert_axis(experts, model=start.model)
    trained: Trained | None = options if isinstance(options, Trained) else None
    if trained is not None and trained.lora is not None:
        from rlhf_jax.checkpoints import peft  # few runs have adapters

        adapted = targets(model=start.model, lora=trained.lora)
        peft.check_names(adapted, model=start.model)
    start = pretrained.load(
        path,
        start=start,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    return start if trained is None else saved(start, trained.save_dtype)


def saved(start: Pretrained, save_dtype: SaveDtype | None) -> Pretrained:
    """Sets the dtype in which a model is saved; None changes nothing."""
    if save_dtype is None:
        return start
    hf.check_dtype(start.params, dtype=save_dtype)
    return start._replace(save_dtype=save_dtype)


class ReadData(NamedTuple):
    """The data of a run, as its loop takes it."""

    responder: Responder
    data: ReadRows
    held_out: ReadRows | None
    prompts: Batches[Any]
    ptx: Batches[Sequences] | None
    texts: Mapping[str, Sequences]
    meta: dict[str, Any]  # snapshot metadata: digests that a resume compares


def read_data(
    config: PolicyGradientConfig,
    models: Models,
    *,
    start: Pretrained,
    meshes: Meshes,
    pools: RewardPools,
    receipts: Receipts,
    stack: contextlib.ExitStack,
) -> ReadData:
    """Reads prompts, held-out prompts and texts, and records each in `receipts`.

    Args:
      models: from `build`, or as shapes from `shapes.of_run`.
      start: --model, with or without parameters.
    """
    contexts = [model.max_positions for model in models.reward_shapes]
    responder = Responder(
        config,
        start=start,
        meshes=meshes,
        context=min([start.model.max_positions, *contexts]),
        stack=stack,
    )
    receipt = receipts.source("--prompts", config.data.prompts)
    data = responder.read(config.data.prompts, pools=pools, receipt=receipt)
    receipt.use("training", items.of_prompts(data.prompts))
    held_out, watch = None, config.watch
    if watch.held_out is not None:
        other = receipts.source("--held-out", watch.held_out)
        held_out = responder.read(watch.held_out, pools=pools, receipt=other)
        count = watch.held_out_rows
        other.keep(count, reason=f"after the first {count} (--held-out-rows)")
        held_out = held_out.fitting(count)
        other.use("held out", items.of_prompts(held_out.prompts))
    of_held_out = [] if held_out is None else [held_out.rows, held_out.prompts]
    processes.agree(
        "the prompts", digests.of_values([data.rows, data.prompts, of_held_out])
    )
    mesh, share = meshes.policy, row_sharding.row_share(meshes.policy)
    put_rows = functools.partial(row_sharding.put_rows, mesh=mesh)
    prompts = batches.prompt_batches(
        data.prompts,
        batch_size=config.batch.batch_size,
        samples_per_prompt=models.recipe.rows_per_prompt,
        seed=config.seed,
        pad_id=start.pad_id,
        buckets=config.data.buckets,
        share=share,
    ).map(put_rows)
    texts = read_texts(watch, start, receipts=receipts)
    meta = {"data_digest": digests.of_tokens(data.prompts), **start.meta}
    if data.of_teacher is not None:
        meta["teacher_digest"] = digests.of_tokens(data.of_teacher)
    if pools.reads_rows or watch.judge is not None or config.sampler.environment:
        meta["rows_digest"] = digests.of_values(data.rows)  # user functions read rows
    if (
        pools.reads_prompts or watch.judge is not None
    ) and not config.sampler.environment:
        meta |= prompts_given(data.written_prompts)
    ptx = None
    if config.data.ptx is not None:
        mixed_in = receipts.source("--ptx", config.data.ptx)
        examples = pretrained.read_examples(
            start,
            config.data.ptx,
            max_length=config.data.ptx_max_length,
            receipt=mixed_in,
        )
        mixed_in.use("training", items.of_texts(examples))
        meta["ptx_digest"] = digests.of_tokens(examples)
        ptx = batches.sequence_batches(
            examples,
            batch_size=config.data.ptx_batch_size,
            seed=config.seed,
            pad_id=start.pad_id,
            share=share,
        ).map(put_rows)
    return ReadData(responder, data, held_out, prompts, ptx, texts, meta)


def read_texts(
    watch: WatchTexts, start: Pretrained, *, receipts: Receipts
) -> Mapping[str, Sequences]:
    """Reads the texts of --texts, by their names."""
    return {
        text.name: pretrained.read_texts(
            start,
            text.source,
            batch_size=min(8, watch.text_rows),
            max_rows=watch.text_rows,
            max_length=watch.text_max_length,
            receipt=receipts.source(f"--texts {text.name}", text.source),
        )
        for text in watch.texts
    }
