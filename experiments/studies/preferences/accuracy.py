"""The accuracy of two reward models on pairs that neither was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.checkpoints import hf
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example, Pair
from rlhf_jax.evaluation import figures
from rlhf_jax.roles import rewards
from rlhf_jax.runs import report

BATCH_SIZE = 8
Floats = npt.NDArray[np.floating]


def leads(model_folder: Path, pairs: Sequence[Pair], *, pad_id: int) -> Floats:
    """Score of the chosen response minus that of the rejected one, for each pair.

    Args:
      model_folder: the reward model, OUT/model of `rlhf-jax reward-model`.
    """
    model, params = hf.load_reward(model_folder)

    @jax.jit
    def score(params: Any, texts: Sequences) -> jax.Array:
        return rewards.sequence_scores(
            params, model=model, tokens=texts.tokens, mask=texts.mask
        )

    sides = [Example(pair.prompt, pair.chosen) for pair in pairs]
    sides += [Example(pair.prompt, pair.rejected) for pair in pairs]
    texts = batches.sequences_in_order(sides, batch_size=BATCH_SIZE, pad_id=pad_id)
    scores = np.concatenate([np.asarray(score(params, text)) for text in texts])
    chosen, rejected = np.split(scores[: len(sides)], 2)
    return chosen - rejected


def summarise(of_models: Mapping[str, Floats]) -> dict[str, Any]:
    """Accuracies and agreement, shares of the pairs with Wilson's 95% intervals.

    Args:
      of_models: `leads` of the proxy and of the judge on the same pairs.

    Returns:
      "accuracy" of each; "agreement", the share of pairs in which both prefer the same
      side; "expected_agreement", that share if they were independent with these
      accuracies; "correlation" of their leads, None if one is constant.
    """
    signs = {name: lead > 0 for name, lead in of_models.items()}
    accuracies = {name: _share(right) for name, right in signs.items()}
    proxy, judge = signs.values()
    p, q = (share["mean"] for share in accuracies.values())
    ours, theirs = of_models.values()
    varied = np.ptp(ours) > 0 and np.ptp(theirs) > 0
    return {
        "pairs": len(proxy),
        "accuracy": accuracies,
        "agreement": _share(proxy == judge),
        "expected_agreement": p * q + (1 - p) * (1 - q),
        "correlation": float(np.corrcoef(ours, theirs)[0, 1]) if varied else None,
    }


def tell(measured: Mapping[str, Any]) -> None:
    """Prints the result of `summarise` as a table."""
    rows = [
        *((f"accuracy of the {n}", of) for n, of in measured["accuracy"].items()),
        ("both prefer the same side", measured["agreement"]),
    ]
    report.table(
        f"On {measured['pairs']} held-out pairs; 95% intervals",
        ("", "share"),
        [
            (name, f"{of['mean']:.2f} ({of['low']:.2f} to {of['high']:.2f})")
            for name, of in rows
        ],
    )


def _share(outcomes: npt.NDArray[np.bool_]) -> dict[str, Any]:
    return figures.over_prompts(outcomes.astype(float).tolist(), trials=True)._asdict()
