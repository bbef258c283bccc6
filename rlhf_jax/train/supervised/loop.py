"""The loop of SFT, reward model and DPO, from its config to the summary.

read      the data, before any weight is read
build     the trained parameters, the base under adapters, the reference
rehearse  one update as shapes, before there is a run folder
learn     one program: gradients, the optimizer
watch     held-out data, texts, drift
end       save, evaluate, summarise

Everything that differs between the commands is in their `Task`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.algorithms.state import SupervisedState
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import digests
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import moving, processes, row_sharding, sharding
from rlhf_jax.functional import masked
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference import drift, fingerprint, frozen
from rlhf_jax.runs import alarms, folder, metrics, plots, report, run
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.report import Role
from rlhf_jax.train.config.watch import WatchTexts
from rlhf_jax.train.reading import read_texts, receipt_of
from rlhf_jax.train.supervised.build import build, check_memory
from rlhf_jax.train.supervised.task import Session, Task

Params = Any


def main(task: Task[Any]) -> None:
    """Runs a task, from its config to the summary."""
    started = time.perf_counter()
    # The folder records the options as given: a resume is compared with them, and may
    # run on other devices.
    recorded = task.config
    if recorded.auto is not None:
        from rlhf_jax.train.plan import auto  # few runs ask for it
        from rlhf_jax.train.rollouts.fastest import Devices

        task, lines = auto.chosen_of_task(task, task.described, Devices.here())
        print(*lines, sep="\n")
    config, receipts = task.config, Receipts()
    mesh = config.placement.policy_mesh()
    rows = task.read(receipts)
    if config.check_memory:
        check_memory(task, mesh=mesh)
    # Errors in the user's files are found before a weight is read.
    data, texts = task.encode(rows, share=row_sharding.row_share(mesh)), {}
    put_rows = functools.partial(row_sharding.put_rows, mesh=mesh)
    data = data._replace(batches=data.batches.map(put_rows))
    if isinstance(config.watch, WatchTexts):
        texts = read_texts(config.watch, task.described, receipts=receipts)
    processes.agree(
        f"the {task.called}", digests.of_tokens([*data.trained_on, *data.held_out])
    )
    num_steps = config.num_steps
    if num_steps is None:
        num_steps = data.batches.steps_per_epoch
    optimizer = config.optimizer.make(num_steps)
    start = task.load(mesh)
    weights = {} if config.start.lora is not None else weights_of(start, task)
    initial, models = build(task, start, mesh=mesh, optimizer=optimizer)
    if not task.samples:
        start = start._replace(params=None)  # the first update takes them
    session, first = Session(start, mesh, models, data), data.batches[0]
    update = sharding.on(mesh, task.update(model=start.model, optimizer=optimizer))
    update = jax.jit(update, donate_argnums=0)
    # Shapes that do not fit together fail here, before there is a run folder.
    ahead = task.rehearse(session)
    jax.eval_shape(update, initial, batch=first, base=models.base, **ahead)
    limits = config.watch.alarms
    with run.Run(
        recorded,
        num_steps={config.stage: num_steps},
        check=functools.partial(
            alarms.check,
            limits=limits,
            from_start=config.reference.checkpoint is None,
        ),
        stops=limits.stops if limits.stop else None,
        data=receipt_of(receipts, start=start),
    ) as job:
        columns = task.texts(first)[0][1].shape[1]
        tell(task, session, initial, columns=columns)
        meta: dict[str, Any] = {
            "data_digest": digests.of_tokens(data.trained_on),
            **start.meta,
            **weights,
        }
        if models.reference is not None:
            meta["reference"] = frozen.fingerprint_of(
                models.reference, fetch=processes.whole
            ).root
        initial, models = task.prepare(initial, session=session, job=job)
        start = start._replace(params=None)
        session = session._replace(start=start, models=models)
        watcher = Watcher(task, session, texts=texts)
        base, before = models.base, means(task.evaluate(initial.params, models.base))
        beside = models.beside
        with job.stage(config.stage, initial, meta=meta, beside=beside) as stage:
            del initial  # the stage has the state, perhaps of a snapshot
            for step in stage.steps():
                batch = data.batches[step]
                watched = watcher.before(stage.state.params, step=step)
                stage.state, stats = update(
                    stage.state, batch=batch, base=base, **task.inputs(batch)
                )
                watched |= watcher.after(stage.state.params, step=step)
                stage.end_step(step, stats | watched, texts=task.texts(batch))
    trained = stage.state.params
    written, base = task.save(trained, session=session, to=job.folder)
    after = means(task.evaluate(written, base))
    measured = metrics.read(job.folder / "metrics.jsonl")
    summary = {"alarms": job.alarms} | task.summary(before, after, session=session)
    summary |= report.texts(metrics.first(measured), means(watcher.text_stats(trained)))
    if "reference" in meta:
        summary["reference_fingerprint"] = meta["reference"]
    plots.draw(job.folder)
    if config.profile is not None:
        from rlhf_jax.planning import profiled  # of few runs

        reference = models.reference
        flops = functools.partial(
            profiled.supervised_flops,
            model=start.model,
            head=task.role == "policy",
            adapters=None if config.start.lora is None else trained,
            reference=None
            if reference is None
            else frozen.shape_of(reference, policy=start.model),
        )
        summary |= profiled.summary(job.folder, profile=config.profile, flops=flops)
    summary["seconds"] = job.seconds_before + time.perf_counter() - started
    folder.write_summary(job.folder, summary)
    saved = mirror.written(job.folder / "model")
    print(f"{summary['seconds']:.0f} s; go on with {task.option} {saved}")


def weights_of(start: Pretrained, task: Task[Any]) -> dict[str, str]:
    """The fingerprint of a checkpoint that is trained, for the meta of snapshots.

    Figures before training, and the normalisation of a reward model, are computed from
    it again in a resume. A fresh model has none: other devices may draw other bits.
    """
    if task.config.start.model is None:
        return {}
    pairs = fingerprint.digests(start.params)
    named = fingerprint.named(start.params, pairs, fetch=processes.whole)
    return {"start_weights": named.root}


class Watcher:
    """Measures what a run watches but does not train on."""

    def __init__(
        self, task: Task[Any], session: Session, *, texts: Mapping[str, Sequences]
    ) -> None:
        """Compiles nothing yet; `texts` are {name: Sequences[M, b, S]}, of --texts."""
        self._task, self._texts = task, texts
        lora, watch = task.config.start.lora, task.config.watch
        self._policy = watch if isinstance(watch, WatchTexts) else None
        # The drift is from the reference, or from the base under adapters.
        self._base = session.models.base
        anchor = session.models.reference or self._base
        alike = anchor is not None and anchor.model is None  # of the policy's shape
        self._anchor = anchor if alike else None
        on_mesh = sharding.on(session.mesh, evaluation.text_stats)
        of_texts = functools.partial(on_mesh, model=session.start.model, lora=lora)
        self._text_stats = jax.jit(of_texts)
        self._moved = jax.jit(functools.partial(drift.of_policy, lora=lora))

    def text_stats(self, params: Params) -> Stats:
        """Returns `evaluation.text_stats` of --texts."""
        if not self._texts:
            return {}
        return self._text_stats(params, self._texts, base=self._base)

    def before(self, params: Params, *, step: int) -> Stats:
        """Returns statistics of the parameters before an update."""
        stats: Stats = {}
        watch, every = self._policy, self._task.config.watch.held_out_every
        if watch is not None and step % watch.eval_every == 0:
            stats |= self.text_stats(params)
        if every is not None and step % every == 0:
            held_out = self._task.evaluate(params, self._base)
            stats |= {
                f"held_out/{name.replace('/', '_')}": value
                for name, value in held_out.items()
            }
        return stats

    def after(self, params: Params, *, step: int) -> Stats:
        """Returns `drift/...` of the parameters after an update."""
        watch, anchor = self._policy, self._anchor
        if watch is None or anchor is None or step % watch.drift_every:
            return {}
        params = frozen.beside(anchor, params, put=moving.move)
        return drift.stats(self._moved(params, anchor, self._base))


def tell(
    task: Task[Any], session: Session, initial: SupervisedState, *, columns: int
) -> None:
    """Prints the models and the attention engine of a run."""
    policy, beside = session.start.model, session.models.beside
    roles = [Role(task.role, initial.params, policy, trained=True)]
    for name, model in beside.items():
        roles.append(Role(name, model.stored, frozen.shape_of(model, policy=policy)))
    report.model_table(roles)
    report.engine(session.start.model, columns=columns, mesh=session.mesh)


def means(stats: Stats) -> dict[str, float]:
    """Returns {name: mean}, on the host."""
    return {k: float(v) for k, v in processes.whole(masked.mean_stats(stats)).items()}
