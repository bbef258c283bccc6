"""Makes results.json and the tables from the responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_jax.evaluation import figures
from rlhf_jax.evaluation.figures import Figure, Kind, Response
from rlhf_jax.functional import best_of_n
from rlhf_jax.runs import report
from rlhf_jax.train.evaluate.options import Config

DECODINGS = ("sampled", "greedy")
SHOWN = {
    "failed": "without a score",
    "refused": "of tests that cannot be judged",
    "code_timed_out": "of code that is too slow",
    "observed": "observed [tokens]",
    "by_environment": "ended by the environment",
    "truncated": "ended within a turn",
    "out_of_turns": "ended by --max-turns",
    "out_of_room": "ended by --max-new-tokens",
    "length": "length [tokens]",
    "ended": "ended by a stop token",
    "distinct": "distinct, of a prompt",
    "distinct_overall": "distinct, of all",
    "log_perplexity": "log perplexity [nats per token]",
    "kl": "KL, exact [nats per response]",
    "kl_k1": "KL, k1 [nats per response]",
    "score_difference": "score less the reference's",
    "win_rate_by_score": "win rate by score",
    "win_rate_by_judge": "win rate by judge",
    "judge_prefers_first": "judge prefers the first",
}


def collected(
    responses: Sequence[Response], *, options: Config, answers: bool
) -> dict[str, Any]:
    """Returns the figures of all responses, as JSON; equal for equal responses.

    Args:
      answers: whether the verifier reads answers, which majority@k needs.
    """
    names = list(dict.fromkeys(response.model for response in responses))
    by_prompt = {
        (name, decoding): figures.by_prompt(responses, model=name, decoding=decoding)
        for name in names
        for decoding in DECODINGS
    }
    results: dict[str, Any] = {
        "prompts": len(by_prompt["policy", "sampled"]),
        "num_samples": options.num_samples,
        "temperature": options.temperature,
        "scored_by": next(iter(options.scorers.values()), None),
    }
    for name in names:
        results[name] = {
            decoding: _as_json(
                figures.of_model(
                    by_prompt[name, decoding],
                    kind=options.kind,
                    ks=options.levels if decoding == "sampled" else (1,),
                    answers=answers and decoding == "sampled",
                )
            )
            | {"distinct_overall": figures.distinct_share(by_prompt[name, decoding])}
            for decoding in DECODINGS
        }
    if "reference" in names:
        results["comparison"] = {
            decoding: _as_json(
                figures.compared(
                    by_prompt["policy", decoding],
                    by_prompt["reference", decoding],
                    kind=options.kind,
                )
            )
            for decoding in DECODINGS
        }
        if options.kind != "none":
            results["best_of_k"] = _best_of_k(
                results["reference"]["sampled"], kind=options.kind, ks=options.levels
            )
    if options.verifier is not None and not answers:
        results["left_out"] = {
            "majority": f"{options.verifier.name} has no answer(response)"
        }
    graded = sum(response.score not in (0.0, 1.0) for response in responses)
    if options.kind in figures.CHECKED and graded:
        results["graded"] = graded
    return results


def _best_of_k(
    of_reference: dict[str, Any], *, kind: Kind, ks: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the scores of the reference's best of k responses, with a KL bound."""
    name = "pass" if kind == "verifier" else "best"
    return [
        {"k": k, "kl_at_most": best_of_n.kl_bound(k)} | of_reference[f"{name}@{k}"]
        for k in ks
    ]


def tell(results: dict[str, Any]) -> None:
    """Prints tables for samples, greedy responses, best-of-k and texts."""
    counts = {"sampled": results["num_samples"], "greedy": 1}
    for decoding, count in counts.items():
        theirs = results.get("reference", {}).get(decoding, {})
        rows = [
            (name, figure, theirs.get(name))
            for name, figure in results["policy"][decoding].items()
        ]
        compared = results.get("comparison", {}).get(decoding, {})
        rows += [(name, figure, None) for name, figure in compared.items()]
        columns = ["", "policy", "reference"] if theirs else ["", "policy"]
        report.table(
            f"{decoding.capitalize()}: {count} of each of {results['prompts']} "
            f"prompts; 95% intervals",
            columns,
            [
                (SHOWN.get(name, name), *(_cell(x, of=name) for x in figures))[
                    : len(columns)
                ]
                for name, *figures in rows
            ],
        )
    if "best_of_k" in results:
        policy = results["policy"]["sampled"]
        beside = policy.get("pass@1", policy.get("best@1"))
        report.table(
            "The policy beside the best of k of the reference",
            ("", "score", "KL [nats per response]"),
            [
                ("policy", _cell(beside, of="score"), _cell(policy["kl"], of="kl")),
                *(
                    (
                        f"reference, best of {best['k']}",
                        _cell(best, of="score"),
                        f"at most {best['kl_at_most']:.3g}",
                    )
                    for best in results["best_of_k"]
                ),
            ],
        )
    for why in results.get("left_out", {}).items():
        print("left out: {}@k, as {}".format(*why))
    if "graded" in results:
        print(
            f"{results['graded']} responses have a score other than 0 and 1: pass@k "
            f"and majority@k count those of 1 alone"
        )
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


def _cell(figure: dict[str, Any] | float | None, *, of: str) -> str:
    """Formats a figure with its interval, or a number without one."""
    if figure is None:
        return ""
    if not isinstance(figure, dict):
        return f"{report.resolved(figure, of=of):.3g}"
    mean, low, high = (
        None if x is None else f"{report.resolved(x, of=of):.3g}"
        for x in (figure["mean"], figure["low"], figure["high"])
    )
    return f"{mean}" if low is None else f"{mean} ({low} to {high})"
