"""Each alarm is raised by its own kind of history, and by no other."""

import dataclasses
import json
import math

import places
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import alarms

RECORDED = places.RECORDED / "quickstart"
FOUR = alarms.Limits(window=4)


def history(**columns):
    """Rows from columns of equal length; None leaves the metric out of the row."""
    names = [name.replace("__", "/") for name in columns]
    return [
        {
            name: value
            for name, value in zip(names, row, strict=True)
            if value is not None
        }
        for row in zip(*columns.values(), strict=True)
    ]


def raised(rows, limits=FOUR, **options):
    return alarms.check(rows, limits=limits, **options)


def test_weight_drift():
    assert raised(history(drift__relative=[0.2, 0.5])) == {}
    assert raised(history(drift__relative=[0.2, 0.53125, None])) == {
        "weight_drift": "relative weight drift 0.5312 is over 0.5; raise kl_coef or "
        "lower the policy's learning rate"
    }


def test_weight_drift_from_another_model():
    """A teacher of the student's shape is far from it at step 0."""
    assert raised(history(drift__relative=[9.0, 9.5]), from_start=False) == {}
    assert raised(history(drift__relative=[None, 9.0, 9.75]), from_start=False) == {
        "weight_drift": "relative weight drift 9.75 is over 0.5 above the 9 at first; "
        "raise kl_coef or lower the policy's learning rate"
    }


def test_kl_above_its_target_or_a_limit():
    rows = history(objective__kl=[0.0, 8.0, 9.0, 10.0, 13.0])  # the last four: 10
    assert raised(rows) == {}  # there is neither a target nor a limit
    assert raised(rows, kl_target=7.0) == {}
    message = (
        "KL 10 nats per response (mean of 4 steps) is over {}; raise kl_coef, or "
        "shorten kl_horizon where it is adapted"
    )
    assert raised(rows, kl_target=6.0) == {
        "kl": message.format("9, 1.5 times the target 6")
    }
    limited = dataclasses.replace(FOUR, kl=9.5)
    assert raised(rows, limited) == {"kl": message.format("9.5")}
    assert raised(rows, limited, kl_target=6.0) == {
        "kl": message.format("9, 1.5 times the target 6")
    }
    assert raised(rows[:4], kl_target=4.6) == {}  # a mean of 6.75
    assert raised(rows[:3], kl_target=0.1) == {}  # too few to average
    gaps = [row for kl in rows for row in (kl, {"objective/entropy": 1.0})]
    assert raised(gaps, kl_target=6.0) == raised(rows, kl_target=6.0)


SCORES = [1.0, 1.2, 1.1, 1.3, 1.9, 2.1, 2.0, 2.2]


def test_reward_hacking():
    """Halves have means 1.15 and 2.05, variances 1/60; the judge skips odd steps.

    Its halves are (0.8, 0.7) and (0.3, 0.2): variances 1/200.
    """
    rows = history(
        objective__scores=SCORES,
        judge__score=[None, 0.8, None, 0.7, None, 0.3, None, 0.2],
    )
    # The span begins with the first judge: 1.2 1.1 1.3 | 2.1 2.0 2.2, the 1.9 dropped.
    error = math.sqrt(2 * 0.01 / 3)
    assert raised(rows) == {
        "reward_hacking": f"over 7 steps the reward rose by 0.9 (standard error "
        f"{error:.2g}) while the judge fell by 0.5 (0.071); go back to a snapshot "
        "before the judge fell, and raise kl_coef or train the reward model on these "
        "responses"
    }
    # Between evaluations it stays, and does not look at newer scores alone.
    assert raised([*rows, {"objective/scores": 0.0}]) == raised(rows)


@pytest.mark.parametrize(
    ("scores", "judge"),
    [
        (SCORES, [0.1, 0.2, 0.15, 0.2, 0.6, 0.7, 0.6, 0.7]),  # both rise
        (SCORES[::-1], [0.6, 0.7, 0.6, 0.7, 0.1, 0.2, 0.1, 0.2]),  # both fall
        (SCORES, [0.5, 0.1, 0.9, 0.2, 0.4, 0.8, 0.1, 0.3]),  # the judge is unsure
        ([0.5, 2.5, 0.1, 2.0, 0.6, 2.9, 0.2, 2.2], [0.9, 0.9, 0.8, 0.8, 0, 0, 0.1, 0]),
        (SCORES, [0.5] * 8),
        ([1.0] * 8, [0.5] * 8),
        (SCORES, [None] * 5 + [0.9, 0.5, 0.1]),  # three evaluations are too few
        ([None] * 8, [0.9, 0.9, 0.9, 0.8, 0.1, 0.2, 0.1, 0.2]),
    ],
)
def test_what_is_not_reward_hacking(scores, judge):
    eight = alarms.Limits(window=8)
    assert raised(history(objective__scores=scores, judge__score=judge), eight) == {}
    fallen = [0.9, 0.8, 0.9, 0.8, 0.2, 0.1, 0.2, 0.1]
    rows = history(objective__scores=SCORES, judge__score=fallen)
    assert list(raised(rows, eight)) == ["reward_hacking"]


def test_the_margin_is_in_standard_errors():
    """A rise and a fall of 5, each with a standard error of 1."""
    rows = history(
        objective__scores=list(range(10)), judge__score=list(range(10))[::-1]
    )
    for hacking, expected in ((4.9, 1), (5.1, 0), (None, 0)):
        limits = alarms.Limits(hacking=hacking)
        assert len(raised(rows, limits)) == expected


def test_mode_collapse():
    distinct = [1.0, 0.5, 0.9, 0.9, 0.9, 0.75, 0.75, 0.75, 0.75]
    entropy = [2.0, 4.0, 4.0, 4.0, 1.5, 1.5, 1.0, 0.5, 0.5]  # 0.875 at last
    rows = history(response__distinct_fraction=distinct, objective__entropy=entropy)
    assert raised(rows) == {
        "mode_collapse_distinct": "distinct share of responses 0.75 (mean of 4 steps) "
        "is below 0.8 of the 1 at first; read the samples; raise kl_coef, "
        "or take more prompts",
        "mode_collapse_entropy": "entropy [nats per token] 0.875 (mean of 4 steps) is "
        "below 0.5 of the 2 at first; raise kl_coef or lower the policy's "
        "learning rate",
    }
    assert raised(rows[:7]) == {}  # 0.825 of 1 and 2 of 2: not yet
    assert raised(rows[::-1]) == {}


def test_language_degradation():
    """Perplexity rises from 8 to 16, by means of nats over four steps."""
    steps = [math.log(8)] * 4 + [math.log(8), math.log(16), math.log(16), math.log(32)]
    rows = history(objective__ref_nll=steps)
    assert raised(rows) == {
        "language_degradation": "perplexity of the responses under the reference 16 "
        "(mean of 4 steps) is over 1.5 times the 8 at first; read the samples: "
        "the reference finds them ever less likely; raise kl_coef"
    }
    assert raised(rows, dataclasses.replace(FOUR, reference_perplexity=2.01)) == {}
    assert raised(rows[::-1]) == {}


def test_forgetting():
    rows = history(
        eval__novels_nll=[math.log(10), None, math.log(12.5), None],
        eval__code_nll=[math.log(20), None, math.log(23), None],
    )
    novels = "the policy's perplexity on novels 12.5 is over 1.2 times the 10 at first"
    advice = "; raise kl_coef, or mix in a language-model loss on such text"
    assert raised(rows) == {"forgetting": novels + advice}
    assert raised(rows[:2]) == {}
    assert raised([*rows, {"eval/novels_nll": math.log(11)}]) == {}
    code = "the policy's perplexity on code 25 is over 1.2 times the 20 at first"
    both = raised([*rows, {"eval/code_nll": math.log(25)}])
    assert both == {"forgetting": f"{novels}, {code}{advice}"}


def test_none_is_off():
    fields = [f.name for f in dataclasses.fields(alarms.Limits)]
    fields = [name for name in fields if name not in ("window", "stop")]
    off = alarms.Limits(window=4, **dict.fromkeys(fields))
    rows = history(
        drift__relative=[9.0] * 8,
        objective__kl=[99.0] * 8,
        objective__scores=[0.0] * 6 + [1.0] * 2,
        judge__score=[0.0] * 6 + [-1.0] * 2,
        response__distinct_fraction=[1.0] * 4 + [0.0] * 4,
        objective__entropy=[1.0] * 4 + [0.0] * 4,
        objective__ref_nll=[1.0] * 4 + [9.0] * 4,
        eval__held_out_nll=[1.0] * 4 + [9.0] * 4,
        eval__out_of_domain_nll=[1.0] * 4 + [9.0] * 4,
        trust__distance=[9.0] * 8,
        trust__distance_prompt_1=[9.0] * 8,
        trust__outliers=[1.0] * 8,
        trust__weight=[2.0] * 8,
        trust__weight_z=[9.0] * 8,
        trust__entropy_ratio=[0.5] * 8,
        trust__entropy_z=[-9.0] * 8,
        trust__duplicates=[1.0] * 8,
        trust__duplicates_expected=[0.0] * 8,
        trust__duplicates_z=[9.0] * 8,
        trust__age_max=[9] * 8,
    )
    allowed = FOUR.allowing(staleness=0)
    assert len(raised(rows, allowed, kl_target=6.0)) == 13
    assert raised(rows, off, kl_target=6.0) == {}
    assert "kl" in raised(rows, dataclasses.replace(off, kl=50.0))


def test_what_is_not_a_number_is_a_gap_and_infinity_is_large():
    rows = history(objective__kl=[8.0, "NaN", 9.0, 10.0, 13.0])
    assert "KL 10 nats" in raised(rows, kl_target=6.0)["kl"]
    rows = history(objective__kl=[0.0, 0.0, 0.0, "Infinity"])
    assert "KL inf nats" in raised(rows, kl_target=6.0)["kl"]
    rows = history(eval__held_out_nll=[1.0, "Infinity"])
    assert "inf is over" in raised(rows)["forgetting"]
    wild = ["Infinity", "-Infinity", 1e308, -1e308]
    columns = dict.fromkeys(["objective__scores", "judge__score"], wild)
    assert raised(history(**columns)) == {}


def test_an_alarm_is_raised_when_it_begins_and_again_when_it_comes_back():
    watch = alarms.Watch(lambda rows: raised(rows, kl_target=None))
    drifts = [0.1, 0.6, 0.7, 0.4, 0.8]
    active = [watch.see(10 + i, {"drift/relative": x}) for i, x in enumerate(drifts)]
    assert [[alarm.step for alarm in now] for now in active] == [
        [],
        [11],
        [11],
        [],
        [14],
    ]
    assert [(alarm.name, alarm.step) for alarm in watch.raised] == [
        ("weight_drift", 11),
        ("weight_drift", 14),
    ]
    assert watch.raised[0].message.startswith("relative weight drift 0.6 is over 0.5;")


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("seed_0", []),
        ("seed_1", []),
        ("seed_2", []),
        ("seed_0_kl_coef_0", ["language_degradation", "mode_collapse_entropy"]),
    ],
)
def test_recorded_runs(run, expected):
    """The defaults raise nothing on healthy runs, only on the one without a penalty."""
    watch = alarms.Watch(lambda rows: alarms.check(rows, limits=alarms.Limits()))
    for line in (RECORDED / f"{run}.jsonl").read_text().splitlines():
        row = json.loads(line)
        watch.see(row["step"], row)
    assert [alarm.name for alarm in watch.raised] == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 3}, "window: expected a number of at least 4"),
        ({"drift": 0.0}, "drift: expected a finite number above 0, got 0"),
        ({"entropy": math.inf}, "entropy: expected a finite number above 0, got inf"),
    ],
)
def test_limits_that_cannot_be(wrong, message):
    with pytest.raises(InputError, match=message):
        alarms.Limits(**wrong)


def trusted(**columns):
    return history(**{f"trust__{name}": values for name, values in columns.items()})


@pytest.mark.parametrize(
    ("columns", "name", "message"),
    [
        (
            {"distance": [1e-6, None, 5e-4]},
            "trust_distance",
            "the sampler's log-probs are 0.0005 nats per token from the trainer's, "
            "over 0.0004, 4 times what it was at first",
        ),
        (
            {"distance": [0.01, 0.05]},
            "trust_distance",
            "the sampler's log-probs are 0.05 nats per token from the trainer's, over "
            "0.04, 4 times what it was at first",
        ),
        (
            {"distance": [0.16]},
            "trust_distance",
            "the sampler's log-probs are 0.16 nats per token from the trainer's, over "
            "0.15",
        ),
        (
            {"distance_prompt_3": [0.0, 0.4, 0.1, 0.2]},
            "trust_distance",
            "in quarter 3 of the lengths of prompts the sampler's log-probs are 0.175 "
            "nats per token from the trainer's, over 0.15",
        ),
        (
            {"outliers": [0.0, 0.0, 0.025, 0.0]},
            "trust_outliers",
            "the log-probs of 0.62% of the tokens differ by more than 1 nat, over "
            "0.50%",
        ),
        (
            {"weight": [1.0, 1.2, 1.0], "weight_z": [0.0, 5.0, 5.0]},
            "trust_weight",
            "tokens are 1.1 times as likely to the trainer as the sampler says, where "
            "1 is expected (7.1 standard deviations over 2 steps)",
        ),
        (
            {"weight": [0.8], "weight_z": [-6.5]},
            "trust_weight",
            "tokens are 0.8 times as likely to the trainer as the sampler says, where "
            "1 is expected (6.5 standard deviations over 1 step)",
        ),
        (
            {"entropy_ratio": [0.9, 0.94], "entropy_z": [-1.0, -6.5]},
            "trust_entropy",
            "-log π of the sampler's tokens is 0.94 of the trainer's entropy (6.5 "
            "standard deviations over 1 step)",
        ),
        (
            {
                "duplicates": [0.5, 0.25],
                "duplicates_expected": [0.25, 0.25],
                "duplicates_z": [9.0, 0.0],
            },
            "trust_duplicates",
            "37.5% of the responses repeat that of the row before, to the same prompt, "
            "where 25.0% are expected (6.4 standard deviations over 2 steps)",
        ),
    ],
)
def test_a_sampler_that_is_not_to_be_trusted(columns, name, message):
    assert raised(trusted(**columns)) == {name: f"{message}; {alarms.ADVICE[name]}"}


@pytest.mark.parametrize(
    "columns",
    [
        {"distance": [0.1, None, 1e-6, 3e-4, 0.14]},
        {"distance": [1e-6, 5e-4, None]},  # of old parameters: nothing to compare
        {"distance_prompt_3": [0.0, 0.4, 0.0, 0.0]},
        {"distance_prompt_3": [0.4, 0.4, 0.4]},  # of few steps
        {"outliers": [0.0, 0.02, 0.0, 0.0]},
        {"weight": [0.8], "weight_z": [-5.5]},
        {"weight": [0.96], "weight_z": [-60.0]},  # as roundings are
        {"weight": [0.7, 1.2], "weight_z": [-8.0, 4.0]},  # over by now
        {"entropy_ratio": [1.4], "entropy_z": [8.0]},
        {"entropy_ratio": [0.96], "entropy_z": [-60.0]},
        {
            "duplicates": [0.999],
            "duplicates_expected": [0.99],
            "duplicates_z": [9.0],
        },
        {"age_max": [2.0, 3.0]},
    ],
)
def test_what_an_honest_sampler_may_do(columns):
    assert raised(trusted(**columns)) == {}


def test_old_parameters_beyond_the_staleness_of_a_run():
    rows = trusted(age_max=[0, 1, 3])
    limited = FOUR.allowing(staleness=2)
    assert raised(rows[:2], limited) == {}
    assert raised(rows, limited) == {
        "trust_age": "tokens were drawn by parameters 3 iterations old, over 2; "
        + alarms.ADVICE["trust_age"]
    }
    chosen = dataclasses.replace(FOUR, trust_age=3)
    assert chosen.allowing(staleness=0) == chosen
    assert raised(trusted(age_max=[1]), FOUR.allowing(staleness=0)) != {}


def test_which_alarms_stop_a_run():
    assert not alarms.Limits().stops("trust_age")
    assert alarms.Limits(stop=("trust",)).stops("trust_age")
    assert not alarms.Limits(stop=("trust",)).stops("kl")
    assert alarms.Limits(stop=("kl", "trust_age")).stops("kl")
    assert not alarms.Limits(stop=("trust_age",)).stops("trust_weight")
    with pytest.raises(InputError, match=r"stop: expected one of 'trust', .*'drift'"):
        alarms.Limits(stop=("drift",))
