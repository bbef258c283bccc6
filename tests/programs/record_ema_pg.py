"""Records the top-k KL of the authors of EMA-PG, arXiv:2602.04417.

    git clone https://github.com/LunjunZhang/ema-pg
    python tests/programs/record_ema_pg.py ema-pg tests/fixtures/ema_pg.npz

Needs PyTorch. Runs only the two functions of search/verl/trainer/ppo/core_algos.py
that compute the KL; `ema_pg.npz` is of commit f9b9776. Rows have 5, 3 and 1 tokens.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = "search/verl/trainer/ppo/core_algos.py"
NAMES = ("compute_not_in_topk_mask", "compute_memory_efficient_kl")
ROWS, COLUMNS, VOCAB, K = 3, 5, 11, 4


def functions(checkout: Path) -> dict[str, Any]:
    """The functions of `NAMES`, without their module's imports."""
    tree = ast.parse((checkout / FILE).read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in NAMES
    ]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(tree, FILE, "exec"), scope)
    return scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (ROWS, COLUMNS, VOCAB)
    drawn = [rng.normal(0, 1.5, shape).astype(np.float32) for _ in range(2)]
    tokens = rng.integers(0, VOCAB, shape[:2])
    mask = np.arange(COLUMNS)[None] < np.array([5, 3, 1])[:, None]
    logits = torch.tensor(drawn[0], requires_grad=True)
    ref_logits, ids = torch.tensor(drawn[1]), torch.tensor(tokens)

    def of_tokens(table: torch.Tensor) -> torch.Tensor:
        return table.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    top = logits.detach().topk(K, dim=-1).indices
    head, tail = functions(options.checkout)["compute_memory_efficient_kl"](
        logits.gather(-1, top),
        logits.logsumexp(-1),
        ref_logits.gather(-1, top),
        ref_logits.logsumexp(-1),
        kl_type="full_reverse",
        use_tail_sampling=True,
        actor_topk_indices=top,
        sampled_indices=ids,
        log_prob=of_tokens(logits),
        ref_log_prob=of_tokens(ref_logits),
    )
    kl = (head + tail) * torch.tensor(mask)
    kl.sum().backward()
    np.savez(
        options.out,
        logits=drawn[0],
        ref_logits=drawn[1],
        tokens=tokens,
        mask=mask,
        k=K,
        kl=kl.detach().numpy(),
        gradient=logits.grad.numpy(),
    )


if __name__ == "__main__":
    main()
