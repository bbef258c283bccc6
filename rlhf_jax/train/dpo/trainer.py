"""`rlhf-jax dpo`, from its options to the summary."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rlhf_jax.algorithms import dpo, state
from rlhf_jax.algorithms.batch import PackedPreferences
from rlhf_jax.algorithms.dpo import DPO
from rlhf_jax.checkpoints import frozen_models, precomputed, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import digests, packing
from rlhf_jax.data.packing import PackedRow
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.functional import masked
from rlhf_jax.models.lora import init
from rlhf_jax.planning import profiled
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import plots, report, run
from rlhf_jax.runs.folder import write_summary
from rlhf_jax.train.dpo import pairs as pairs_of
from rlhf_jax.train.dpo.options import Config
from rlhf_jax.train.start import load_start, receipt_of

Array = jax.Array
Params = Any
# The reference's log-probs of a batch, None without a reference.
RefLogprobs = Callable[[PackedPreferences], Any]


def make_models(
    options: Config, start: Pretrained, *, mesh: Mesh
) -> tuple[Params, Frozen | None, Frozen | None]:
    """What is trained, the base that it adapts if it does, and the reference."""
    trained, base, reference = start.params, None, None
    if options.lora.lora is not None:
        base = options.reference_storage.freeze(
            start.params, place=options.placement.reference
        )
        key = jax.random.key(options.seed)
        trained = init(key, model=start.model, lora=options.lora.lora)
    if base is not None and options.reference is None:
        reference = base if options.dpo.has_reference else None
    elif options.dpo.has_reference:
        reference = frozen_models.load_reference(
            options.reference,
            policy=start,
            storage=options.reference_storage,
            place=options.placement.reference,
            mesh=mesh,
            sharding=functools.partial(sharding.shardings, mesh=mesh),
        )
    return trained, base, reference


def make_dpo(options: Config, start: Pretrained, *, num_steps: int) -> DPO:
    """What is fixed during the run."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, int(options.warmup * num_steps), num_steps
    )
    return DPO(
        **vars(options.dpo),
        model=start.model,
        optimizer=optax.chain(
            optax.clip_by_global_norm(options.max_grad_norm), optax.adam(schedule)
        ),
        lora=options.lora.lora,
    )


def live(reference: Frozen | None, *, algorithm: DPO, mesh: Mesh) -> RefLogprobs:
    """Computes them when a batch is due, on the reference's devices."""
    if reference is None:
        return lambda batch: None
    on_its_mesh = sharding.on(frozen.mesh_of(reference), dpo.reference_logprobs)
    compute = jax.jit(functools.partial(on_its_mesh, dpo=algorithm))

    def ref_logprobs(batch: PackedPreferences) -> Array:
        output = compute(reference, batch=frozen.beside(reference, batch))
        return row_sharding.put_rows(output, mesh=mesh)

    return ref_logprobs


def from_cache(
    folder: Path,
    rows: list[PackedRow],
    *,
    reference: Frozen,
    algorithm: DPO,
    batch_size: int,
    pad_id: int,
    progress: bool,
) -> RefLogprobs:
    """Computes them once for all rows and keeps them in a folder, or reads them."""
    if not rows:
        return lambda batch: None
    cache = precomputed.load_or_compute(
        folder,
        [row.tokens for row in rows],
        segments=[row.segments for row in rows],
        reference=reference,
        model=algorithm.model,
        batch_size=batch_size,
        pad_id=pad_id,
        temperature=algorithm.temperature,
        progress=progress,
    )
    return lambda batch: cache.padded(
        np.asarray(batch.index), width=batch.tokens.shape[1]
    )


def evaluate(
    trained: Params,
    held_out: list[PackedPreferences],
    *,
    measure: Callable[..., masked.Stats],
    ref_logprobs: RefLogprobs,
    base: Frozen | None,
) -> dict[str, float]:
    """Means over all pairs; nothing without any."""
    parts = [
        measure(trained, batch=batch, ref_logprobs=ref_logprobs(batch), base=base)
        for batch in held_out
    ]
    if not parts:
        return {}
    means = masked.mean_stats(functools.reduce(masked.add_stats, parts))
    return {name: float(mean) for name, mean in jax.device_get(means).items()}


def main(options: Config) -> None:
    """Runs `rlhf-jax dpo` with its options."""
    started = time.perf_counter()
    mesh = options.placement.policy_mesh()
    receipts = Receipts()
    called = "texts" if options.dpo.kind == "kto" else "pairs"
    data = receipts.source("--data", options.data, called=called)
    read = pairs_of.read(options, receipt=data)
    start = load_start(options.model, options=options, mesh=mesh)
    pairs, others = pairs_of.encode(read, options=options, start=start, receipt=data)
    processes.agree("the pairs", digests.of_tokens([*pairs.digested, *others.digested]))
    rows, other_rows = pairs.rows, others.rows
    shape = {"batch_size": options.batch_size, "pad_id": start.pad_id}
    preferences = packing.packed_batches(
        rows,
        seed=options.seed,
        share=row_sharding.row_share(mesh),
        labels=pairs.labels,
        **shape,
    ).map(lambda batch: row_sharding.put_rows(batch, mesh=mesh))
    held_out = packing.packed_in_order(other_rows, labels=others.labels, **shape)
    num_steps = options.num_steps
    if num_steps is None:
        num_steps = preferences.steps_per_epoch
    algorithm = make_dpo(options, start, num_steps=num_steps)
    trained, base, reference = make_models(options, start, mesh=mesh)
    update, measure = sharding.on(mesh, dpo.update), sharding.on(mesh, dpo.measure)
    update = jax.jit(
        functools.partial(update, dpo=algorithm), donate_argnames=("state",)
    )
    measure = jax.jit(functools.partial(measure, dpo=algorithm))
    # All of it is on the mesh, as a frozen model's output is, or `jit` would compile
    # twice.
    initial = state.supervised_state(trained, optimizer=algorithm.optimizer)
    initial = sharding.place(initial, mesh=mesh)
    start = start._replace(params=None)  # with LoRA the base is a copy: the only one
    # What does not fit is told here, before there is a run folder.
    first = preferences[0]
    zeros = None if reference is None else np.zeros(first.tokens.shape, np.float32)
    jax.eval_shape(update, initial, batch=first, ref_logprobs=zeros, base=base)

    meta: dict[str, Any] = {
        "data_digest": digests.of_tokens(pairs.digested),
        **start.meta,
    }
    if reference is not None:
        meta["reference"] = frozen.fingerprint_of(reference).root
    told = receipt_of(receipts, start=start)
    with run.Run(options, num_steps={"dpo": num_steps}, data=told) as job:
        beside = {} if base is None else {"base": base}
        if reference is not None and reference is not base:
            beside["reference"] = reference
        report.model_table(
            [
                ("policy", initial.params, True),
                *((name, model.stored, False) for name, model in beside.items()),
            ]
        )
        report.engine(start.model, columns=first.tokens.shape[1], mesh=mesh)
        ref_logprobs = live(reference, algorithm=algorithm, mesh=mesh)
        held_out_ref_logprobs = ref_logprobs
        if options.precompute and reference is not None:
            ref_logprobs, held_out_ref_logprobs = (
                from_cache(
                    job.folder / "reference",
                    each,
                    reference=reference,
                    algorithm=algorithm,
                    progress=options.progress,
                    **shape,
                )
                for each in (rows, other_rows)
            )
            beside.pop("reference", None)
        ref_model = None
        if reference is not None and not options.precompute:
            ref_model = frozen.shape_of(reference, policy=start.model)
        reference = None  # its functions keep it, if it is still needed
        held_out_means = functools.partial(
            evaluate,
            held_out=held_out,
            measure=measure,
            ref_logprobs=held_out_ref_logprobs,
            base=base,
        )
        before = held_out_means(initial.params)
        with job.stage("dpo", initial, meta=meta, beside=beside) as stage:
            del initial, trained  # a resumed run has its own
            for step in stage.steps():
                batch = preferences[step]
                stage.state, stats = update(
                    stage.state,
                    batch=batch,
                    ref_logprobs=ref_logprobs(batch),
                    base=base,
                )
                texts = [(batch.segments, batch.response_mask)]
                stage.end_step(step, stats, texts=texts)
    trained, lora = stage.state.params, algorithm.lora
    pretrained.save(
        job.folder, trained, start=start, base=base, lora=lora, name=options.model
    )
    after = held_out_means(trained)
    report.table(
        f"{len(others.digested)} held-out {pairs.called}",
        ("", "before", "after"),
        [(name, before[name], after[name]) for name in after],
    )
    plots.draw(job.folder)
    summary: dict[str, Any] = {
        pairs.called: len(pairs.digested),
        "rows": len(rows),
        f"held_out_{pairs.called}": len(others.digested),
        "held_out_before": before,
        "held_out": after,
        "reference_fingerprint": meta.get("reference"),
        "seconds": time.perf_counter() - started,
    }
    summary |= profiled.summary(
        job.folder,
        profile=options.profile,
        flops=functools.partial(
            profiled.supervised_flops,
            model=start.model,
            head=True,
            adapters=None if lora is None else trained,
            reference=ref_model,
        ),
    )
    write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the policy is in {job.folder / 'model'}")
