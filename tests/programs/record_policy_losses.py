"""Records what TRL and verl compute as the losses of `functional.policy_losses`.

    python tests/programs/record_policy_losses.py FOLDER

Recorded with trl 1.16.0, verl 0.9.1, torch 2.14.1, Python 3.11, into
`tests/fixtures/policy_losses.npz`. It is run by hand in an environment with trl. FOLDER
holds verl's wheel unpacked: functions of one module are read, without what verl depends
on. No test imports this, and reading the file needs neither.

Inputs are those of `record_trl.py`. For each of TRL and VERL `CASE/loss` f32[] and
`CASE/gradient` f32[8, 6], by the log-probs. `opo` f32[8, 6] are verl's advantages of
two groups of four with `rewards`.
"""

import ast
import collections
import sys
import types
from pathlib import Path
from typing import Any, Optional

import numpy as np
import record_trl
import torch
from places import FIXTURES

TRL = {
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.02,
        "epsilon_high": 0.05,
    },
    "vespo": {"loss_type": "vespo"},
    "off_policy_mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
}
VERL = {  # function, lower and upper bound, cap of the ratio, aggregation
    "dppo_tv": ("dppo_tv", 0.05, 0.1, 1.4, "token-mean"),
    "dppo_kl": ("dppo_kl", 0.01, 0.02, 1.4, "token-mean"),
    "gmpo": ("geo_mean", 0.15, 0.25, None, "seq-mean-token-mean"),
}


class Config(types.SimpleNamespace):
    """Options as verl reads them: by attribute, and by `get` if they may be missing."""

    def get(self, name: str, default: float) -> float:
        value = getattr(self, name, None)
        return default if value is None else value


def read(file: Path, names: set[str], given: dict[str, Any]) -> types.SimpleNamespace:
    """The named functions of a module, without decorators."""
    space = dict(given)
    for part in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(part, ast.FunctionDef) and part.name in names:
            part.decorator_list = []
            exec(compile(ast.Module([part], []), str(file), "exec"), space)
    return types.SimpleNamespace(**space)


def verl(folder: Path, functions: set[str]) -> types.SimpleNamespace:
    """Functions of `verl.trainer.ppo.core_algos`, and `agg_loss`."""
    sums = read(
        folder / "verl/utils/torch_functional.py",
        {"masked_sum", "masked_mean"},
        {"torch": torch},
    )
    given: dict[str, Any] = {"torch": torch, "verl_F": sums, "Any": Any}
    given |= {"Optional": Optional, "ActorConfig": Config, "AlgoConfig": type(None)}
    given |= {"np": np, "defaultdict": collections.defaultdict}
    names = functions | {"agg_loss"}
    return read(folder / "verl/trainer/ppo/core_algos.py", names, given)


def of_verl(library, arrays, name, low, high, cap, aggregation):
    """(loss, gradient by the log-probs)."""
    logprobs = torch.tensor(arrays["logprobs"]).requires_grad_()
    mask = torch.tensor(arrays["mask"]).int()
    advantages = torch.tensor(arrays["advantages"])[:, None].expand(mask.shape)
    loss, _ = getattr(library, f"compute_policy_loss_{name}")(
        old_log_prob=torch.tensor(arrays["old_logprobs"]),
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=aggregation,
        config=Config(
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=cap,
            global_batch_info={},
        ),
    )
    loss.backward()
    return loss.detach().numpy(), logprobs.grad.numpy()


def main(folder: Path) -> None:
    arrays = record_trl.inputs()
    # Probabilities, which the divergences of DPPO read as such.
    arrays["logprobs"] = np.minimum(arrays["logprobs"], np.float32(-1e-3))
    recorded = dict(arrays)
    functions = {f"compute_policy_loss_{name}" for name, *_ in VERL.values()}
    library = verl(folder, functions | {"compute_opo_outcome_advantage"})
    for name, options in TRL.items():
        loss, gradient = record_trl.loss(arrays, **options)
        recorded |= {f"{name}/loss": loss, f"{name}/gradient": gradient}
    for name, options in VERL.items():
        loss, gradient = of_verl(library, arrays, *options)
        recorded |= {f"{name}/loss": loss, f"{name}/gradient": gradient}
    mask = torch.tensor(arrays["mask"])
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.tensor(arrays["rewards"])
    recorded["opo"], _ = library.compute_opo_outcome_advantage(
        rewards, mask, np.arange(8) // record_trl.GROUP
    )
    np.savez(FIXTURES / "policy_losses.npz", **recorded)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
