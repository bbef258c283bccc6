"""`rlhf-jax grpo`, from its options to the summary."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import jax

from rlhf_jax.algorithms import state
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import frozen_models, further_references, pretrained
from rlhf_jax.data import batches, digests
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import compile_counts, processes, row_sharding, sharding
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.planning import profiled
from rlhf_jax.roles.reference import frozen
from rlhf_jax.runs import folder, metrics, plots, report, run
from rlhf_jax.train import rehearsal
from rlhf_jax.train.grpo.iterations import improve
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.grpo.programs import Programs, make_algorithm
from rlhf_jax.train.grpo.tasks import make_task
from rlhf_jax.train.grpo.verifier import require_some
from rlhf_jax.train.outside.sampler import OutsideSampler
from rlhf_jax.train.rollouts.options import refuse_processes
from rlhf_jax.train.rollouts.queue import RolloutQueue
from rlhf_jax.train.rollouts.waits import waited
from rlhf_jax.train.sampling.sampler import Sampler
from rlhf_jax.train.start import load_start, prompts_given, receipt_of

Array = jax.Array
Params = Any


def main(options: VerifiedConfig) -> None:
    """Runs `rlhf-jax grpo`, or another trainer of a recipe without a critic."""
    with contextlib.ExitStack() as stack:
        run_task(options, stack=stack)


def run_task(options: VerifiedConfig, *, stack: contextlib.ExitStack) -> None:
    """From the options to the summary.

    Args:
      stack: that ends the processes of verifiers and environments.
    """
    started, compiled = time.perf_counter(), compile_counts.so_far()
    refuse_processes(options.staleness)
    mesh = options.policy_mesh(options.placement)
    start = load_start(options.model, options=options, mesh=mesh)
    algorithm = make_algorithm(options, start=start)
    receipts = Receipts()
    task = make_task(
        options,
        start=start,
        algorithm=algorithm,
        mesh=mesh,
        stack=stack,
        receipts=receipts,
    )
    rows, tokens = task.rows, task.prompts
    processes.agree("the questions", digests.of_values([rows, tokens, task.held_out]))
    prompts = batches.prompt_batches(
        tokens,
        batch_size=options.batch_size,
        samples_per_prompt=algorithm.rows_per_prompt,
        seed=options.seed,
        pad_id=start.pad_id,
        share=row_sharding.row_share(mesh),
    ).map(lambda batch: row_sharding.put_rows(batch, mesh=mesh))
    on_mesh: dict[str, Any] = {
        "policy": start,
        "mesh": mesh,
        "sharding": functools.partial(sharding.shardings, mesh=mesh),
    }
    reference = None
    if options.reference != "none":
        reference = frozen_models.load_reference(
            None if options.reference == "start" else options.reference,
            storage=options.reference_storage,
            place=options.placement.reference,
            **on_mesh,
        )
    further = further_references.load(options.further, **on_mesh)
    train = state.grpo_state(
        policy=start.params,
        policy_optimizer=algorithm.policy_optimizer,
        kl=fixed(options.beta),
    )
    start = start._replace(params=None)  # the first update takes them
    # All of it, or `jit` would compile everything again after a step.
    train = sharding.place(train, mesh=mesh)
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    programs = Programs(
        algorithm, mesh=mesh, options=options, reference=reference, further=further
    )
    if isinstance(programs.sample, OutsideSampler):
        stack.enter_context(programs.sample)
    reward = task.reward
    first_key = jax.random.fold_in(key, 0)
    rollout, drawn_scores = task.draw(programs)(
        train.policy, prompts=prompts[0], key=first_key, version=train.step
    )

    def score(rollout: Rollout) -> dict[str, Any]:
        scored = programs.score(
            rollout,
            reference=reference,
            reward=reward,
            key=first_key,
            scores=drawn_scores,
        )
        require_some(scored["scores"], options=options)
        return scored

    rehearsal.rehearse(
        rollout,
        score=score,
        learn=functools.partial(programs.learn, train, key=first_key),
        measure=functools.partial(programs.measure, train.policy),
        dtype=options.dtype,
        sampler_tolerance=options.sampler_tolerance,
        storage_tolerance=options.reference_tolerance,
        expect_equal=options.reference == "start",
    )
    before = task.measure(train.policy, programs=programs)
    meta = {
        "data_digest": digests.of_tokens(tokens),
        "rows_digest": digests.of_rows(rows),  # with the answers
        **start.meta,
    }
    if options.environment is None and ":" in options.verifier:
        meta |= prompts_given(task.asked)
    kept = {"train": train, "reference": reference, "root_key": key}
    beside = {f"references/{name}": each for name, each in further.items()}
    ahead = None
    if options.staleness:
        assert isinstance(programs.sample, Sampler | OutsideSampler)  # as others refuse
        ahead = RolloutQueue(
            task.draw_ahead(programs),
            hand_over=programs.sample.hand_over,
            prompts=prompts.__getitem__,
            key=key,
            staleness=options.staleness,
            num_steps=options.num_steps,
            threaded=programs.sample.threaded,
            patience=options.stop_timeout,
        )
        kept |= ahead.first(train.policy, version=train.step)
    with (
        run.Run(
            options,
            num_steps={"grpo": options.num_steps},
            stop_timeout=options.stop_timeout,
            data=receipt_of(receipts, start=start),
        ) as job,
        job.stage("grpo", kept, meta=meta, beside=beside) as stage,
        contextlib.nullcontext() if ahead is None else ahead,
    ):
        report.model_table(
            [
                ("policy", train.policy, True),
                (
                    "reference",
                    None if reference is None else reference.stored,
                    False,
                ),
                *((name, each.stored, False) for name, each in beside.items()),
            ]
        )
        columns = prompts[0].tokens.shape[1] + options.max_new_tokens
        report.engine(start.model, columns=columns, mesh=mesh)
        trained = improve(
            stage,
            programs,
            prompts=prompts,
            task=task,
            decode=start.decode,
            ahead=ahead,
            options=options,
        )
    after = task.measure(trained, programs=programs)
    if reference is not None:
        frozen.verify(reference)
    frozen.verify_all(further)
    pretrained.save(
        job.folder, trained, start=start, base=None, lora=None, name=options.model
    )
    first, *_, last = metrics.read(job.folder / "metrics.jsonl") * 2
    summary: dict[str, Any] = {
        f"{task.measured}_before": before,
        f"{task.measured}_after": after,
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "kl_last": last.get("objective/kl"),
        "seconds": time.perf_counter() - started,
        "compiled": compile_counts.since(compiled),
    } | programs.pack.summary()
    references = [] if reference is None else [reference, *further.values()]
    summary |= profiled.summary(
        job.folder,
        profile=options.profile,
        flops=functools.partial(
            profiled.policy_gradient_flops,
            model=algorithm.model,
            num_epochs=algorithm.num_epochs,
            group_size=algorithm.rows_per_prompt,
            trained=options.trained_share,
            references=[
                frozen.shape_of(each, policy=algorithm.model) for each in references
            ],
        ),
    )
    if options.staleness:
        summary["waits"] = waited(job.folder)
    plots.draw(job.folder)
    folder.write_summary(job.folder, summary)
    name = task.measured.replace("_", " ")
    print(f"{name} {before:.3f} before, {after:.3f} after; {job.folder / 'model'}")
