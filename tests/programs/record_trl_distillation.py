"""Records what TRL computes as the loss and gradient of distillation.

    PYTHONPATH=tests python tests/programs/record_trl_distillation.py

Recorded with trl 1.16.0, torch 2.14.1 (CPU), Python 3.11, into
`tests/fixtures/trl_distillation.npz`. It is run by hand in an environment with trl; no
test imports it, and reading the file needs neither.

Inputs, ragged on the right:

    logits, ref_logits    f32[3, 5, 11], of student and teacher
    mask                  bool[3, 5]
    temperature           f32[]
    betas                 f32[5]; 0 is TRL's forward KL, 1 its reverse KL

For each of them `losses` f32[5] and `gradients` f32[5, 3, 5, 11], by the student's
logits, of `GKDTrainer.generalized_jsd_loss`: the mean over the tokens of the mask.

Of SDPO, by `compute_topk_self_distillation_loss` with a bucket for the tail, without a
temperature: `sdpo_losses` f32[5, 3, 5] of every token, and `sdpo_gradients`
f32[5, 3, 5, 11] of their sum, with the `sdpo_k` likeliest tokens of the student.
"""

import numpy as np
import torch
from places import FIXTURES
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
LENGTHS = (5, 1, 3)
COLUMNS, VOCAB, TEMPERATURE, SDPO_K = 5, 11, 0.7, 4


def main() -> None:
    rng = np.random.default_rng(0)
    shape = (len(LENGTHS), COLUMNS, VOCAB)
    logits, ref_logits = rng.normal(0, 1.5, (2, *shape)).astype("f4")
    mask = np.arange(COLUMNS)[None, :] < np.array(LENGTHS)[:, None]
    labels = torch.tensor(np.where(mask, 0, -100))
    losses, gradients, sdpo_losses, sdpo_gradients = [], [], [], []
    for beta in BETAS:
        student = torch.tensor(logits).requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            student,
            torch.tensor(ref_logits),
            labels=labels,
            beta=beta,
            temperature=TEMPERATURE,
        )
        loss.backward()
        losses.append(loss.detach().numpy())
        gradients.append(student.grad.numpy())
        student = torch.tensor(logits).requires_grad_()
        tokens = compute_topk_self_distillation_loss(
            student,
            torch.tensor(ref_logits),
            distillation_topk=SDPO_K,
            distillation_alpha=beta,
            distillation_add_tail=True,
        )
        tokens.sum().backward()
        sdpo_losses.append(tokens.detach().numpy())
        sdpo_gradients.append(student.grad.numpy())
    np.savez(
        FIXTURES / "trl_distillation.npz",
        logits=logits,
        ref_logits=ref_logits,
        mask=mask,
        temperature=np.float32(TEMPERATURE),
        betas=np.float32(BETAS),
        losses=np.stack(losses),
        gradients=np.stack(gradients),
        sdpo_losses=np.stack(sdpo_losses),
        sdpo_gradients=np.stack(sdpo_gradients),
        sdpo_k=np.int32(SDPO_K),
    )


if __name__ == "__main__":
    main()
