"""`rlhf-jax ppo`, from its options to the summary."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import jax

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches, digests, files
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.devices import compile_counts, processes, row_sharding, sharding
from rlhf_jax.planning import profiled
from rlhf_jax.roles.reference import frozen
from rlhf_jax.runs import (
    alarms,
    command_line,
    drift_report,
    folder,
    metrics,
    plots,
    report,
    run,
)
from rlhf_jax.train.judge import Judge, judge_failures
from rlhf_jax.train.ppo.iterations import improve, rehearse
from rlhf_jax.train.ppo.memory import check_memory
from rlhf_jax.train.ppo.models import make_models
from rlhf_jax.train.ppo.options import Config
from rlhf_jax.train.ppo.programs import Programs
from rlhf_jax.train.ppo.prompts import begin_episodes, encode_prompts
from rlhf_jax.train.rollouts.options import refuse_processes
from rlhf_jax.train.rollouts.waits import waited
from rlhf_jax.train.start import load_start, prompts_given, receipt_of
from rlhf_jax.train.text_rewards import load_text_reward, model_reward, text_reward

MEASURED = {
    "objective/scores": "score",
    "objective/kl": "KL to the reference [nats]",
    "objective/entropy": "entropy [nats per token]",
    "response/turns": "turns",
    "response/length": "length [tokens]",
    "response/eos_fraction": "ended (share of responses)",
    "response/distinct_fraction": "distinct (share of responses)",
}


def main(options: Config) -> None:
    """Runs `rlhf-jax ppo` with its options."""
    with contextlib.ExitStack() as stack:
        run_ppo(options, stack=stack)


def run_ppo(options: Config, *, stack: contextlib.ExitStack) -> None:
    """From the options to the summary.

    Args:
      stack: that ends the processes of an environment.
    """
    started, compiled = time.perf_counter(), compile_counts.so_far()
    refuse_processes(options.staleness)
    for spec in (options.reward, options.judge):  # before anything is loaded
        if spec is not None:
            command_line.load_function(spec)
    receipts, rows = Receipts(), []
    data = receipts.source("--prompts", options.prompts)
    if options.environment is None:
        field = options.prompt_field
        rows = files.read_prompts(options.prompts, field=field, receipt=data)
    mesh = options.policy_mesh(options.placement)
    if options.check_memory:
        check_memory(options)
    policy = load_start(options.model, options=options, mesh=mesh)
    models = make_models(options, policy)
    contexts = [each.model.max_positions for each in models.rewards]
    context = min([policy.model.max_positions, *contexts])
    episodes = None
    if options.environment is None:
        rows, token_lists = encode_prompts(
            options, rows, policy=policy, context=context, receipt=data
        )
        asked = [row[options.prompt_field] for row in rows]
    else:
        begun, episodes = begin_episodes(
            options, models, policy=policy, stack=stack, receipt=data
        )
        rows, token_lists, asked = begun.rows, begun.prompts, begun.asked
    data.use("training", items.of_prompts(token_lists))
    for option, spec in (("--reward", options.reward), ("--judge", options.judge)):
        if spec is not None:
            data.gives(f"{option} {spec}")
    processes.agree("the prompts", digests.of_values([rows, token_lists]))
    put_rows = functools.partial(row_sharding.put_rows, mesh=mesh)
    prompts = batches.prompt_batches(
        token_lists,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=policy.pad_id,
        buckets=options.buckets,
        share=row_sharding.row_share(mesh),
    ).map(put_rows)
    sources = {"held_out": options.held_out, "out_of_domain": options.out_of_domain}
    texts = {
        name: pretrained.read_texts(
            policy,
            source,
            batch_size=min(8, options.eval_rows),
            max_rows=options.eval_rows,
            receipt=receipts.source(f"--{name.replace('_', '-')}", source),
        )
        for name, source in sources.items()
        if source is not None
    }
    meta = {"data_digest": digests.of_tokens(token_lists), **policy.meta}
    if options.reward_model is None or options.judge is not None:
        meta["rows_digest"] = digests.of_rows(rows)  # all that they are given
        meta |= {} if options.environment else prompts_given(asked)
    ptx = None
    if options.ptx is not None:
        mixed_in = receipts.source("--ptx", options.ptx)
        examples = pretrained.read_examples(
            policy, options.ptx, max_length=options.ptx_max_length, receipt=mixed_in
        )
        mixed_in.use("training", items.of_texts(examples))
        meta["ptx_digest"] = digests.of_tokens(examples)
        ptx = batches.sequence_batches(
            examples,
            batch_size=options.ptx_batch_size,
            seed=options.seed,
            pad_id=policy.pad_id,
            share=row_sharding.row_share(mesh),
        ).map(put_rows)
    policy = policy._replace(params=None)  # with LoRA the base is a copy: the only one
    programs, judge, reward = Programs(models, options=options), None, None
    if options.judge is not None:
        judge = Judge(
            load_text_reward(
                "--judge", options.judge, policy=policy, rows=rows, asked=asked
            ),
            mesh=mesh,
            may_fail=options.judge_failure == "warn",
        )
    if options.reward is not None:
        reward = text_reward(
            load_text_reward(
                "--reward", options.reward, policy=policy, rows=rows, asked=asked
            ),
            mesh=mesh,
        )
    elif options.reward_model is not None:
        reward = model_reward(
            models.rewards,
            pack=programs.pack_ends,
            how=options.reward_combine,
            std_coef=options.std_coef,
        )
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    rehearse(
        models,
        programs,
        prompts=prompts[0],
        ptx=ptx,
        reward=reward,
        episodes=episodes,
        judge=judge,
        key=jax.random.fold_in(key, 0),
        options=options,
    )

    check = functools.partial(
        alarms.check,
        limits=options.alarms,
        kl_target=options.kl_control.target_per_response,
    )
    with run.Run(
        options,
        num_steps={"ppo": options.num_steps},
        check=check,
        stop_timeout=options.stop_timeout,
        data=receipt_of(receipts, start=policy),
    ) as job:
        reference, scorers = models.reference, models.frozen_rewards
        report.model_table(
            [
                ("policy", models.train.policy, True),
                (
                    "critic",
                    models.train.critic
                    if models.critic is None
                    else models.critic.params,
                    True,
                ),
                ("base", None if models.base is None else models.base.stored, False),
                (
                    "reference",
                    None
                    if reference is None or reference is models.base
                    else reference.stored,
                    False,
                ),
                *(
                    (f"references/{name}", each.stored, False)
                    for name, each in models.further.items()
                ),
                *((name, each.stored, False) for name, each in scorers.items()),
                *([("sampler", None, True)] if models.sampling is not None else []),
            ],
            meshes={} if models.sampling is None else {"sampler": models.sampling},
        )
        columns = prompts[0].tokens.shape[1] + options.max_new_tokens
        report.engine(policy.model, columns=columns, mesh=mesh)
        trained, reference = improve(
            models,
            programs,
            reward=reward,
            episodes=episodes,
            judge=judge,
            texts=texts,
            prompts=prompts,
            ptx=ptx,
            key=key,
            job=job,
            meta=meta,
            policy=policy,
            asked=asked,
            options=options,
        )
    for model in (models.base, reference, *scorers.values()):
        if model is not None:
            frozen.verify(model)
    frozen.verify_all(models.further)
    pretrained.save(
        job.folder,
        trained,
        start=policy,
        base=models.base,
        lora=models.algorithm.lora,
        name=options.model,
    )

    measured = metrics.read(job.folder / "metrics.jsonl")
    first = measured[0]
    last = functools.reduce(dict.__or__, measured)  # not every step takes the KL
    report.table(
        "Responses to the prompts",
        ("", "first iteration", "last measured"),
        [
            (name, first.get(at), last.get(at))
            for at, name in MEASURED.items()
            if at != "response/turns" or options.environment is not None
        ],
    )
    summary: dict[str, Any] = {
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "kl_first": first.get("objective/kl"),
        "kl_last": last.get("objective/kl"),
        "alarms": job.alarms,
        "compiled": compile_counts.since(compiled),
    }
    if options.environment is not None:
        summary["turns_first"] = first["response/turns"]
        summary["turns_last"] = last["response/turns"]
    if options.judge is not None and options.judge_failure == "warn":
        summary["judge_failures"] = judge_failures(measured)
    if reference is not None:
        summary |= {
            "reference_fingerprint": frozen.fingerprint_of(reference).root,
            "reference_verified": True,
        }
        print(f"reference verified, fingerprint {summary['reference_fingerprint']}")
    if models.further:
        summary["reference_fingerprints"] = {
            name: frozen.fingerprint_of(each).root
            for name, each in models.further.items()
        }
    if reference is not None and reference.model is None:  # leaf by leaf
        moved = processes.whole(programs.drift(trained, reference))
        drift_report.table(moved)
        drift_report.plots(job.folder, moved)
        summary["drift_relative"] = float(moved["relative"])
        print(f"policy moved, relative weight drift {moved['relative']:.3g}")
    if options.staleness:
        summary["waits"] = waited(job.folder)
    plots.draw(job.folder)
    summary |= programs.pack.summary()
    summary |= profiled.summary(job.folder, profile=options.profile, flops=models.flops)
    summary["seconds"] = time.perf_counter() - started
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the policy is in {job.folder / 'model'}")
