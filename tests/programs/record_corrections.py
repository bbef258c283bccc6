"""Records what TRL and verl compute as importance weights and rejections.

    python tests/programs/record_corrections.py FOLDER

Recorded with trl 1.16.0, verl 0.9.1, torch 2.14.1 (CPU), Python 3.11, into
`tests/fixtures/sampler_corrections.npz`. It is run by hand in an environment with trl.
FOLDER holds verl's wheel unpacked: one module of it is read, without what verl depends
on. No test imports this, and reading the file needs neither.

Inputs, ragged on the right, of eight responses:

    logprobs, old_logprobs, sampler_logprobs, ref_logprobs    f32[8, 6], nats
    mask                                                      bool[8, 6]
    advantages                                                f32[8]

`trl/MODE/weights` f32[8, 6] is `importance_sampling_ratio` of a `GRPOTrainer` in each
of its modes, `trl/MODE/loss` f32[] and `trl/MODE/gradient` f32[8, 6], by `logprobs`,
the loss of DAPO with it. `verl/LEVEL/BOUNDS` f32[8, 6] are the weights of
`compute_rollout_correction_weights`, `verl/reject/STATISTIC` bool[8, 6] the mask that
`compute_rollout_rejection_mask` leaves, `verl/ess` f32[] the effective sample size of
`token/2.0`. `trl/kl/loss` and `trl/kl/gradient` are the KL that
`use_bias_correction_kl` gives, alone.
"""

import ast
import collections
import inspect
import math
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import record_trl
import torch
import trl
from places import FIXTURES

CAP, FLOOR = 2.0, 0.5
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def inputs():
    """The inputs of every case."""
    rng = np.random.default_rng(1)
    shape = (record_trl.ROWS, record_trl.COLUMNS)
    sampler = -np.abs(rng.normal(0, 1, shape))
    old = sampler + rng.normal(0, 0.9, shape)
    lengths = np.array(record_trl.LENGTHS)
    return {
        "logprobs": (old + rng.normal(0, 0.3, shape)).astype("f4"),
        "old_logprobs": old.astype("f4"),
        "sampler_logprobs": sampler.astype("f4"),
        "ref_logprobs": (old + rng.normal(0, 0.5, shape)).astype("f4"),
        "mask": np.arange(shape[1])[None, :] < lengths[:, None],
        "advantages": rng.normal(0, 1, shape[0]).astype("f4"),
    }


def verl(folder):
    """`verl.trainer.ppo.rollout_corr_helper`, with the sums over masks of verl."""
    text = (folder / "verl/utils/torch_functional.py").read_text(encoding="utf-8")
    sums = types.ModuleType("verl.utils.torch_functional")
    sums.torch = torch
    for part in ast.parse(text).body:
        if getattr(part, "name", None) in ("masked_sum", "masked_mean"):
            exec(compile(ast.Module([part], []), "verl", "exec"), vars(sums))
    sys.modules[sums.__name__] = sums
    names = {
        "verl": "",
        "verl.utils": "",
        "verl.protocol": "DataProto",
        "verl.trainer": "",
        "verl.trainer.config": "",
        "verl.trainer.config.algorithm": "RolloutCorrectionConfig",
        "verl.workers": "",
        "verl.workers.config": "",
        "verl.workers.config.actor": "PolicyLossConfig",
    }
    for name, attribute in names.items():
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = []
        if attribute:
            setattr(module, attribute, object)
    sys.modules["verl.utils"].torch_functional = sums
    helper = types.ModuleType("rollout_corr_helper")
    source = folder / "verl/trainer/ppo/rollout_corr_helper.py"
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(helper))
    return helper


def trl_weights(tensors, mode):
    """f32[8, 1 or 6], by the lines of `_generate_and_score_completions` for it."""
    method = trl.GRPOTrainer._generate_and_score_completions
    lines = inspect.getsource(method).split("\n")
    start = next(i for i, line in enumerate(lines) if "logps_diff = (old" in line)
    end = next(i for i, line in enumerate(lines) if "for the reference model" in line)
    trainer = types.SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=FLOOR if mode.endswith("mask") else None,
        vllm_importance_sampling_clip_max=CAP,
    )
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "mask": tensors["mask"].int(),
        "old_per_token_logps": tensors["old_logprobs"],
        "sampling_per_token_logps": tensors["sampler_logprobs"],
    }
    exec(textwrap.dedent("\n".join(lines[start:end])), names)
    return names["vllm_importance_sampling_ratio"]


def trl_loss(tensors, *, weights=None, beta=0.0):
    """(loss, gradient by the log-probs) of DAPO's `_compute_loss`."""
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = tensors["mask"].int()
    args = types.SimpleNamespace(
        delta=None, steps_per_generation=1, use_bias_correction_kl=True
    )
    trainer = types.SimpleNamespace(
        args=args,
        loss_type="dapo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=beta,
        max_completion_length=record_trl.COLUMNS,
        current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=False,
        ),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    nothing = torch.zeros((record_trl.ROWS, 0), dtype=torch.int64)
    value = trl.GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
            "completion_mask": mask,
            "advantages": tensors["advantages"] * (0.0 if beta else 1.0),
            "old_per_token_logps": tensors["old_logprobs"],
            "ref_per_token_logps": tensors["ref_logprobs"],
            "importance_sampling_ratio": weights,
            "num_items_in_batch": mask.sum(),
        },
    )
    value.backward()
    return value.detach().numpy(), logprobs.grad.numpy()


def main() -> None:
    arrays = inputs()
    recorded = dict(arrays)
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    for mode in MODES:
        weights = trl_weights(tensors, mode)
        recorded[f"trl/{mode}/weights"] = weights.expand(arrays["mask"].shape).numpy()
        recorded[f"trl/{mode}/loss"], recorded[f"trl/{mode}/gradient"] = trl_loss(
            tensors, weights=weights
        )
    recorded["trl/kl/loss"], recorded["trl/kl/gradient"] = trl_loss(tensors, beta=1.0)
    helper = verl(Path(sys.argv[1]))
    mask = tensors["mask"].float()
    log_ratio = (tensors["old_logprobs"] - tensors["sampler_logprobs"]) * mask
    for level in ("token", "sequence"):
        for bounds in (f"{CAP}", f"{FLOOR}_{CAP}"):
            weights, metrics = helper.compute_rollout_correction_weights(
                log_ratio, mask, rollout_is=level, rollout_is_threshold=bounds
            )
            recorded[f"verl/{level}/{bounds}"] = weights.numpy()
            if (level, bounds) == ("token", f"{CAP}"):
                recorded["verl/ess"] = np.float32(metrics["rollout_is_eff_sample_size"])
    # Its bounds are of μ/π_old.
    bounds = f"{1 / CAP}_{1 / FLOOR}"
    for statistic in ("seq_sum_k1", "seq_mean_k1"):
        accepted, _ = helper.compute_rollout_rejection_mask(
            log_ratio, mask, rollout_rs=statistic, rollout_rs_threshold=bounds
        )
        recorded[f"verl/reject/{statistic}"] = accepted.numpy().astype(bool)
    np.savez(FIXTURES / "sampler_corrections.npz", **recorded)


if __name__ == "__main__":
    main()
