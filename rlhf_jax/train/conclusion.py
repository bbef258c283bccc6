"""The end of a run: verify the frozen models, print tables, make the summary."""

from __future__ import annotations

import functools
from typing import Any

from rlhf_jax.devices import processes
from rlhf_jax.functional import masked
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference import frozen
from rlhf_jax.runs import metrics, plots, report, run
from rlhf_jax.train.build import Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.programs import Programs

MEASURED = {
    "objective/scores": "score",
    "judge/score": "score of the judge",
    "objective/kl": "KL to the reference [nats]",
    "objective/entropy": "entropy [nats per token]",
    "loss/divergence": "divergence [nats per token]",
    "response/taught": "taught (share of responses)",
    "response/turns": "turns",
    "response/length": "length [tokens]",
    "response/eos_fraction": "ended (share of responses)",
    "response/distinct_fraction": "distinct (share of responses)",
}
SUMMARISED = {  # in the summary as NAME_first and NAME_last
    "score": "objective/scores",
    "kl": "objective/kl",
    "divergence": "loss/divergence",
    "turns": "response/turns",
}


def verify(models: Models, reference: Any) -> None:
    """Recomputes the digests of every frozen model and compares them.

    Raises:
      ReferenceMovedError: names the model and every leaf that moved.
    """
    if reference is not None:
        frozen.verify(reference, fetch=processes.whole)
    frozen.verify_all(models.beside, fetch=processes.whole)


def conclude(
    config: PolicyGradientConfig,
    models: Models,
    programs: Programs,
    *,
    job: run.Run,
    trained: Any,
    reference: Any,
    text_stats: Stats,
) -> dict[str, Any]:
    """Prints tables, draws plots, and returns the summary of the measurements."""
    measured = metrics.read(job.folder / "metrics.jsonl")
    first = metrics.first(measured)
    last = functools.reduce(dict.__or__, measured, {})  # not all steps measure the KL
    report.table(
        "Responses to the prompts",
        ("", "first iteration", "last measured"),
        [
            (name, first.get(at), last.get(at))
            for at, name in MEASURED.items()
            if at in last
        ],
    )
    of_texts = masked.mean_stats(processes.whole(text_stats))
    after = {name: float(x) for name, x in of_texts.items()}
    summary: dict[str, Any] = {"alarms": job.alarms} | report.texts(first, after)
    for name, metric in SUMMARISED.items():
        if metric in last or name in ("score", "kl"):
            summary[f"{name}_first"] = first.get(metric)
            summary[f"{name}_last"] = last.get(metric)
    if config.watch.judge is not None:
        from rlhf_jax.runs.alarms import verdicts

        summary["verdict"] = verdicts.conclude(measured, alarms=job.alarms)
    if config.watch.judge is not None and config.watch.judge_failure == "warn":
        from rlhf_jax.train.watch import judge

        summary["judge_failures"] = judge.failures(measured)
    if reference is not None:
        root = frozen.fingerprint_of(reference, fetch=processes.whole).root
        summary |= {"reference_fingerprint": root, "reference_verified": True}
        print(f"reference verified, fingerprint {root}")
    if models.further:
        summary["reference_fingerprints"] = {
            name: frozen.fingerprint_of(model, fetch=processes.whole).root
            for name, model in models.further.items()
        }
    if reference is not None and reference.model is None:  # of the policy's shape
        moved = processes.whole(programs.drift(trained, reference))
        plots.drift_table(moved)
        plots.draw_drift(job.folder, moved)
        summary["drift_relative"] = float(moved["relative"])
        print(f"policy moved, relative weight drift {moved['relative']:.3g}")
    if config.staleness:
        from rlhf_jax.train.rollouts.waits import waited

        summary["waits"] = waited(job.folder)
    plots.draw(job.folder)
    if programs.pack is not None:
        summary |= programs.pack.summary()
    if config.profile is None:
        return summary
    from rlhf_jax.planning import profiled

    recipe = models.recipe
    references = [models.reference, *models.further.values()]
    return summary | profiled.summary(
        job.folder,
        profile=config.profile,
        flops=functools.partial(
            profiled.policy_gradient_flops,
            recipe=recipe,
            adapters=None if recipe.lora is None else trained,
            references=[
                frozen.shape_of(reference, policy=recipe.model)
                for reference in references
                if reference is not None
            ],
            rewards=models.reward_shapes,
        ),
    )
