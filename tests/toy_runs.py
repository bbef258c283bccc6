"""Run folders as trainers leave them, of any size, written quickly."""

import json

import numpy as np

from rlhf_jax.runs.folder import write_summary

VERSIONS = {"python": "3.11", "rlhf_jax": "0.2.0", "jax": "0.10.2"}
WORDS = ("it", "is", "a", "fine", "gift", "we", "love", "wonderful", "dull", ".")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sample(rng, *, step, row, hot, length=12, reference=True):
    """A row of samples.jsonl; if hot, the policy has moved far from its reference."""
    tokens = [str(word) + " " for word in rng.choice(WORDS, length)]
    ref = -rng.exponential(1.5, length) - 0.1
    own = ref + rng.normal(0, 0.3, length)
    if hot:
        for at in range(0, length, 3):
            tokens[at], own[at], ref[at] = "wonderful ", -0.05, -6.0
    record = {
        "stage": "ppo",
        "step": step,
        "row": row,
        "prompt": f"review number {row}",
        "response": "".join(tokens),
        "score": round(float(rng.normal(1 + hot, 0.5)), 4),
        "judge": round(float(rng.normal(1 - 2 * hot, 0.5)), 4),
        "tokens": tokens,
        "logprobs": np.round(np.minimum(own, -0.01), 4).tolist(),
        "ref_logprobs": np.round(ref, 4).tolist(),
    }
    if reference:
        record["reference"] = "".join(f"{word} " for word in rng.choice(WORDS, length))
    return record


def run(
    folder,
    *,
    seed=0,
    steps=40,
    hacked=False,
    judge=True,
    done=True,
    further=0,
    shown=3,
    length=12,
    reference=True,
    told=None,
    **options,
):
    """Writes a run folder of PPO.

    Args:
      hacked: whether the score rises while the judge falls.
      further: metrics beside the usual ones.
      shown: samples every tenth step.
      told: a figure of the summary; None leaves it out.
      options: of its config, beside those that every run has.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config = {"out": str(folder), "seed": seed, "kl_coef": 0.2, "num_steps": steps}
    config |= {"ppo": {"lam": 0.95, "gamma": 1.0}} | options
    (folder / "config.json").write_text(
        json.dumps({"config": config, "versions": VERSIONS}), encoding="utf-8"
    )
    metrics, timings, samples = [], [], []
    for step in range(steps):
        share = step / max(1, steps - 1)
        up, down = share * (3 if hacked else 1), -2 * share if hacked else share
        row = {
            "stage": "ppo",
            "step": step,
            "objective/scores": up + rng.normal(0, 0.05),
            "objective/kl": (60 if hacked else 3) * share + rng.normal(0, 0.05),
            "response/length": 12 + rng.normal(0, 0.3),
            "drift/relative": 0.1 * share,
        }
        if judge:
            row["judge/score"] = down + rng.normal(0, 0.05)
        row |= {f"reward/part_{n}": float(rng.normal()) for n in range(further)}
        metrics.append(row)
        phases = {"sample": 1.0 + share, "learn": 2.0}
        timings.append({"stage": "ppo", "step": step, "seconds": 4.0, "phases": phases})
        if step % 10 == 0:
            samples += [
                sample(
                    rng,
                    step=step,
                    row=row,
                    hot=hacked and step > 0,
                    length=length,
                    reference=reference,
                )
                for row in range(shown)
            ]
    lines(folder / "metrics.jsonl", metrics)
    lines(folder / "timings.jsonl", timings)
    lines(folder / "samples.jsonl", samples)
    if done:
        summary = {
            "reference_fingerprint": "ab" * 32,
            "reference_verified": True,
            "alarms": [],
        } | ({} if told is None else {"told": told})
        write_summary(folder, summary)
    return folder
