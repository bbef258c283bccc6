"""Records what TRL's trainers of preferences compute as loss and gradient.

    python tests/programs/record_trl_preferences.py

Recorded with trl 1.16.0, torch 2.13.0 (CPU), Python 3.11, into
`tests/fixtures/trl_preferences.npz`. It is run by hand in an environment with trl; no
test imports it, and reading the file needs neither.

Inputs, of eight responses of one to six tokens, the chosen of four pairs before the
rejected; for KTO each stands alone, with a label:

    logprobs, ref_logprobs         f32[8, 6], nats, 0 outside the mask
    kl_logprobs, ref_kl_logprobs   f32[8, 6], nats, of responses to other prompts
    mask                           bool[8, 6]
    desirable                      bool[8]

For each case `CASE/loss` f32[], `CASE/gradient` f32[8, 6], by `logprobs`; `CASE` is
sigmoid and robust (`DPOTrainer`), simpo and cdpo (`CPOTrainer`, for cdpo its smoothed
sigmoid of log-ratios), orpo_odds (`ORPOTrainer`, its term of the odds alone), kto and
kto_clipped (`KTOTrainer`, whose z0 is `CASE/kl`).
"""

import collections
import types

import numpy as np
import torch
import trl
from places import FIXTURES
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

ROWS, COLUMNS = 8, 6
LENGTHS = (6, 1, 3, 4, 2, 5, 6, 3)
ACCELERATOR = types.SimpleNamespace(
    device="cpu",
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    unwrap_model=lambda x: x,
)


def inputs():
    """The inputs of every case."""
    rng = np.random.default_rng(0)
    mask = np.arange(COLUMNS)[None, :] < np.array(LENGTHS)[:, None]
    arrays = {"ref_logprobs": -np.abs(rng.normal(0, 1, (ROWS, COLUMNS)))}
    arrays["logprobs"] = arrays["ref_logprobs"] + rng.normal(0, 0.4, (ROWS, COLUMNS))
    arrays["logprobs"] = np.minimum(arrays["logprobs"], -0.02)
    arrays["ref_kl_logprobs"] = -np.abs(rng.normal(0, 1, (ROWS, COLUMNS)))
    arrays["kl_logprobs"] = arrays["ref_kl_logprobs"] + 0.1
    arrays = {name: (x * mask).astype("f4") for name, x in arrays.items()}
    return arrays | {
        "mask": mask,
        "desirable": np.array([1, 0, 1, 1, 0, 0, 1, 0], bool),
    }


def outputs(logprobs):
    """The output of a model with TRL's fused head."""
    nothing = torch.zeros_like(logprobs)
    return types.SimpleNamespace(
        log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0
    )


def tensors(arrays):
    """The arrays as tensors; log-probs have a gradient, masks a prompt token first."""
    of = {name: torch.tensor(value) for name, value in arrays.items()}
    of["leaf"] = of["logprobs"].requires_grad_()
    of["logprobs"] = of["leaf"] * of["mask"]  # a model's are 0 outside its labels
    first = torch.zeros((ROWS, 1), dtype=torch.bool)
    of["completion"] = torch.cat([first, of["mask"]], dim=1).int()
    return of


def dpo(arrays, loss_type, label_smoothing=0.0):
    """(loss, gradient) of `DPOTrainer._compute_loss`, without models."""
    of = tensors(arrays)
    model = lambda **_: outputs(of["logprobs"])  # noqa: E731
    ref_sums = of["ref_logprobs"].sum(dim=1).chunk(2)
    trainer = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": collections.defaultdict(list)},
    )
    loss = trl.DPOTrainer._compute_loss(
        trainer,
        model,
        {
            "input_ids": torch.zeros((ROWS, COLUMNS + 1), dtype=torch.int64),
            "attention_mask": torch.ones((ROWS, COLUMNS + 1), dtype=torch.int64),
            "completion_mask": of["completion"],
            "ref_chosen_logps": ref_sums[0],
            "ref_rejected_logps": ref_sums[1],
        },
        False,
    )
    loss.backward()
    return loss.detach().numpy(), of["leaf"].grad.numpy()


def log_ratios(of):
    """Sums of log π/π_ref of the chosen and the rejected responses."""
    return (of["logprobs"] - of["ref_logprobs"]).sum(dim=1).chunk(2)


def means(of):
    """Mean log-probs of the chosen and the rejected responses."""
    return (of["logprobs"].sum(dim=1) / of["mask"].sum(dim=1)).chunk(2)


def cpo(arrays, loss_type, beta, label_smoothing, read):
    """(loss, gradient) of `CPOTrainer.cpo_loss` on `read` of the arrays."""
    of = tensors(arrays)
    trainer = types.SimpleNamespace(
        alpha=0.0,
        loss_type=loss_type,
        simpo_gamma=0.5,
        beta=beta,
        label_smoothing=label_smoothing,
        accelerator=ACCELERATOR,
    )
    loss = CPOTrainer.cpo_loss(trainer, *read(of))[0].mean()
    loss.backward()
    return loss.detach().numpy(), of["leaf"].grad.numpy()


def orpo_odds(arrays):
    """(loss, gradient) of `ORPOTrainer.odds_ratio_loss`, which is to be subtracted."""
    of = tensors(arrays)
    trainer = types.SimpleNamespace(beta=0.2, accelerator=ACCELERATOR)
    loss = -ORPOTrainer.odds_ratio_loss(trainer, *means(of))[0].mean()
    loss.backward()
    return loss.detach().numpy(), of["leaf"].grad.numpy()


def kto(arrays, shift):
    """(loss, gradient, z0) of `KTOTrainer._compute_loss`, without models."""
    of = tensors(arrays)
    kl_logprobs = of["kl_logprobs"].sum(dim=1) + shift
    trainer = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.0,
        undesirable_weight=1.5,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": collections.defaultdict(list)},
        _compute_kl_logps=lambda model, batch: kl_logprobs,
    )
    loss = trl.KTOTrainer._compute_loss(
        trainer,
        lambda **_: outputs(of["logprobs"]),
        {
            "input_ids": torch.zeros((ROWS, COLUMNS + 1), dtype=torch.int64),
            "attention_mask": torch.ones((ROWS, COLUMNS + 1), dtype=torch.int64),
            "completion_mask": of["completion"],
            "label": of["desirable"],
            "ref_logps": of["ref_logprobs"].sum(dim=1),
            "ref_KL_logps": of["ref_kl_logprobs"].sum(dim=1),
        },
        False,
    )
    loss.backward()
    z0 = trainer._metrics["train"]["kl"][0]
    return loss.detach().numpy(), of["leaf"].grad.numpy(), np.float32(z0)


def main() -> None:
    arrays = inputs()
    recorded = dict(arrays)
    cases = {
        "sigmoid": dpo(arrays, "sigmoid"),
        "robust": dpo(arrays, "robust", 0.2),
        "cdpo": cpo(arrays, "sigmoid", 0.3, 0.2, log_ratios),
        "simpo": cpo(arrays, "simpo", 2.0, 0.0, means),
        "orpo_odds": orpo_odds(arrays),
        "kto": kto(arrays, 0.0),
        "kto_clipped": kto(arrays, -2.0),
    }
    for name, (loss, gradient, *kl) in cases.items():
        recorded[f"{name}/loss"], recorded[f"{name}/gradient"] = loss, gradient
        if kl:
            recorded[f"{name}/kl"] = kl[0]
    np.savez(FIXTURES / "trl_preferences.npz", **recorded)


if __name__ == "__main__":
    main()
