"""From responses to results.json and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_jax.evaluation import figures
from rlhf_jax.evaluation.figures import Figure, Response
from rlhf_jax.runs import report
from rlhf_jax.train.evaluate.options import Config

DECODINGS = ("sampled", "greedy")
UNITS = {
    "length": "length [tokens]",
    "ended": "ended (share)",
    "distinct": "distinct per prompt (share)",
    "log_perplexity": "log perplexity under the reference [nats per token]",
    "kl": "KL to the reference, exact [nats per response]",
    "kl_k1": "KL to the reference, k1 [nats per response]",
    "score_difference": "score, policy less reference",
    "win_rate_by_score": "win rate by score",
    "win_rate_by_judge": "win rate by judge, both orders",
    "judge_prefers_first": "judge prefers what it reads first",
}


def collected(
    responses: Sequence[Response], *, options: Config, answers: bool
) -> dict[str, Any]:
    """The figures of all responses, as JSON; equal for equal responses.

    Args:
      responses: of all prompts.
      options: of the run.
      answers: whether the verifier reads answers, which majority@k needs.
    """
    names = list(dict.fromkeys(each.model for each in responses))
    of = {
        (name, decoding): figures.by_prompt(responses, model=name, decoding=decoding)
        for name in names
        for decoding in DECODINGS
    }
    results: dict[str, Any] = {
        "prompts": len(of["policy", "sampled"]),
        "num_samples": options.num_samples,
        "temperature": options.temperature,
        "scored_by": options.verifier or options.reward or options.reward_model,
    }
    for name in names:
        results[name] = {
            decoding: _as_json(
                figures.of_model(
                    of[name, decoding],
                    kind=options.kind,
                    ks=options.levels if decoding == "sampled" else (1,),
                    answers=answers and decoding == "sampled",
                )
            )
            | {"distinct_overall": figures.distinct_share(of[name, decoding])}
            for decoding in DECODINGS
        }
    if "reference" in names:
        results["comparison"] = {
            decoding: _as_json(
                figures.compared(
                    of["policy", decoding],
                    of["reference", decoding],
                    kind=options.kind,
                )
            )
            for decoding in DECODINGS
        }
    if options.kind == "verifier" and not answers:
        results["left_out"] = {
            "majority": f"{options.verifier} says of no response which answer it reads"
        }
    return results


def tell(results: dict[str, Any]) -> None:
    """Prints the table, and the losses of texts below it."""
    rows = []
    for decoding in DECODINGS:
        ours = results["policy"][decoding]
        theirs = results.get("reference", {}).get(decoding, {})
        for name, figure in ours.items():
            if isinstance(figure, dict):
                both = (*_cells(figure), *_cells(theirs.get(name)))
            else:  # a share of all responses, which has no interval
                both = (figure, "", theirs.get(name), "")
            rows.append((f"{decoding}: {UNITS.get(name, name)}", *both))
        for name, figure in results.get("comparison", {}).get(decoding, {}).items():
            rows.append((f"{decoding}: {UNITS[name]}", *_cells(figure), None, ""))
    report.table(
        f"{results['prompts']} prompts, {results['num_samples']} samples of each",
        ("", "policy", "95% interval", "reference", "95% interval"),
        rows,
    )
    for why in results.get("left_out", {}).items():
        print("left out: {}@k, as {}".format(*why))
    if "texts" in results:
        texts = results["texts"]
        report.table(
            "Held-out texts",
            ("", "policy", "reference", "forgetting"),
            [
                (
                    "loss [nats per token]",
                    texts["policy_loss"],
                    texts.get("reference_loss"),
                    texts.get("forgetting"),
                )
            ],
        )


def _as_json(of: dict[str, Figure]) -> dict[str, Any]:
    return {name: figure._asdict() for name, figure in of.items()}


def _cells(figure: dict[str, Any] | None) -> tuple[float | None, str]:
    """The mean and its interval, as the table shows them."""
    if figure is None:
        return None, ""
    interval = ""
    if figure["low"] is not None:
        interval = f"{figure['low']:.4g} to {figure['high']:.4g}"
    return figure["mean"], interval
