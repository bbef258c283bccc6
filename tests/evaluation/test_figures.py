"""Figures over prompts, from made-up responses."""

import dataclasses
import math

import numpy as np
import pytest

from rlhf_jax.evaluation import figures, success
from rlhf_jax.evaluation.figures import Response

FIRST = Response(
    model="policy",
    decoding="sampled",
    row=0,
    sample=0,
    prompt="p",
    response="a",
    length=2,
    ended=True,
    score=1.0,
    failed=False,
    answer="a",
    logprob=-1.0,
    ref_logprob=-3.0,
    kl=0.5,
    k1=2.0,
    verdict=None,
)


def responses(scores, *, texts="abcd", **fields):
    """Responses with one prompt per row of scores."""
    return [
        dataclasses.replace(
            FIRST,
            row=row,
            sample=sample,
            score=score,
            response=texts[sample],
            answer=texts[sample],
            **fields,
        )
        for row, of_prompt in enumerate(scores)
        for sample, score in enumerate(of_prompt)
    ]


def of(made, **changes):
    prompts = figures.by_prompt(made, model="policy", decoding="sampled")
    options = {"kind": "verifier", "ks": (1, 2, 4), "answers": True} | changes
    return prompts, figures.of_model(prompts, **options)


def test_a_mean_and_its_interval_are_over_prompts():
    """Two prompts with means 0.5 and 1: s = 0.3536, t(0.975, 1) = 12.706."""
    _, figures_of = of(responses([[1, 0], [1, 1]]))
    half = 12.7062 * math.sqrt(0.125) / math.sqrt(2)
    assert figures_of["score"] == pytest.approx(
        (0.75, 0.75 - half, 0.75 + half, 2), abs=1e-3
    )
    assert figures_of["pass@1"] == (0.75, 0.0, 1.0, 2)  # a share: cut to [0, 1]
    assert figures_of["pass@2"] == pytest.approx(
        (1.0, *wilson(2, 2), 2)
    )  # one outcome each
    assert figures_of["ended"] == (1.0, None, None, 2)  # equal in all prompts
    assert figures_of["majority@2"].mean == 0.75  # a tie of the first prompt
    assert "pass@4" not in figures_of  # of two samples
    assert (figures_of["length"].mean, figures_of["ended"].mean) == (2.0, 1.0)
    assert figures_of["log_perplexity"].mean == 1.5
    assert (figures_of["kl"].mean, figures_of["kl_k1"].mean) == (0.5, 2.0)


def test_one_prompt_has_no_interval():
    _, figures_of = of(responses([[1, 0]]))
    assert figures_of["score"] == (0.5, None, None, 1)


def wilson(right, count):
    """The two shares p at z standard errors from `right` of `count`."""
    share, z = right / count, 1.959964
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    half *= z / (1 + z**2 / count)
    return middle - half, middle + half


def test_one_sample_of_each_prompt_has_wilson_s_interval():
    made = responses([[1.0], [0.0], [0.0], [0.0]], ended=False)
    _, figures_of = of(made, ks=(1,))
    share = pytest.approx((0.25, *wilson(1, 4), 4), abs=1e-6)
    assert (
        figures_of["score"] == figures_of["pass@1"] == figures_of["majority@1"] == share
    )
    none = pytest.approx((0.0, *wilson(0, 4), 4), abs=1e-6)
    assert figures_of["ended"] == figures_of["failed"] == none
    # A reward is no outcome of a trial, though it may be 0 or 1 every time; and a
    # verifier may grade.
    spread = 0.25 - 3.182446 * 0.25  # t(0.975, 3), s/√P
    _, figures_of = of(made, kind="reward", ks=(1,))
    assert (
        figures_of["score"].low
        == figures_of["best@1"].low
        == pytest.approx(spread, abs=1e-5)
    )
    _, figures_of = of(responses([[0.5], [0.0], [0.0], [0.0]]), ks=(1,))
    assert figures_of["score"].low == pytest.approx(spread / 2, abs=1e-5)
    assert figures_of["pass@1"] == pytest.approx((0.0, *wilson(0, 4), 4), abs=1e-6)


def test_several_samples_of_a_prompt_keep_student_s_t_but_for_pass_at_all_of_them():
    _, figures_of = of(responses([[1, 1], [0, 0], [0, 0], [0, 0]]))
    t = (0.25, 0.0, 1.0, 4)  # 0.25 ± 3.182·0.25, cut
    assert (
        figures_of["pass@1"]
        == figures_of["majority@1"]
        == figures_of["majority@2"]
        == t
    )
    assert figures_of["pass@2"] == pytest.approx((0.25, *wilson(1, 4), 4), abs=1e-6)


def test_win_rates_of_one_pair_per_prompt():
    def compared(ours, verdicts):
        theirs = [[0.0]] * len(ours)
        policy, reference = (
            figures.by_prompt(made, model=model, decoding="sampled")
            for model, made in {
                "policy": responses([[score] for score in ours]),
                "reference": responses(theirs, model="reference"),
            }.items()
        )
        policy = [
            [dataclasses.replace(response, verdict=verdict)]
            for (response,), verdict in zip(policy, verdicts, strict=True)
        ]
        return figures.compared(policy, reference, kind="reward")

    figures_of = compared([1.0, 2.0, -1.0], [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)])
    wins = pytest.approx((2 / 3, *wilson(2, 3), 3), abs=1e-6)
    assert figures_of["win_rate_by_score"] == figures_of["win_rate_by_judge"] == wins
    # ½ of a tie, or of a judge that prefers what it reads first, is no outcome.
    figures_of = compared([1.0, 0.0, -1.0], [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)])
    for name in ("win_rate_by_score", "win_rate_by_judge"):
        assert figures_of[name] == (0.5, 0.0, 1.0, 3)  # ½ ± 4.303·½/√3, cut


@pytest.mark.parametrize(("rate", "coverage"), [(0.05, 0.939), (0.5, 0.957)])
def test_wilson_s_interval_of_30_prompts_holds_the_truth(rate, coverage):
    """Summed over all counts of right responses, weighted by probability."""
    total = 0.0
    for right in range(31):
        values = [1.0] * right + [0.0] * (30 - right)
        figure = figures.over_prompts(values, share=True, trials=True)
        likely = math.comb(30, right) * rate**right * (1 - rate) ** (30 - right)
        total += likely * (figure.low <= rate <= figure.high)
    assert total == pytest.approx(coverage, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "k"), [(50, 1), (200, 8), (200, 1)])
def test_intervals_of_pass_at_k_hold_the_truth_in_95_of_100_evaluations(prompts, k):
    """Success rates are uniform over prompts, so pass@k is k/(k + 1)."""
    rng = np.random.default_rng(prompts + k)
    of_counts = [success.pass_at_k(c, num_samples=8, k=k) for c in range(9)]
    right = rng.binomial(8, rng.uniform(size=(2000, prompts)))
    estimates = [
        figures.over_prompts(values, share=True, trials=k == 8)
        for values in np.asarray(of_counts)[right]
    ]
    covers = [figure.low <= k / (k + 1) <= figure.high for figure in estimates]
    assert 0.93 <= np.mean(covers) <= 0.97


def test_what_is_not_there_is_left_out():
    bare = responses([[1, 0]], kl=None, k1=None, ref_logprob=None)
    _, figures_of = of(bare, answers=False)
    of_scores = {"score", "pass@1", "pass@2", "failed"}
    assert set(figures_of) == of_scores | {"length", "ended", "distinct"}
    _, figures_of = of(bare, kind="none")
    assert set(figures_of) == {"length", "ended", "distinct"}
    _, figures_of = of(bare, kind="reward")
    assert set(figures_of) == {
        "score",
        "best@1",
        "best@2",
        "length",
        "ended",
        "distinct",
    }


def test_distinct_shares():
    prompts, figures_of = of(responses([[1, 0, 1, 0]] * 2, texts="aabc"))
    assert figures_of["distinct"].mean == 0.75
    assert figures.distinct_share(prompts) == 3 / 8


def test_only_a_score_of_1_is_right():
    _, figures_of = of(responses([[0.5, 0.0]]))
    assert (figures_of["score"].mean, figures_of["pass@2"].mean) == (0.25, 0.0)


def test_the_policy_is_paired_with_the_reference():
    ours = figures.by_prompt(
        responses([[1, 0], [1, 1]], verdict=(0.9, 0.3)),
        model="policy",
        decoding="sampled",
    )
    theirs = figures.by_prompt(
        responses([[0, 0], [1, 1]], model="reference"),
        model="reference",
        decoding="sampled",
    )
    figures_of = figures.compared(ours, theirs, kind="verifier")
    assert figures_of["score_difference"].mean == 0.25
    assert figures_of["win_rate_by_score"].mean == (0.75 + 0.5) / 2
    assert figures_of["win_rate_by_judge"].mean == pytest.approx(0.6)
    assert figures_of["judge_prefers_first"].mean == pytest.approx(0.8)
    assert set(figures.compared(ours, theirs, kind="none")) == {
        "win_rate_by_judge",
        "judge_prefers_first",
    }


def test_a_response_is_read_back():
    row = dataclasses.asdict(dataclasses.replace(FIRST, verdict=(0.5, 0.25)))
    response = Response.from_json(row | {"stage": "evaluate", "verdict": [0.5, 0.25]})
    assert response.verdict == (0.5, 0.25)
    assert dataclasses.asdict(response) == row
