"""`rlhf-jax distill`, from its options to the summary."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rlhf_jax.algorithms import distill, self_check, state
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.distill.recipe import Distill
from rlhf_jax.algorithms.flow.teacher import TeacherStates
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, digests, encoding, files
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.devices import compile_counts, processes, row_sharding, sharding
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.planning import profiled
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import command_line, folder, metrics, plots, report, run
from rlhf_jax.train import rehearsal
from rlhf_jax.train.distill.options import Config
from rlhf_jax.train.ppo.samples import sample_rows
from rlhf_jax.train.sampling.sampler import Sampler
from rlhf_jax.train.start import load_start, prompts_given, receipt_of
from rlhf_jax.train.text_rewards import load_text_reward, text_reward

Array = jax.Array

MEASURED = {
    "objective/kl": "KL to the teacher [nats per response]",
    "loss/divergence": "divergence [nats per token]",
    "objective/scores": "score",
    "objective/entropy": "entropy [nats per token]",
    "response/length": "length [tokens]",
}


def make_algorithm(options: Config, *, start: Pretrained) -> Distill:
    """What is fixed during the run."""
    recipe = options.distill
    updates = options.num_steps * recipe.num_epochs * recipe.num_minibatches
    return Distill(
        **vars(recipe),
        model=start.model,
        policy_optimizer=optax.chain(
            optax.clip_by_global_norm(options.max_grad_norm),
            optax.adam(optax.linear_schedule(options.learning_rate, 0.0, updates)),
        ),
        max_new_tokens=options.max_new_tokens,
        stop_ids=start.stop_ids,
        rewarded=options.reward is not None,
    )


class Programs:
    """What is compiled, each with its parameters as arguments."""

    def __init__(
        self, algorithm: Distill, *, teacher: Frozen, mesh: Mesh, options: Config
    ) -> None:
        shape = {
            "model": algorithm.model,
            "max_new_tokens": algorithm.max_new_tokens,
            "temperature": algorithm.temperature,
        }
        on = functools.partial(sharding.on, mesh)
        place = options.placement.sampler
        sampling = place.mesh_beside(mesh) if place.apart else mesh
        assert sampling is not None  # the host is for frozen models
        self.sample = Sampler(
            algorithm,
            mesh=sampling,
            home=mesh,
            storage=options.sampler_storage,
            cache=options.sampler_cache,
            cache_pages=options.sampler_cache_pages,
            page_size=options.sampler_page_size,
            prefill_chunk=options.prefill_chunk,
        )
        learn = functools.partial(on(distill.learn), recipe=algorithm)
        self.learn = jax.jit(learn, donate_argnames=("state",))
        self.measure = jax.jit(
            functools.partial(on(self_check.measure), reference=None, **shape)
        )
        of_teacher = sharding.on(frozen.mesh_of(teacher), distill.teacher_states)
        self._teacher_states = jax.jit(functools.partial(of_teacher, **shape))

    def teacher_states(self, teacher: Frozen, rollout: Rollout) -> TeacherStates:
        """Computed on the teacher's devices, and brought to the student's."""
        states = self._teacher_states(teacher, rollout=frozen.beside(teacher, rollout))
        return jax.device_put(states, rollout.index.sharding)


def main(options: Config) -> None:
    """Runs `rlhf-jax distill` with its options."""
    started, compiled = time.perf_counter(), compile_counts.so_far()
    if options.reward is not None:  # before anything is loaded
        command_line.load_function(options.reward)
    frozen_models.check_teacher(
        options.teacher, student=options.model, tokenizer=options.tokenizer
    )
    receipts = Receipts()
    data = receipts.source("--prompts", options.prompts)
    field = options.prompt_field
    rows = files.read_prompts(options.prompts, field=field, receipt=data)
    mesh = options.placement.policy_mesh()
    start = load_start(options.model, options=options, mesh=mesh)
    algorithm = make_algorithm(options, start=start)
    rows, tokens = encoding.encode_prompts(
        start.tokenizer,
        rows,
        max_length=start.room(max_new_tokens=options.max_new_tokens),
        field=field,
        stop_ids=start.stop_ids,
        overlong=options.overlong,
        more="lower --max-new-tokens",
        receipt=data,
    )
    asked = [row[options.prompt_field] for row in rows]
    data.use("training", items.of_prompts(tokens))
    if options.reward is not None:
        data.gives(f"--reward {options.reward}")
    processes.agree("the prompts", digests.of_values([rows, tokens]))
    prompts = batches.prompt_batches(
        tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=start.pad_id,
        share=row_sharding.row_share(mesh),
    ).map(lambda batch: row_sharding.put_rows(batch, mesh=mesh))
    teacher = frozen_models.load_reference(
        options.teacher,
        policy=start,
        storage=options.teacher_storage,
        place=options.placement.teacher,
        mesh=mesh,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    head = distill.head_of(
        teacher, model=start.model, place=functools.partial(sharding.place, mesh=mesh)
    )
    train = state.grpo_state(
        policy=start.params,
        policy_optimizer=algorithm.policy_optimizer,
        kl=fixed(options.kl_coef),
    )
    start = start._replace(params=None)  # the first update takes them
    # All of it, or `jit` would compile everything again after a step.
    train = sharding.place(train, mesh=mesh)
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    programs = Programs(algorithm, teacher=teacher, mesh=mesh, options=options)
    reward = no_reward
    if options.reward is not None:
        reward = text_reward(
            load_text_reward(
                "--reward", options.reward, policy=start, rows=rows, asked=asked
            ),
            mesh=mesh,
        )

    def score(rollout: Rollout) -> dict[str, Any]:
        states = programs.teacher_states(teacher, rollout)
        scores = reward(distill.seen_by_reward(rollout, recipe=algorithm))
        return {"scores": scores, "states": states}

    first_key = jax.random.fold_in(key, 0)
    learn = functools.partial(programs.learn, train, head=head, key=first_key)
    rehearsal.rehearse(
        programs.sample(
            train.policy, prompts=prompts[0], key=first_key, version=train.step
        ),
        score=lambda rollout: score(rollout) | {"ref_logprobs": None},
        learn=lambda ref_logprobs, **scored: learn(**scored),
        measure=functools.partial(programs.measure, train.policy),
        dtype=options.dtype,
        sampler_tolerance=options.sampler_tolerance,
        expect_equal=False,
    )
    meta = {"data_digest": digests.of_tokens(tokens), **start.meta}
    if options.reward is not None:
        meta["rows_digest"] = digests.of_rows(rows)  # all that it is given
        meta |= prompts_given(asked)
    kept = {"train": train, "root_key": key}
    beside = {"teacher": teacher, "teacher_head": head}
    with (
        run.Run(
            options,
            num_steps={"distill": options.num_steps},
            stop_timeout=options.stop_timeout,
            data=receipt_of(receipts, start=start),
        ) as job,
        job.stage("distill", kept, meta=meta, beside=beside) as stage,
    ):
        report.model_table(
            [("student", train.policy, True), ("teacher", teacher.stored, False)]
        )
        columns = prompts[0].tokens.shape[1] + options.max_new_tokens
        report.engine(start.model, columns=columns, mesh=mesh)
        train = stage.state["train"]
        for step in stage.steps():
            step_key = jax.random.fold_in(key, step)
            rollout = programs.sample(
                train.policy, prompts=prompts[step], key=step_key, version=train.step
            )
            with stage.user_code():
                scored = score(rollout)
            train, stats, _ = programs.learn(
                train, rollout=rollout, head=head, key=step_key, **scored
            )
            stage.state["train"] = train
            samples = []
            if step % options.sample_every == 0:
                samples = sample_rows(
                    rollout,
                    scored["scores"],
                    ref_logprobs=scored["states"].logprobs,  # of the teacher
                    policy=start,
                    asked=asked,
                    count=options.num_shown,
                )
            stage.end_step(
                step, stats, samples, texts=[(rollout.mask, rollout.response_mask)]
            )
    for model in (teacher, head):
        frozen.verify(model)
    pretrained.save(
        job.folder, train.policy, start=start, base=None, lora=None, name=options.model
    )
    measured = metrics.read(job.folder / "metrics.jsonl")
    first, last = measured[0], measured[-1]
    report.table(
        "Responses to the prompts",
        ("", "first iteration", "last"),
        [(name, first.get(at), last.get(at)) for at, name in MEASURED.items()],
    )
    summary: dict[str, Any] = {
        "kl_first": first["objective/kl"],
        "kl_last": last["objective/kl"],
        "divergence_first": first.get("loss/divergence"),
        "divergence_last": last.get("loss/divergence"),
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "teacher_fingerprint": frozen.fingerprint_of(teacher).root,
        "teacher_verified": True,
        "compiled": compile_counts.since(compiled),
        "seconds": time.perf_counter() - started,
    }
    summary |= profiled.summary(
        job.folder,
        profile=options.profile,
        flops=functools.partial(
            profiled.policy_gradient_flops,
            model=algorithm.model,
            num_epochs=algorithm.num_epochs,
            group_size=algorithm.rows_per_prompt,
            references=[frozen.shape_of(teacher, policy=algorithm.model)],
        ),
    )
    plots.draw(job.folder)
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the student is in {job.folder / 'model'}")


def no_reward(rollout: Rollout) -> Array:
    """The score of every response where there is no reward: 0."""
    return jnp.zeros(rollout.index.shape, jnp.float32, device=rollout.index.sharding)
