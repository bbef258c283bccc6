"""The β frontier: its judge, the fit of Gao et al., and its figures."""

import itertools
import json

import numpy as np
import pytest
import quickstart
from pipeline import preferences
from pipeline.options import TRAIN_PROMPTS
from studies import finished
from studies.kl_frontier import figures as frontier
from studies.kl_frontier import overoptimisation
from studies.policies import preparation
from worlds import review_grammar, reviews

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks

# --- the judge --------------------------------------------------------------------

MUG = ("review", ":", "the", "blue", "mug", "from", "my", "aunt", ".")


def words(text):
    return (*text.split(), "<eos>")


def test_the_careful_judge_reads_sentences():
    good, broken = words("it is a superb gift ."), words("it is an superb gift .")
    assert reviews.gold(good) == reviews.gold(broken)
    assert reviews.careful_gold(MUG, good) == reviews.gold(good)
    assert reviews.careful_gold(MUG, broken) == reviews.UNREADABLE
    hack = words("superb amazing brilliant wonderful perfect adore love superb superb")
    assert reviews.gold(hack) > 1.5
    assert reviews.careful_gold(MUG, hack) == reviews.UNREADABLE
    assert reviews.careful_gold(MUG, good[:-1]) == reviews.UNREADABLE  # never ended


@pytest.mark.slow
def test_unreadable_is_well_below_what_the_language_says():
    sampled = reviews.sample_reviews(0, 500)
    gold = np.array([reviews.careful_gold(*pair) for pair in sampled])
    assert gold.mean() - reviews.UNREADABLE > 1.5 * gold.std()
    assert (gold > reviews.UNREADABLE).mean() > 0.97


def two_answers(params, *, prompts, key):
    """Answers "i like it ." in even rows and "i love it ." in odd ones."""
    responses = [
        reviews.encode(words(text))
        for text, _ in zip(
            itertools.cycle(("i like it .", "i love it .")), prompts.tokens
        )
    ]
    before, response = np.zeros_like(prompts.mask), np.ones((len(responses), 5), bool)
    return Rollout(
        tokens=np.concatenate([prompts.tokens, responses], axis=1),
        mask=np.concatenate([prompts.mask, response], axis=1),
        response_mask=np.concatenate([before, response], axis=1),
        old_logprobs=None,
        entropy=None,
        index=prompts.index,
        sample=prompts.sample,
    )


def labels_by(judge, folder):
    options = quickstart.Config(
        out=folder, num_pairs=32, num_evaluated=16, label_noise=0.01, progress=False
    )
    return preferences.label_pairs(
        None, two_answers, judge=judge, key=None, options=options
    )


def test_pairs_are_labelled_by_the_judge_who_sees_the_prompt(tmp_path):
    def judge(prompt, response):
        assert " ".join(prompt).startswith("review : the ")
        assert response[-1] == "<eos>"
        return 1.5 if "love" in response else 0.5

    pairs, held_out = labels_by(judge, tmp_path)
    assert (len(pairs), len(held_out)) == (28, 4)
    assert {pair.margin for pair in pairs} == {None}
    assert {pair.margin for pair in held_out} == {1.0}
    for pair in (*pairs, *held_out):
        assert reviews.decode(pair.chosen) == words("i love it .")
        assert reviews.decode(pair.rejected) == words("i like it .")


def test_a_judge_who_tells_nothing_apart_is_told(tmp_path):
    """For instance a judge for which nothing parses, after too few updates."""
    with pytest.raises(checks.InputError, match="judge tells apart"):
        labels_by(lambda prompt, response: reviews.UNREADABLE, tmp_path)


def test_what_is_said_of_responses_by_hand():
    prompts = preparation.prompts_of(TRAIN_PROMPTS, batch_size=6, seed=0)[0]
    judged = preparation.judgement(
        two_answers(None, prompts=prompts, key=None), batch_size=4
    )
    assert judged["distinct"] == pytest.approx((2 / 4 + 2 / 2) / 2)
    # "it" is an answer to what is about one thing alone.
    one = [
        not {*review_grammar.NOUNS.split()}.isdisjoint(reviews.decode(row))
        for row in prompts.tokens
    ]
    assert 0 < sum(one) < 6
    assert judged["fluency"] == pytest.approx(np.mean(one))
    of_words = [reviews.gold(words(f"i {verb} it .")) for verb in ("like", "love")] * 3
    expected = np.where(one, of_words, reviews.UNREADABLE).mean()
    assert judged["gold"] == pytest.approx(expected)


# --- the fit and the figures ------------------------------------------------------


def curve(kl, alpha, beta):
    d = np.sqrt(kl)
    return d * (alpha - beta * np.log(d))


def test_the_fit_finds_what_it_was_drawn_from():
    kl = np.linspace(0.2, 40, 30)
    exact = overoptimisation.fit(kl, curve(kl, 0.8, 0.55))
    assert exact == pytest.approx((0.8, 0.55, 1.0), abs=1e-9)
    noise = np.random.default_rng(0).normal(scale=0.1, size=30)
    noisy = overoptimisation.fit(kl, curve(kl, 0.8, 0.55) + noise)
    assert noisy == pytest.approx((0.8, 0.55, 0.98), abs=0.05)
    assert noisy.r_squared < 1


def test_the_fit_leaves_out_what_has_no_logarithm():
    kl = np.array([-0.01, 0.0, 1.0, 2.0, 4.0])
    gain = curve(np.maximum(kl, 1e-9), 1.0, 0.3)
    gain[:2] = [7.0, np.nan]
    fitted = overoptimisation.fit(kl, gain)
    assert fitted == pytest.approx((1.0, 0.3, 1.0), abs=1e-9)
    assert overoptimisation.fit(kl[:4], gain[:4]) is None  # two points left


def row(seed, kl_coef, **values):
    return {"seed": seed, "kl_coef": kl_coef, **values}


@pytest.fixture
def figures():
    """Two seeds: β = 0 fails in every way, 0.5 in one seed, 1 in none."""
    before = [
        row(seed, None, kl=0.0, gold=gold, score=0.0, fluency=1.0, distinct=1.0)
        for seed, gold in ((0, 0.0), (1, -0.2))
    ]
    after = [
        row(0, 0.0, kl=36.0, gold=-2.0, score=3.0, fluency=0.0, distinct=0.3),
        row(0, 0.5, kl=4.0, gold=1.0, score=2.0, fluency=0.7, distinct=1.0),
        row(0, 1.0, kl=1.0, gold=0.9, score=1.0, fluency=0.9, distinct=1.0),
        row(1, 0.0, kl=25.0, gold=-1.8, score=2.0, fluency=0.1, distinct=0.5),
        row(1, 0.5, kl=2.0, gold=0.8, score=1.0, fluency=0.9, distinct=1.0),
        row(1, 1.0, kl=1.0, gold=0.5, score=0.8, fluency=0.9, distinct=0.9),
    ]
    points = [
        row(
            end["seed"],
            end["kl_coef"],
            kl=kl,
            gold=gold,
            score=0,
            fluency=1,
            distinct=1,
        )
        for kl, gold in ((0.0, 0.0), (1.0, 0.4))
        for end in after
    ]
    return points, before, after


def test_a_summary_by_hand(figures):
    summary = overoptimisation.summarise(*figures)
    of = summary["kl_coefs"]
    assert list(of) == ["0", "0.5", "1"]
    assert of["0"]["failures"] == {"hacking": 2, "fluency": 2, "distinct": 2}
    assert of["0.5"]["failures"] == {"hacking": 0, "fluency": 1, "distinct": 0}
    assert summary["three_failures"] is True
    assert summary["prevented_by"] == [1.0]
    assert summary["reference"]["gold"] == pytest.approx(-0.1)
    assert of["0"]["of_seeds"]["gold_gain"] == pytest.approx([-2.0, -1.6])
    assert of["0.5"]["of_seeds"]["net_gold"] == pytest.approx([-1.0, -0.2])
    assert of["0.5"]["net_score"] == pytest.approx(0.0)
    # gold - β KL: -1.9, -0.6, -0.3; score - β KL: 2.5, 0, -0.1
    assert summary["peak"] == {"gold": 1.0, "score": 0.0}
    rows = [end for of in figures[::2] for end in of]
    kl = np.array([end["kl"] for end in rows])
    gain = np.array([end["gold"] + 0.2 * end["seed"] for end in rows])
    assert summary["fit"] == overoptimisation.fit(kl, gain)._asdict()
    chosen = np.array([end["kl_coef"] for end in rows]) == 0.5
    of_half = overoptimisation.fit(kl[chosen], gain[chosen])
    assert of["0.5"]["fit"] == of_half._asdict()
    json.dumps(summary, allow_nan=False)


def test_what_is_told_of_a_summary(figures, capsys):
    summary = overoptimisation.summarise(*figures)
    overoptimisation.tell(summary)
    printed = capsys.readouterr().out
    assert "gold - β KL peaks at β = 1\n" in printed
    assert (
        "gold -1.80, fluency 1.00 -> 0.05, distinct 1.00 -> 0.40: all three" in printed
    )
    assert "β without any failure in any seed: 1\n" in printed


# --- from a sweep -----------------------------------------------------------------


@pytest.fixture
def swept(tmp_path):
    """The folder of a sweep of two β and two seeds."""
    cells = {f"kl_coef={kl_coef:g}": {"kl_coef": kl_coef} for kl_coef in (0.0, 1.0)}
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": cells}))
    for cell, options in cells.items():
        for seed in (0, 1):
            run = tmp_path / "runs" / cell / f"seed_{seed}"
            run.mkdir(parents=True)
            hacked = options["kl_coef"] == 0.0
            at = {"kl": 0.0, "gold": 0.5, "fluency": 1.0, "distinct": 1.0}
            policy = at | {"kl": 9.0 + seed, "gold": -1.0 - seed if hacked else 0.75}
            summary = {
                "reference": at | {"score": -9.0, "unshaped_score": 0.0},
                "policy": policy | {"score": -9.0, "unshaped_score": 2.0},
            }
            (run / "config.json").write_text(
                json.dumps({"config": options, "versions": {}})
            )
            (run / "summary.json").write_text(json.dumps(summary))
            rows = [
                {"stage": "ppo", "step": 0, **at, "score": 0.0},
                {"stage": "ppo", "step": 0, "tokens": ["a"], "score": 7.0},
                {"stage": "ppo", "step": 2, **at, "score": 1.0, "kl": 4.0},
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (run / "samples.jsonl").write_text(lines)
    return tmp_path


@pytest.mark.slow
def test_figures_of_a_sweep(swept, capsys):
    frontier.main(finished.Options(swept))
    summary = json.loads((swept / "figures.json").read_text())
    assert summary["num_seeds"] == 2
    assert summary["reference"]["score"] == 0.0
    zero, one = summary["kl_coefs"]["0"], summary["kl_coefs"]["1"]
    assert zero["of_seeds"]["gold_gain"] == [-1.5, -2.5]
    assert zero["failures"]["hacking"] == 2
    assert one["failures"]["hacking"] == 0
    assert one["net_gold"] == pytest.approx(0.75 - 9.5)
    for name in ("frontier", "objective"):
        assert (swept / "plots" / f"{name}.png").stat().st_size > 10_000
    assert "β without any failure in any seed: 1\n" in capsys.readouterr().out


def test_folders_that_are_no_finished_sweep(swept, tmp_path):
    with pytest.raises(checks.InputError, match=r"got one without sweep\.json; give"):
        frontier.main(finished.Options(tmp_path / "runs"))
    for summary in swept.rglob("summary.json"):
        summary.unlink()
    with pytest.raises(checks.InputError, match="runs that are done, got none"):
        frontier.main(finished.Options(swept))


@pytest.mark.slow
def test_figures_are_of_the_seeds_that_every_cell_has(swept, capsys):
    left = swept / "runs" / "kl_coef=1" / "seed_1" / "summary.json"
    left.unlink()
    frontier.main(finished.Options(swept))
    assert "not every cell has seeds 1: left out" in capsys.readouterr().out
    summary = json.loads((swept / "figures.json").read_text())
    assert summary["num_seeds"] == 1
    assert summary["kl_coefs"]["0"]["of_seeds"]["gold_gain"] == [-1.5]
    (left.parent.parent / "seed_0" / "summary.json").rename(left)
    (swept / "runs" / "kl_coef=0" / "seed_1" / "summary.json").unlink()
    with pytest.raises(checks.InputError, match="a seed of which every cell is done"):
        frontier.main(finished.Options(swept))


def test_cells_that_one_option_does_not_tell_apart_are_refused(swept):
    for seed in (0, 1):
        config = swept / "runs" / "kl_coef=1" / f"seed_{seed}" / "config.json"
        config.write_text(json.dumps({"config": {"kl_coef": 0.0}, "versions": {}}))
    with pytest.raises(checks.InputError, match="cells that differ in kl_coef, got"):
        frontier.main(finished.Options(swept))
