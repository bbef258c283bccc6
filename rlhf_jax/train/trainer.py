"""A run of any policy gradient, from its config to the summary.

read      prompts, texts, rewards: all of it before a weight is
build     every model, on its devices
rehearse  the first iteration up to its update, before there is a run folder
improve   the loop
end       verify what is frozen, save, evaluate, summarise
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow.score import ended
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import processes, program_cache, sharding
from rlhf_jax.devices.placement import AUTO, WITH_POLICY
from rlhf_jax.planning import chips, memory_check
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.runs import alarms, command_line, folder, report, run
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes, Models, build
from rlhf_jax.train.conclusion import conclude, verify
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.loop import TOTAL, Begun, Loop, improve
from rlhf_jax.train.programs import LearnInputs, Programs
from rlhf_jax.train.reading import load_start, read_data, receipt_of
from rlhf_jax.train.rewards import RewardList, RewardPools, require_some
from rlhf_jax.train.sampler import Sampler, make_sampler
from rlhf_jax.train.watch.watcher import Judge, Watcher

if TYPE_CHECKING:
    from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
    from rlhf_jax.train.rollouts.queue import RolloutQueue

Array = jax.Array


def main(config: PolicyGradientConfig) -> None:
    """Runs a command with its config."""
    with contextlib.ExitStack() as stack:
        train(config, stack=stack)


def train(config: PolicyGradientConfig, *, stack: contextlib.ExitStack) -> None:
    """From the config to the summary."""
    started, compiled = time.perf_counter(), program_cache.compiled_so_far()
    # A resume, which may be on other devices, is compared with what was asked for.
    recorded = config
    if config.auto is not None:
        config = _chosen(config)
    # First of all: a mesh that does not fit the devices costs no minute of loading.
    meshes, receipts = Meshes.of(config), Receipts()
    mesh = meshes.policy
    pools = RewardPools(config, mesh=mesh, stack=stack)
    judging = None
    if config.watch.judge is not None:
        judging = command_line.load_function(
            config.watch.judge, called="--judge", takes=TextReward.TAKES
        )
    if config.reads_hidden_states and config.reference.checkpoint is not None:
        frozen_models.check_teacher(
            config.reference.checkpoint,
            student=config.start.model,
            tokenizer=config.start.tokenizer,
        )
    # Shapes and tokenizer, no weights: the memory check needs no more.
    start = pretrained.described(config.start.model, tokenizer=config.start.tokenizer)
    planned = shapes.of_run(config, meshes=meshes, start=start)
    chip = chips.of_device(mesh.devices.flat[0])
    if config.placement.sampler == AUTO:
        if chip is None or mesh.size == 1:  # there is nothing to choose from
            config = config.sampled_at(WITH_POLICY)
        else:
            from rlhf_jax.train.rollouts import fastest

            config, layout = fastest.placed(
                config,
                planned,
                mesh=mesh,
                chip=chip,
                prompt=0,  # none is read yet; `fastest.ROOM` has theirs
                per_node=chips.per_node(chip),
                memory=memory_check.limit(jax.local_devices()[0]),
            )
            if layout is not None:
                print(layout)
                meshes = Meshes.of(config)
    if config.check_memory:
        shapes.check(config, planned, meshes=meshes)
    # What a user may have got wrong is refused before a weight is read.
    read = read_data(
        config,
        planned,
        start=start,
        meshes=meshes,
        pools=pools,
        receipts=receipts,
        stack=stack,
    )
    start = load_start(
        config.start.model,
        start=start,
        options=config.start,
        save_dtype=config.start.save_dtype,
        lora=config.start.lora,
        mesh=mesh,
    )
    models = build(config, start, meshes=meshes)
    start = start._replace(params=None)  # the first update takes them
    programs = Programs(models, meshes=meshes, config=config)
    rewards = functools.partial(
        RewardList,
        pools,
        models=models.reward_models,
        pack=programs.pack_ends,
        policy=start,
    )
    judge = None
    if judging is not None:
        judge = Judge(
            TextReward(
                function=judging,
                decode=start.decode,
                rows=read.data.rows,
                called=f"--judge {config.watch.judge}",
                prompts=read.data.written_prompts,
            ),
            mesh=mesh,
            may_fail=config.watch.judge_failure == "warn",
        )
    episodes = functools.partial(
        read.responder.episodes, recipe=models.recipe, base=models.base
    )
    held_out = None
    if read.held_out is not None:
        from rlhf_jax.train.watch.held_out import HeldOut

        held_out = HeldOut(
            config,
            read.held_out,
            rewards=rewards,
            episodes=episodes,
            start=start,
            mesh=mesh,
        )
    key = sharding.place(jax.random.key(config.seed), mesh=mesh)
    loop = Loop(
        config=config,
        programs=programs,
        sampler=make_sampler(config, models, meshes=meshes),
        episodes=episodes(read.data, rows=config.batch.batch_size),
        rewards=rewards(rows=read.data.rows, prompts=read.data.written_prompts),
        prompts=read.prompts,
        ptx=read.ptx,
        watcher=Watcher(
            config.watch,
            programs=programs,
            texts=read.texts,
            judge=judge,
            held_out=held_out,
            policy=start,
            prompts=read.data.written_prompts,
            of_reference=episodes(read.data, rows=config.batch.batch_size)
            if config.watch.sample_reference
            else None,
        ),
        root_key=key,
        begun={},
        of_teacher=read.data.teacher_prompts(pad_id=start.pad_id),
        reprompt=_reprompt(config, read.data.rows, start=start),
    )
    if not isinstance(loop.sampler, Sampler):
        stack.enter_context(loop.sampler)
    # Before there is a run folder: a reward that fails, or what does not fit, leaves
    # none behind.
    rehearse(loop, models, judge=judge)
    summary: dict[str, Any] = {}
    if held_out is not None:
        # Of the policy as it starts: what the figures at the end are compared with.
        policy, reference = models.train.policy, models.reference
        summary |= held_out.summary("before", policy, programs, reference)
    limits = config.watch.alarms.allowing(staleness=config.staleness)
    check = functools.partial(
        alarms.check, limits=limits, kl_target=config.kl.kl_control.target_per_response
    )
    with run.Run(
        recorded,
        num_steps={config.name: config.num_steps},
        check=check,
        stops=config.watch.alarms.stops if config.watch.alarms.stop else None,
        stop_timeout=config.stop_timeout,
        data=receipt_of(receipts, start=start),
    ) as job:
        columns = read.prompts[0].tokens.shape[1] + config.batch.max_new_tokens
        tell(config, models, programs, start=start, columns=columns, meshes=meshes)
        if held_out is not None:
            print(f"held-out score {summary['held_out_score_before']:.3f} before")
        trained, reference = run_stage(loop, models, job=job, meta=read.meta)
    # Before anything is saved: a reference that moved makes the result worthless.
    verify(models, reference)
    pretrained.save(
        job.folder,
        trained,
        start=start,
        base=models.base,
        lora=models.recipe.lora,
        name=config.start.model,
    )
    if held_out is not None:
        summary |= held_out.summary("after", trained, programs, reference)
    summary |= conclude(
        config,
        models,
        programs,
        job=job,
        trained=trained,
        reference=reference,
        text_stats=programs.text_stats(trained, read.texts),
    )
    if not isinstance(loop.sampler, Sampler):
        summary["sampler_retries"] = loop.sampler.retries.count
    summary["compiled"] = program_cache.compiled_since(compiled)
    summary["missed_on_disk"] = program_cache.missed_since(compiled)
    summary["seconds"] = time.perf_counter() - started
    folder.write_summary(job.folder, summary)
    if held_out is not None:
        print(
            f"held-out score {summary['held_out_score_before']:.3f} before, "
            f"{summary['held_out_score_after']:.3f} after"
        )
    saved = mirror.written(job.folder / "model")
    print(f"{summary['seconds']:.0f} s; the policy is in {saved}")


def _reprompt(
    config: PolicyGradientConfig, rows: list[Row], *, start: Pretrained
) -> Callable[[Rollout, Scores], TeacherPrompts] | None:
    """What a teacher of responses of the batch reads; None of any other run."""
    if config.success_score is None:
        return None
    from rlhf_jax.train.rollouts.reprompt import Reprompt

    return Reprompt(
        rows,
        options=config.data,
        start=start,
        success_score=config.success_score,
        group_size=config.rows_per_prompt,
        max_new_tokens=config.batch.max_new_tokens,
    )


def _chosen(config: PolicyGradientConfig) -> PolicyGradientConfig:
    """The run with what `--auto` chooses, which is printed."""
    from rlhf_jax.train.plan import auto  # few runs ask for it

    start = pretrained.described(config.start.model, tokenizer=config.start.tokenizer)
    # No prompt is read yet: as long as its bucket, or a response, where both have room.
    new = config.batch.max_new_tokens
    room = max(1, start.model.max_positions - new)
    prompt = min(room, max(config.data.buckets or (new,)))
    config, lines = auto.chosen(config, start, auto.Devices.here(), prompt=prompt)
    print(*lines, sep="\n")
    return config


def rehearse(loop: Loop, models: Models, *, judge: Judge | None) -> None:
    """The first iteration up to its update, before there is a run folder.

    A reward function that fails stops the run now, and so does whatever does not fit.
    The first step takes what it made, unless the run goes on from a later one.

    Raises:
      SelfCheckError: the policy's log-probs are not the sampler's, or the KL to the
        reference does not start at 0.
    """
    config, programs, train = loop.config, loop.programs, models.train
    key = loop.key(0)
    rollout, early = loop.draw(
        train.policy,
        prompts=loop.prompts[0],
        key=key,
        version=jnp.array(train.step, copy=True),  # the update donates it
    )
    of_teacher, early = loop.taught(rollout, early)
    read = programs.read(
        train,
        models.critic,
        rollout,
        reference=models.reference,
        key=key,
        values_first=loop.values_first,
        of_teacher=of_teacher,
    )
    # Processes began to score while the reference ran; now their answers are needed.
    early = early() if callable(early) else early
    scores = loop.scores(rollout, early)
    tell_cut(config, rollout, stop_ids=programs.recipe.stop_ids)
    environment = config.sampler.environment
    if environment is None or environment.seconds is None:
        # Episodes with a limit of time have waited here for programs to be compiled.
        kept = None if config.reads_hidden_states else read  # those are large
        loop.begun[0] = Begun(rollout, early, scores, kept)
    require_some(scores, sources=config.sources)
    if judge is not None:
        judge(loop.shown(rollout))
    own = (
        None if read.reference is None or config.reads_hidden_states else read.reference
    )
    measured = programs.measure(
        train.policy,
        base=models.base,
        rollout=rollout,
        ref_logprobs=None if own is None else own.logprobs,
        # The check runs once: one size is enough, where the update has a branch for
        # each.
        packing=None if read.packing is None else read.packing.batch.at_its_size(),
    )
    self_check.require(
        programs.recipe.reported(processes.whole(measured)),  # which the policy drew
        tolerance=self_check.TOLERANCE[config.start.dtype],
        sampler_tolerance=config.sampler_tolerance,
        storage_tolerance=config.storage_tolerance,
        # Without a checkpoint of its own the reference is the policy's start: its KL
        # must be 0 within the rounding of its storage.
        expect_equal=own is not None and config.reference.checkpoint is None,
    )
    # Last, with the shapes of a real rollout.
    ptx = None if loop.ptx is None else loop.ptx[0]
    programs.compile_learn(
        train,
        models.critic,
        LearnInputs(rollout, scores, models.reference, read, key, ptx),
        runs_next=0 in loop.begun and not config.sampler.max_redraws,
    )


def tell_cut(
    config: PolicyGradientConfig, rollout: Rollout, *, stop_ids: tuple[int, ...]
) -> None:
    """Warns of a reward model that reads responses most of which did not end.

    It learned its score at the end of whole responses. Silent where the method says
    what such a response is worth, and in environments.
    """
    method, environment = config.method, config.sampler.environment
    said = method.fixed_length is not None or method.scores.reads_stops
    if said or environment is not None or not config.rewards.model_names:
        return
    cut = ~processes.whole(ended(rollout, stop_ids=stop_ids))
    if 2 * cut.sum() > cut.size:
        print(
            f"warning: {cut.sum()} of {cut.size} responses are cut at "
            f"--max-new-tokens {config.batch.max_new_tokens}, and a reward model "
            f"learned to score whole ones; raise it, or give "
            f"--scores.missing-stop-score"
        )


def tell(
    config: PolicyGradientConfig,
    models: Models,
    programs: Programs,
    *,
    start: Pretrained,
    columns: int,
    meshes: Meshes,
) -> None:
    """Prints the models and the attention of a run."""
    critic = models.train.critic if models.critic is None else models.critic.params
    reference = None if models.reference is models.base else models.reference
    # Reward models stand first; in snapshots their names are numbers.
    named = dict(zip(models.beside, config.rewards.model_names, strict=False))
    beside = {named.get(name, name): one for name, one in models.beside.items()}
    frozen_ones = dict(beside)
    if reference is not None:
        frozen_ones["reference"] = reference
    # Reward models need not read the policy's tokens.
    rewards = dict(zip(config.rewards.model_names, models.reward_shapes, strict=True))
    apart = meshes.sampler is not meshes.policy
    report.model_table(
        [
            ("policy", models.train.policy, True),
            *([("critic", critic, True)] if config.critic is not None else []),
            ("reference", None if reference is None else reference.stored, False),
            *((name, one.stored, False) for name, one in beside.items()),
            *([("sampler", None, True)] if apart else []),
        ],
        models={
            "policy": start.model,
            "critic": getattr(programs.recipe, "critic_model", start.model),
            **{
                name: frozen.shape_of(one, policy=start.model)
                for name, one in frozen_ones.items()
                if name not in rewards
            },
            **rewards,
        },
        meshes={"sampler": meshes.sampler} if apart else {},
    )
    report.engine(start.model, columns=columns, mesh=meshes.policy)


def run_stage(
    loop: Loop, models: Models, *, job: run.Run, meta: dict[str, Any]
) -> tuple[Any, Any]:
    """The stage of the run; the policy and the reference at its end."""
    config, reference = loop.config, models.reference
    saved: dict[str, Any] = {"train": models.train, "root_key": loop.root_key}
    if models.critic is not None:
        saved["critic"] = models.critic
    beside = dict(models.beside)
    if loop.programs.critic_base is not None:
        beside["critic_base"] = loop.programs.critic_base
    saved["reference"] = None if reference is models.base else reference
    queue: RolloutQueue | None = None
    if config.staleness:
        # Threads and waits of runs whose sampler is behind.
        from rlhf_jax.train.rollouts.queue import RolloutQueue

        # Of several processes none may run programs in a thread: what is drawn comes
        # when it is taken. Episodes are played to their end at once.
        late = jax.process_count() > 1 and loop.episodes is None
        queue = RolloutQueue(
            loop.draw_there if late else functools.partial(loop.draw, handed=True),
            hand_over=loop.sampler.hand_over,
            prompts=loop.prompts.__getitem__,
            key=loop.root_key,
            staleness=config.staleness,
            num_steps=config.num_steps,
            threaded=loop.sampler.threaded,
            arrive=loop.arrive if late else None,
            patience=config.stop_timeout,
        )
        begun = loop.begun.get(0)
        if begun is None:
            saved |= queue.first(models.train.policy, version=models.train.step)
        else:
            # The rehearsal's rollout is that of step 0: it is not drawn twice. Scores
            # are as draws return them, or no snapshot would fit.
            early = {key: x for key, x in begun.early.items() if key != TOTAL}
            saved |= queue.filled(begun.rollout, early)
    # All other frozen models must have, at every snapshot, the digests they began with.
    moving = ("reference",) if config.reference.lifecycle.moves else ()
    with (
        job.stage(config.name, saved, meta=meta, beside=beside, moving=moving) as stage,
        contextlib.nullcontext() if queue is None else queue,
    ):
        of_base = reference is not None and reference is models.base
        improve(loop, stage, queue=queue, base=reference if of_base else None)
    final = reference if of_base else stage.state["reference"]
    return stage.state["train"].policy, final
