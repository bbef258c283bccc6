"""`rlhf-jax evaluate`, from its options to the results."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import jax

from rlhf_jax.checkpoints import frozen_models, hf, pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.data import digests
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.devices import processes, program_cache, sharding
from rlhf_jax.evaluation import comparison
from rlhf_jax.evaluation.comparison import PairFunction
from rlhf_jax.evaluation.figures import Response
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.runs import command_line, folder, lock, metrics, report, run
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.report import Role
from rlhf_jax.train.evaluate import responses, results
from rlhf_jax.train.evaluate.episodes import Played
from rlhf_jax.train.evaluate.options import Config
from rlhf_jax.train.evaluate.programs import Programs
from rlhf_jax.train.evaluate.responses import Evaluation, Model
from rlhf_jax.train.reading import load_start, receipt_of
from rlhf_jax.train.rewards import RewardList, RewardPools
from rlhf_jax.train.rollouts.environment import OpenedEnvironment
from rlhf_jax.train.rows import read_rows

STAGE = "evaluate"


def main(options: Config) -> None:
    """Runs `rlhf-jax evaluate` with its options."""
    with contextlib.ExitStack() as stack:
        run_evaluation(options, stack=stack)


def run_evaluation(options: Config, *, stack: contextlib.ExitStack) -> None:
    """Evaluates, from the options to the results."""
    started, compiled = time.perf_counter(), program_cache.compiled_so_far()
    mesh = options.placement.policy_mesh()
    pools = RewardPools(options, mesh=mesh, stack=stack)
    judge: PairFunction | None = None
    if options.judge is not None:
        judge = command_line.load_function(
            options.judge, called="--judge", takes=comparison.TAKES
        )
    reader = pretrained.described(
        options.start.model, tokenizer=options.start.tokenizer
    )
    receipts = Receipts()
    data = receipts.source("--prompts", options.data.prompts)
    opened = played = None
    if options.environment is not None:
        opened = OpenedEnvironment(
            options.environment,
            pool=options.workers,
            chat=options.data.chat,
            max_new_tokens=options.max_new_tokens,
            start=reader,
            mesh=mesh,
            stack=stack,
        )
    read = read_rows(
        options.data.prompts,
        opened=opened,
        options=options.data,
        start=reader,
        limits=options.limits(reader),
        pools=pools,
        judge=options.judge,
        receipt=data,
    )
    if opened is not None:
        played = Played(options, opened=opened, begun=read, start=reader, mesh=mesh)
    data.use("evaluated", items.of_prompts(read.prompts))
    dropped = len(read.rows) - len(read.tokens)
    if dropped:
        print(
            f"{dropped} of {len(read.rows)} prompts leave no room for a response and "
            f"are dropped (--overlong drop)"
        )
    texts = None
    if options.texts is not None:
        texts = pretrained.read_texts(
            reader,
            options.texts,
            batch_size=min(options.batch_size, options.num_texts),
            max_rows=options.num_texts,
            max_length=options.text_max_length,
            receipt=receipts.source("--texts", options.texts),
        )
    if options.reference is not None:
        frozen_models.check_reference(options.reference, policy=reader)
    if options.reward_model is not None:
        hf.model_config(options.reward_model)
    start = load_start(options.start, mesh=mesh, start=reader)
    loader, copy = Loader(start, mesh), frozen_models.COPY
    models: dict[Model, Frozen] = {"policy": loader.reference(None, storage=copy)}
    start = start._replace(params=None)  # the frozen copy suffices
    loader = loader._replace(policy=start)
    if options.reference is not None:
        models["reference"] = loader.reference(options.reference, storage=copy)
    reward_model = None
    if options.reward_model is not None:
        reward_model = loader.reward_model(options.reward_model, storage=copy)
    programs = Programs(options, start=start, mesh=mesh)
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    verifier = pools.verifiers.get("verifier")
    evaluation = Evaluation(
        options=options,
        programs=programs,
        start=start,
        models=models,
        keys={
            name: jax.random.fold_in(key, number) for number, name in enumerate(models)
        },
        read=read,
        rewards=RewardList(
            pools,
            models=[] if reward_model is None else [reward_model],
            pack=None,
            policy=start,
            rows=read.rows,
            prompts=read.written_prompts,
        ),
        verifier=verifier,
        played=played,
        judge=judge,
    )
    meta = {
        "data_digest": digests.of_tokens(read.prompts),
        "rows_digest": digests.of_values(read.rows),
        **start.meta,
    }
    beside: dict[str, Frozen] = {**models}
    shapes = {
        name: frozen.shape_of(model, policy=start.model)
        for name, model in models.items()
    }
    if reward_model is not None:
        beside["reward_model"] = reward_model.frozen
        shapes["reward_model"] = reward_model.model
    with (
        contextlib.ExitStack() as unscored,
        run.Run(
            options,
            num_steps={STAGE: evaluation.num_steps},
            stop_timeout=options.stop_timeout,
            data=receipt_of(receipts, start=start),
        ) as job,
        job.stage(STAGE, {"root_key": key}, meta=meta, beside=beside) as stage,
    ):
        if not options.resume and options.resume_from is None:
            # A reward or judge that fails at once leaves no run folder.
            unscored.callback(empty, job.folder)
        report.model_table(
            [Role(name, one.stored, shapes[name]) for name, one in beside.items()]
        )
        for step in stage.steps():
            batch = evaluation.batch(step, guard=stage.user_code)
            if step == 0:
                if all(response.failed for response in batch):
                    raise StopError(
                        f"{options.score_called}: expected a score for some "
                        f"response of the first batch, got none for {len(batch)} "
                        f"of {len(batch)} (the warning above says why); mend it"
                    )
                unscored.pop_all()
            rows_of_batch = [dataclasses.asdict(response) for response in batch]
            stage.end_step(step, responses.stats(batch), rows_of_batch)
    run_files.require(
        job.folder,
        only=("samples.jsonl",),
        instead="evaluate again with another --out",
    )
    evaluated = [
        Response.from_json(row)
        for row in metrics.read(job.folder / "samples.jsonl")
        if row["stage"] == STAGE
    ]
    expected = len(models) * len(read.tokens) * (options.num_samples + 1)
    if len(evaluated) != expected:
        raise InputError(
            f"{job.folder / 'samples.jsonl'}: expected {expected} rows, one for each "
            f"response, got {len(evaluated)}; evaluate again with another --out"
        )
    collected = results.collected(
        evaluated,
        options=options,
        answers=isinstance(verifier, verifiers.Answering),
    )
    collected["dropped"] = dropped
    if texts is not None:
        losses = {
            f"{name}_loss": programs.text_loss(model, texts)
            for name, model in models.items()
        }
        if "reference" in models:
            losses["forgetting"] = losses["policy_loss"] - losses["reference_loss"]
        collected["texts"] = losses
    frozen.verify_all(beside, fetch=processes.whole)
    folder.write_json(job.folder / "results.json", collected)
    results.tell(collected)
    profile: dict[str, Any] = {}
    if options.profile is not None:
        from rlhf_jax.planning import profiled  # of few runs

        profile = profiled.summary(job.folder, profile=options.profile, flops=None)
    seconds = job.seconds_before + time.perf_counter() - started
    folder.write_summary(
        job.folder,
        collected
        | {
            "frozen_verified": True,
            "compiled": program_cache.compiled_since(compiled),
            "missed_on_disk": program_cache.missed_since(compiled),
            "seconds": seconds,
        }
        | profile,
    )
    written = mirror.written(job.folder / "results.json")
    print(f"{seconds:.0f} s; results are in {written}")


def empty(run: Path) -> None:
    """Empties the folder of a run that has no results yet."""
    for path in run.iterdir() if processes.is_first() else ():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != lock.NAME:  # this process holds it
            path.unlink()
