"""The trace that each choice of pairs.py leaves in a run, so none is dropped."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import toy_pairs
from safetensors import safe_open

from rlhf_jax import hf
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.roles.reference import fingerprint, frozen


@dataclasses.dataclass
class Run:
    """A finished run."""

    row: dict[str, str]  # its choices
    folder: Path
    config: Any
    loop: Any
    models: Any  # arrays of the trained state are donated
    critic: Any  # as it was at the start, on the host
    requests: list[Any]  # of the toy server
    rows: list[dict[str, Any]]  # metrics.jsonl
    samples: list[dict[str, Any]]
    summary: dict[str, Any]

    def logs(self, *names):
        """Whether each of these metrics is in some step."""
        return all(any(name in row for row in self.rows) for name in names)

    @property
    def recipe(self):
        return self.loop.programs.recipe

    @property
    def is_scored_by_texts(self):
        """Whether each sample's score is the toy reward of its text."""
        return all(
            abs(row["score"] - toy_pairs.value(row["response"])) < 1e-3
            for row in self.samples
        )


def devices(tree):
    return set(jax.tree.leaves(tree)[0].sharding.device_set)


def is_apart(model, run):
    return not devices(model.stored) & devices(run.models.train.policy)


def has_dtype(tree, dtype):
    return any(leaf.dtype == dtype for leaf in jax.tree.leaves(tree))


def reference(run):
    """The first reference; under adapters, the base."""
    return run.models.reference if run.models.base is None else run.models.base


@functools.cache
def root(path):
    """The fingerprint of a checkpoint."""
    return fingerprint.fingerprint(hf.load(path)[1]).root


def has_moved(run):
    """Whether the reference has changed since it was frozen."""
    start = frozen.fingerprint_of(run.models.reference).root
    return run.summary["reference_fingerprint"] != start


def tokens_of(path, *, load=hf.load, trunk=lambda params: params):
    return trunk(load(path)[1])["embed"]["tokens"]


def critic_of(run, embedding):
    return np.array_equal(run.critic["trunk"]["embed"]["tokens"], embedding)


def saved_dtypes(folder):
    with safe_open(folder / "model" / "model.safetensors", "numpy") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


VALUED = ("loss/value", "value/explained_variance")
REWARDS = ("distinct", "right", "kind", "short")
TRACES = {
    "method": {
        "ppo": lambda run: run.logs(*VALUED) and run.models.critic is None,
        "ppo, critic of the reward model": lambda run: (
            run.logs(*VALUED)
            and critic_of(
                run,
                tokens_of(
                    "scorer", load=hf.load_reward, trunk=lambda params: params["trunk"]
                ),
            )
        ),
        "ppo, critic of another model": lambda run: (
            run.logs(*VALUED) and critic_of(run, tokens_of("other"))
        ),
        "ppo, shared trunk": lambda run: (
            run.logs(*VALUED) and run.critic.keys() == {"score"}
        ),
        "ppo, critic apart": lambda run: (
            run.logs(*VALUED)
            and not devices(run.models.critic.params) & devices(run.models.train.policy)
        ),
        "grpo": lambda run: run.logs("group/std", "loss/policy"),
        "reinforce": lambda run: (
            run.logs("loss/policy")
            and not run.logs("group/std")
            and not run.logs("loss/value")
        ),
        "online-dpo": lambda run: run.logs("loss/dpo", "pair/score_gap"),
        "nash-md": lambda run: run.logs("pair/win"),
        "distill": lambda run: run.logs("loss/divergence", "loss/policy"),
    },
    "rewards": {
        "model": lambda run: (
            run.logs("objective/scores") and len(run.models.rewards) == 1
        ),
        "ensemble": lambda run: run.logs("reward/disagreement"),
        "function": lambda run: run.is_scored_by_texts,
        "verifier": lambda run: run.is_scored_by_texts,
        "list": lambda run: run.logs(*(f"reward/{name}" for name in REWARDS)),
    },
    "reward models": {
        "int8": lambda run: all(
            has_dtype(reward.stored, np.int8) for reward in run.models.rewards
        ),
        "apart": lambda run: all(
            is_apart(reward, run) for reward in run.models.rewards
        ),
    },
    "environment": {
        # A turn that has no stop token is the last; it is shorter than a response.
        "present": lambda run: (
            any("the dog" in row["response"] for row in run.samples)
            or all(len(row["tokens"]) <= 3 for row in run.samples)
        )
    },
    "sampler": {
        "int8": lambda run: run.rows[0]["policy/sampler_mismatch"] > 1e-5,
        "process": lambda run: "sampler_retries" in run.summary,
        "server": lambda run: len(run.requests) >= 32,
    },
    "staleness": {
        "stale": lambda run: run.rows[-1]["policy/staleness"] == 2,
        "devices of its own": lambda run: run.rows[-1]["policy/staleness"] == 1,
    },
    "redraws": {"present": lambda run: run.logs("group/redraws")},
    "decoder": {
        "continuous": lambda run: run.recipe.continuous_batching == 8,
        "fixed": lambda run: run.recipe.fixed_length is not None,
    },
    "prompts": {
        "buckets": lambda run: run.loop.prompts[0].tokens.shape[1] in (4, 8),
        "template": lambda run: all(
            row["prompt"].startswith("so ") for row in run.samples
        ),
        "field": lambda run: all(row["prompt"].endswith("?") for row in run.samples),
    },
    "adapters": {
        "present": lambda run: (
            (run.folder / "adapter").is_dir() and run.models.base is not None
        )
    },
    "reference": {
        "other": lambda run: (
            frozen.source_fingerprint_of(run.models.reference).root == root("other")
        ),
        "none": lambda run: (
            run.models.reference is None and not run.logs("objective/kl")
        ),
    },
    "reference storage": {
        "int8": lambda run: has_dtype(reference(run).stored, np.int8)
    },
    "reference place": {
        "apart": lambda run: is_apart(run.models.reference, run),
        "cpu": lambda run: frozen.mesh_of(run.models.reference) is None,
        "pinned": lambda run: (
            {
                leaf.sharding.memory_kind
                for leaf in jax.tree.leaves(run.models.reference.stored)
            }
            == {"pinned_host"}
        ),
    },
    "move": {"reset": has_moved, "mix": has_moved},
    "KL steps": {
        "few": lambda run: (
            "objective/kl" in run.rows[0] and "objective/kl" not in run.rows[1]
        )
    },
    "further references": {
        "present": lambda run: run.logs("objective/kl_further"),
        "apart": lambda run: (
            run.logs("objective/kl_further")
            and is_apart(run.models.further["further"], run)
        ),
    },
    "KL control": dict.fromkeys(
        ("adaptive", "linear", "pi", "lagrangian"),
        lambda run: (
            run.rows[1]["objective/kl_coef"] != run.rows[0]["objective/kl_coef"]
        ),
    ),
    "penalty": {
        "exact": lambda run: (  # in the reward, and in the loss
            run.logs("objective/kl_exact") or run.logs("loss/kl")
        ),
        "loss": lambda run: run.logs("loss/kl") or run.models.reference is None,
        "unplaced": lambda run: (
            run.rows[0]["objective/kl_coef"] == 0 and not run.logs("loss/kl")
        ),
    },
    "log-probs": {
        "recomputed": lambda run: run.recipe.sampler_correction == Recompute(),
        "corrected": lambda run: run.logs("policy/sampler_weight"),
    },
    "guards": {
        "stop": lambda run: run.logs("update/stopped"),
        "leave out": lambda run: run.logs("update/guarded"),
    },
    "optimizer": {
        "adamw": lambda run: has_dtype(run.models.train, "bfloat16"),
        "muon": lambda run: "Muon" in str(jax.tree.structure(run.models.train)),
    },
    "updates": {"several": lambda run: run.config.updates == 4},
    "texts mixed in": {"present": lambda run: run.logs("loss/ptx")},
    "packing": {"present": lambda run: bool(run.summary["packing"])},
    "mesh": {
        choice: lambda run: len(devices(run.models.train.policy)) >= 4
        for choice in ("sharded", "context")
    },
    "dtype": {"bfloat16": lambda run: run.recipe.model.dtype == "bfloat16"},
    "saved": {"bfloat16": lambda run: saved_dtypes(run.folder) == {"BF16"}},
    "held out": {
        "present": lambda run: (
            all("eval/greedy_score" in row and "eval/score" in row for row in run.rows)
            and "held_out_score_after" in run.summary
        )
    },
    "texts": {
        "present": lambda run: (
            all("eval/code_nll" in row for row in run.rows)
            and run.summary["code_nll_before"] == run.rows[0]["eval/code_nll"]
            and "code_nll_after" in run.summary
        )
    },
    "judge": {"present": lambda run: run.logs("judge/score")},
    "samples": {
        "of the reference": lambda run: all("reference" in row for row in run.samples)
    },
    "alternatives": {
        "present": lambda run: all("alternatives" in row for row in run.samples)
    },
    "alarms": {
        "present": lambda run: run.logs("alarms") or not run.logs("drift/relative")
    },
}


def dropped(run):
    """The choices of a run that left no trace."""
    return [
        f"{name}: {choice}"
        for name, choice in run.row.items()
        if choice in TRACES[name] and not TRACES[name][choice](run)
    ]
