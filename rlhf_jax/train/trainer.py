"""A run of any policy gradient, from its config to the summary.

read      prompts, texts and rewards, before any weight is read
build     every model, on its devices
rehearse  the first iteration up to its update, before there is a run folder
improve   the loop
end       verify the frozen models, save, evaluate, summarise
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow.score import ended
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import processes, program_cache, sharding
from rlhf_jax.devices.placement import AUTO, WITH_POLICY
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.runs import alarms, folder, report, run
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.report import Role
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes, Models, build
from rlhf_jax.train.conclusion import conclude, verify
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.loop import Begun, Loop, improve
from rlhf_jax.train.programs import LearnInputs, Programs
from rlhf_jax.train.reading import load_start, read_data, receipt_of
from rlhf_jax.train.rewards import RewardList, RewardPools, require_some
from rlhf_jax.train.sampler import make_sampler
from rlhf_jax.train.watch.watcher import Watcher

if TYPE_CHECKING:
    from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
    from rlhf_jax.train.rollouts.queue import RolloutQueue
    from rlhf_jax.train.watch.judge import Judge

Array = jax.Array


def main(config: PolicyGradientConfig) -> None:
    """Runs a command with its config."""
    with contextlib.ExitStack() as stack:
        train(config, stack=stack)


def train(config: PolicyGradientConfig, *, stack: contextlib.ExitStack) -> None:
    """Runs a policy gradient, from its config to the summary."""
    started, compiled = time.perf_counter(), program_cache.compiled_so_far()
    # The folder records the options as given: a resume is compared with them, and may
    # run on other devices.
    recorded = config
    if config.auto is not None:
        config = _chosen(config)
    # First, so that a mesh that does not fit the devices fails before minutes of
    # loading.
    meshes, receipts = Meshes.of(config), Receipts()
    mesh = meshes.policy
    pools = RewardPools(config, mesh=mesh, stack=stack)
    weights = getattr(config.sampler.sampler, "weights", None)
    if weights is not None and processes.is_first():
        from rlhf_jax.samplers import weight_files  # few runs have a sampler outside

        weight_files.HandOverFolder(weights).close()  # or raises
    judging = judge = None
    if config.watch.judge is not None:
        from rlhf_jax.train.watch import judge as judges  # few runs have one

        judging = judges.load(config.watch, mesh=mesh)
    if config.reads_hidden_states and config.reference.checkpoint is not None:
        frozen_models.check_teacher(
            config.reference.checkpoint,
            student=config.start.model,
            tokenizer=config.start.tokenizer,
        )
    # The memory check needs only shapes and the tokenizer.
    start = pretrained.described(config.start.model, tokenizer=config.start.tokenizer)
    planned = shapes.of_run(config, meshes=meshes, start=start)
    if config.placement.sampler == AUTO:
        config = _placed(config, planned, mesh=mesh)
        meshes = Meshes.of(config)
    if config.check_memory:
        shapes.check(config, planned, meshes=meshes)
    # Errors in the user's files are found before a weight is read.
    read = read_data(
        config,
        planned,
        start=start,
        meshes=meshes,
        pools=pools,
        receipts=receipts,
        stack=stack,
    )
    start = load_start(config.start, mesh=mesh, start=start)
    models = build(config, start, meshes=meshes)
    start = start._replace(params=None)  # the first update takes them
    programs = Programs(models, meshes=meshes, config=config)
    rewards = functools.partial(
        RewardList,
        pools,
        models=models.reward_models,
        pack=None if programs.pack is None else programs.pack.ends,
        policy=start,
    )
    if judging is not None:
        data = read.data
        judge = judging(data.rows, decode=start.decode, prompts=data.written_prompts)
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
        sampler=make_sampler(config, models, meshes=meshes, stack=stack),
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
    # Before there is a run folder: a failing reward or a lack of memory leaves none
    # behind.
    rehearse(loop, models, judge=judge)
    summary: dict[str, Any] = {}
    if held_out is not None:
        # The figures at the end are compared with those of the untrained policy.
        policy, reference = models.train.policy, models.reference
        summary |= held_out.summary("before", policy, programs, reference)
    limits = config.watch.alarms.allowing(staleness=config.staleness)
    check = functools.partial(
        alarms.check,
        limits=limits,
        kl_target=config.kl.kl_control.target_per_response,
        from_start=config.reference.checkpoint is None,
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
        tell(config, models, start=start, columns=columns, meshes=meshes)
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
    summary |= loop.sampler.summary()
    summary["compiled"] = program_cache.compiled_since(compiled)
    summary["missed_on_disk"] = program_cache.missed_since(compiled)
    summary["seconds"] = job.seconds_before + time.perf_counter() - started
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
    """Makes the prompts of a teacher that reads responses of the batch, or None."""
    if config.success_score is None:
        return None
    from rlhf_jax.train.rollouts.reprompt import Reprompt

    return Reprompt(
        rows,
        options=config.data,
        start=start,
        success_score=config.success_score,
        group_size=config.method.rows_per_prompt,
        max_new_tokens=config.batch.max_new_tokens,
    )


def _chosen(config: PolicyGradientConfig) -> PolicyGradientConfig:
    """Returns the config with the choices of `--auto`, and prints them."""
    from rlhf_jax.train.plan import auto  # few runs ask for it
    from rlhf_jax.train.rollouts import fastest

    start = pretrained.described(config.start.model, tokenizer=config.start.tokenizer)
    # No prompt is read yet: assume the largest bucket, or the length of a response,
    # within the context.
    new = config.batch.max_new_tokens
    room = max(1, start.model.max_positions - new)
    prompt = min(room, max(config.data.buckets or (new,)))
    config, lines = auto.chosen(config, start, fastest.Devices.here(), prompt=prompt)
    print(*lines, sep="\n")
    return config


def _placed(
    config: PolicyGradientConfig, models: Models, *, mesh: Mesh
) -> PolicyGradientConfig:
    """Returns the config with the place of its sampler, and prints the choice."""
    if mesh.size == 1:  # there is nothing to choose from
        return config.sampled_at(WITH_POLICY)
    from rlhf_jax.train.rollouts import fastest  # few runs ask for it

    # No prompt is read yet; `fastest.ROOM` allows for them.
    among = fastest.Devices.here()
    config, line = fastest.placed(config, models, among, mesh=mesh, prompt=0)
    if line is not None:
        print(line)
    return config


def rehearse(loop: Loop, models: Models, *, judge: Judge | None) -> None:
    """Runs the first iteration up to its update, before there is a run folder.

    A failing reward function or a lack of memory stops the run here. Step 0 reuses the
    results; a run that resumes at a later step discards them.

    Raises:
      SelfCheckError: the policy's log-probs differ from the sampler's, or the KL to
        the reference does not start at 0.
    """
    config, programs, train = loop.config, loop.programs, models.train
    key = loop.key(0)
    drawn = loop.draw(train.policy, loop.request(0, train.step))
    rollout, of_teacher = drawn.rollout, loop.taught(drawn)
    read = programs.read(
        train,
        models.critic,
        rollout,
        reference=models.reference,
        key=key,
        values_first=loop.values_first,
        of_teacher=of_teacher,
    )
    scores = drawn.scores  # processes computed them while the reference ran
    tell_cut(config, rollout, stop_ids=programs.recipe.stop_ids)
    environment = config.sampler.environment
    if environment is None or environment.seconds is None:
        # Episodes with a time limit are drawn again: compilation used up their time.
        kept = None if config.reads_hidden_states else read  # hidden states are large
        loop.begun[0] = Begun(drawn, kept)
    require_some(scores, sources=config.sources)
    if judge is not None:
        judge(drawn.shown)
    own = (
        None if read.reference is None or config.reads_hidden_states else read.reference
    )
    measured = programs.measure(
        train.policy,
        base=models.base,
        rollout=rollout,
        ref_logprobs=None if own is None else own.logprobs,
        # The check runs once and needs the branch of one packed size, not all of them.
        packing=None if read.packing is None else read.packing.batch.at_its_size(),
    )
    self_check.require(
        programs.recipe.reported(processes.whole(measured)),
        tolerance=self_check.TOLERANCE[config.start.dtype],
        sampler_tolerance=config.sampler_tolerance,
        storage_tolerance=config.storage_tolerance,
        # A reference without its own checkpoint is a copy of the initial policy: the
        # KL must be 0 within the rounding of its storage.
        expect_equal=own is not None and config.reference.checkpoint is None,
    )
    # Compiled last, with the shapes of a real rollout.
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
    """Warns when a reward model scores responses at least half of which are cut off.

    Reward models are trained on complete responses. No warning is printed in
    environments, nor where the method defines the score of a cut response.
    """
    method, environment = config.method, config.sampler.environment
    handles_cut = method.fixed_length is not None or method.scores.reads_stops
    if handles_cut or environment is not None or not config.rewards.model_names:
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
    *,
    start: Pretrained,
    columns: int,
    meshes: Meshes,
) -> None:
    """Prints the models and the attention engine of a run."""
    policy, train = start.model, models.train
    roles = [Role("policy", train.policy, policy, trained=True)]
    if (critic := models.recipe.critic) is not None:
        valued = train.critic if models.critic is None else models.critic.params
        roles.append(Role("critic", valued, critic.model, trained=True))
    roles.append(Role("reference", None))
    if models.reference is not None and models.reference is not models.base:
        shape = frozen.shape_of(models.reference, policy=policy)
        roles[-1] = Role("reference", models.reference.stored, shape)
    rewards = zip(config.rewards.model_names, models.reward_models, strict=True)
    roles += [Role(name, one.frozen.stored, one.model) for name, one in rewards]
    # Reward models come first in `beside`.
    for name, one in [*models.beside.items()][len(models.rewards) :]:
        roles.append(Role(name, one.stored, frozen.shape_of(one, policy=policy)))
    if meshes.sampler is not meshes.policy:
        roles.append(Role("sampler", None, mesh=meshes.sampler))
    report.model_table(roles)
    report.engine(start.model, columns=columns, mesh=meshes.policy)


def run_stage(
    loop: Loop, models: Models, *, job: run.Run, meta: dict[str, Any]
) -> tuple[Any, Any]:
    """Trains; returns the final policy and reference."""
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
        from rlhf_jax.train.rollouts.queue import RolloutQueue  # few runs have one

        # With several processes no thread may run programs: rollouts are transferred
        # and scored when they are taken. Episodes are always played to their end.
        late = jax.process_count() > 1 and loop.episodes is None
        queue = RolloutQueue(
            loop.sampler.draw_there if late else loop.draw_ahead,
            hand_over=loop.sampler.hand_over,
            request=loop.request,
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
            # The rehearsal's rollout is reused for step 0.
            saved |= queue.filled(begun.drawn.rollout, begun.drawn.early)
    # Every other frozen model must keep its initial digest at every snapshot.
    moving = ("reference",) if config.reference.lifecycle.moves else ()
    with (
        job.stage(config.name, saved, meta=meta, beside=beside, moving=moving) as stage,
        contextlib.nullcontext() if queue is None else queue,
    ):
        of_base = reference is not None and reference is models.base
        improve(loop, stage, queue=queue, base=reference if of_base else None)
    final = reference if of_base else stage.state["reference"]
    return stage.state["train"].policy, final
