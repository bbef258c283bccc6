"""Records what TRL and verl compute: tokens that are chosen, several rewards.

    python tests/programs/record_regularisers.py FOLDER

Recorded with trl 1.16.0, verl 0.9.1, torch 2.13.0, Python 3.11, into
`tests/fixtures/regularisers.npz`. It is run by hand in an environment with trl. FOLDER
holds verl's wheel unpacked, as for `record_policy_losses.py`.

Inputs are those of `record_trl.py`, with entropies, f32[8, 6] nats. For each CASE
`CASE/loss` f32[] and `CASE/gradient` f32[8, 6], by the log-probs. Shares are of the 30
tokens; those of Clip-Cov are as many as there are within its bounds, of which verl then
draws none by chance. verl reads the covariances of the log-probs that learn.
`gdpo` f32[8] are the advantages of `several` f32[2, 8], weighted 1 and 0.5.
`entropy_coefs` f32[10] are those after steps with entropies `entropies` f32[10], from
0.005 and with the options of `CONTROL`.
"""

import collections
import sys
import types
from pathlib import Path

import numpy as np
import record_policy_losses
import record_trl
import torch
import trl
from places import FIXTURES

NO_CLIP = 1e3
VERL = {  # options of `policy_loss`
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.5, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
}


def of_verl(library, arrays, name):
    """(loss, gradient by the log-probs)."""
    logprobs = torch.tensor(arrays["logprobs"]).requires_grad_()
    mask = torch.tensor(arrays["mask"]).int()
    advantages = torch.tensor(arrays["advantages"])[:, None].expand(mask.shape)
    loss, _ = getattr(library, f"compute_policy_loss_{name}")(
        old_log_prob=torch.tensor(arrays["old_logprobs"]),
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=record_policy_losses.Config(
            clip_ratio=NO_CLIP,
            clip_ratio_low=NO_CLIP,
            clip_ratio_high=NO_CLIP,
            global_batch_info={},
            policy_loss=types.SimpleNamespace(**VERL[name]),
        ),
    )
    loss.backward()
    return loss.detach().numpy(), logprobs.grad.numpy()


CONTROL = {"entropy_target": 0.5, "entropy_coef_delta": 0.01}
CONTROL |= {"entropy_coef_min": 0.0, "entropy_coef_max": 0.03}


def entropy_coefs(arrays, entropies):
    """The coefficients of TRL's `use_adaptive_entropy`, each after a step."""
    coefs, coef = [], 0.005
    for entropy in entropies:
        metrics = {"train": collections.defaultdict(list)}
        record_trl.loss(
            arrays | {"entropy": np.full(arrays["mask"].shape, entropy, "f4")},
            "dapo",
            args=CONTROL,
            trainer={
                "_entropy_bonus_enabled": True,
                "use_adaptive_entropy": True,
                "entropy_coef": coef,
                "_last_world_entropy": 9.0,
                "_entropy_window_stats": None,
                "_metrics": metrics,
                "accelerator": types.SimpleNamespace(
                    num_processes=1,
                    gather=lambda x: x,
                    reduce=lambda x, reduction: x,
                    sync_gradients=True,
                ),
            },
        )
        (coef,) = metrics["train"]["entropy_coef"]
        coefs.append(coef)
    return coefs


def main(folder: Path) -> None:
    arrays = record_trl.inputs()
    entropy = np.random.default_rng(5).uniform(0.1, 2.0, arrays["mask"].shape)
    arrays["entropy"] = entropy.astype("f4")
    recorded = dict(arrays)
    losses = {f"compute_policy_loss_{name}" for name in VERL}
    library = record_policy_losses.verl(folder, losses)
    for name in VERL:
        loss, gradient = of_verl(library, arrays, name)
        recorded |= {f"{name}/loss": loss, f"{name}/gradient": gradient}
    loss, gradient = record_trl.loss(arrays, "dapo", top_entropy_quantile=0.2)
    recorded |= {"top_entropy/loss": loss, "top_entropy/gradient": gradient}
    several = [[1, 0, 0.5, 0, 1, 1, 0.25, 1], [3, 9, 3, 1, 2, 2, 2, 7]]
    recorded["several"] = np.array(several, "f4")
    recorded["gdpo"] = record_trl.advantages(
        trl.GRPOTrainer,
        trl.GRPOConfig,
        several,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=[1.0, 0.5],
    )
    recorded["entropies"] = np.array(
        [0.4, 0.5, 0.3, 0.2, 0.1, 0.51, 0.9, 0.8, 0.7, 0.6], "f4"
    )
    coefs = entropy_coefs(arrays, recorded["entropies"])
    recorded["entropy_coefs"] = np.array(coefs, "f4")
    np.savez(FIXTURES / "regularisers.npz", **recorded)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
