"""The β frontier at toy size: one program for all runs, its judge, its figures."""

import functools
import itertools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quickstart
import toys
from pipeline import preferences
from pipeline.options import TRAIN_PROMPTS
from studies import kl_frontier, overoptimisation, sweep
from studies.policies import preparation
from worlds import review_grammar, reviews

from rlhf_jax import decoder, frozen, ppo, rewards
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOY = {
    "kl_coefs": (0.0, 0.5),
    "num_seeds": 2,
    "sft_steps": 3,
    "reward_steps": 2,
    "num_pairs": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "batch_size": 8,
    "num_epochs": 2,
    "num_minibatches": 2,
    "num_evaluated": 16,
}
BETAS, SEEDS = TOY["kl_coefs"], (0, 1)


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


def test_unreadable_is_well_below_what_the_language_says():
    sampled = reviews.sample_reviews(0, 500)
    said = np.array([reviews.careful_gold(*pair) for pair in sampled])
    assert said.mean() - reviews.UNREADABLE > 1.5 * said.std()
    assert (said > reviews.UNREADABLE).mean() > 0.97


def options_in(folder, **changes):
    return kl_frontier.Config(out=folder, progress=False, **(TOY | changes))


def two_answers(params, *, prompts, key):
    """Says "i like it ." in even rows and "i love it ." in odd ones."""
    said = [
        reviews.encode(words(text))
        for text, _ in zip(
            itertools.cycle(("i like it .", "i love it .")), prompts.tokens
        )
    ]
    before, response = np.zeros_like(prompts.mask), np.ones((len(said), 5), bool)
    return Rollout(
        tokens=np.concatenate([prompts.tokens, said], axis=1),
        mask=np.concatenate([prompts.mask, response], axis=1),
        response_mask=np.concatenate([before, response], axis=1),
        old_logprobs=None,
        entropy=None,
        index=prompts.index,
        sample=prompts.sample,
    )


def labels_by(judge, folder):
    options = options_in(folder, label_noise=0.01).of_seed(0)
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
    """As where nothing parses, after too few updates."""
    with pytest.raises(checks.InputError, match="judge tells apart"):
        labels_by(lambda prompt, response: reviews.UNREADABLE, tmp_path)


def test_what_is_said_of_responses_by_hand():
    prompts = preparation.prompts_of(TRAIN_PROMPTS, batch_size=6, seed=0)[0]
    found = preparation.judgement(
        two_answers(None, prompts=prompts, key=None), batch_size=4
    )
    assert found["distinct"] == pytest.approx((2 / 4 + 2 / 2) / 2)
    # "it" is an answer to what is about one thing alone.
    one = [
        not {*review_grammar.NOUNS.split()}.isdisjoint(reviews.decode(row))
        for row in prompts.tokens
    ]
    assert 0 < sum(one) < 6
    assert found["fluency"] == pytest.approx(np.mean(one))
    of_words = [reviews.gold(words(f"i {verb} it .")) for verb in ("like", "love")] * 3
    expected = np.where(one, of_words, reviews.UNREADABLE).mean()
    assert found["gold"] == pytest.approx(expected)
    assert found["response"] == "i like it . <eos>"
    assert found["prompt"].startswith("review : the ")


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
    found = overoptimisation.fit(kl, gain)
    assert found == pytest.approx((1.0, 0.3, 1.0), abs=1e-9)
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
    found = overoptimisation.summarise(*figures)
    of = found["kl_coefs"]
    assert list(of) == ["0", "0.5", "1"]
    assert of["0"]["failures"] == {"hacking": 2, "fluency": 2, "distinct": 2}
    assert of["0.5"]["failures"] == {"hacking": 0, "fluency": 1, "distinct": 0}
    assert found["three_failures"] is True
    assert found["prevented_by"] == [1.0]
    assert found["reference"]["gold"] == pytest.approx(-0.1)
    assert of["0"]["of_seeds"]["gold_gain"] == pytest.approx([-2.0, -1.6])
    assert of["0.5"]["of_seeds"]["net_gold"] == pytest.approx([-1.0, -0.2])
    assert of["0.5"]["net_score"] == pytest.approx(0.0)
    # gold - β KL: -1.9, -0.6, -0.3; score - β KL: 2.5, 0, -0.1
    assert found["peak"] == {"gold": 1.0, "score": 0.0}
    rows = [end for of in figures[::2] for end in of]
    kl = np.array([end["kl"] for end in rows])
    gain = np.array([end["gold"] + 0.2 * end["seed"] for end in rows])
    assert found["fit"] == overoptimisation.fit(kl, gain)._asdict()
    chosen = np.array([end["kl_coef"] for end in rows]) == 0.5
    of_half = overoptimisation.fit(kl[chosen], gain[chosen])
    assert of["0.5"]["fit"] == of_half._asdict()
    json.dumps(found, allow_nan=False)


def test_what_is_told_of_a_summary(figures, capsys):
    found = overoptimisation.summarise(*figures)
    overoptimisation.tell(found)
    told = capsys.readouterr().out
    assert "gold - β KL peaks at β = 1\n" in told
    assert "gold -1.80, fluency 1.00 -> 0.05, distinct 1.00 -> 0.40: all three" in told
    assert "β without any failure in any seed: 1\n" in told


# --- one program ------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Five iterations of each seed and β in a plain loop, and what they start from."""
    options = options_in(tmp_path_factory.mktemp("runs"), num_steps=5)
    algorithm = quickstart.algorithm_of(options.of_seed(0))
    model = algorithm.model
    policies = [decoder.init(jax.random.key(seed), model=model) for seed in SEEDS]
    scorers = [
        rewards.init(jax.random.key(10 + seed), policy, model=model)
        for seed, policy in zip(SEEDS, policies, strict=True)
    ]
    keys = [jax.random.key(20 + seed) for seed in SEEDS]
    data = [
        preparation.prompts_of(TRAIN_PROMPTS, batch_size=8, seed=seed) for seed in SEEDS
    ]
    iteration = jax.jit(functools.partial(ppo.iteration, recipe=algorithm))
    alone = {}
    for seed, b in np.ndindex(len(SEEDS), len(BETAS)):
        train = sweep.pick(
            sweep.start(
                policies[seed : seed + 1],
                algorithm=algorithm,
                kl_coefs=BETAS[b : b + 1],
            ),
            *(0, 0),
        )
        for step in range(5):
            train, stats, scored = iteration(
                train,
                prompts=data[seed][step],
                reference=frozen.freeze(policies[seed]),
                reward=rewards.from_model(frozen.freeze(scorers[seed]), model=model),
                key=jax.random.fold_in(keys[seed], step),
            )
            alone[seed, b, step] = jax.device_get((stats, scored.rollout))
        alone[seed, b] = train
    given = {
        "prompts": sweep.stack(
            [sweep.stack([of[step] for step in range(5)]) for of in data]
        ),
        "references": frozen.freeze(sweep.stack(policies)),
        "reward_models": frozen.freeze(
            sweep.stack([sweep.stack([scorer]) for scorer in scorers])
        ),
        "keys": jnp.stack(keys),
        "steps": jnp.arange(5, dtype=jnp.int32),
    }
    start = sweep.start(policies, algorithm=algorithm, kl_coefs=BETAS)
    return algorithm, start, given, alone


@pytest.mark.long
@pytest.mark.parametrize("mapped", ["map", "vmap"])
def test_the_mapped_runs_are_single_runs(runs, mapped):
    """The same tokens, and metrics within 1e-4, of each seed and β for 5 iterations."""
    algorithm, start, given, alone = runs
    program = jax.jit(
        functools.partial(sweep.iterations, algorithm=algorithm, mapped=mapped)
    )
    train, stats, rollouts = jax.device_get(program(start, **given))
    for seed, b, step in np.ndindex(len(SEEDS), len(BETAS), 5):
        single, answered = alone[seed, b, step]
        for name in ("tokens", "response_mask", "index", "sample"):
            np.testing.assert_array_equal(
                getattr(rollouts, name)[seed, b, step], getattr(answered, name)
            )
        assert stats.keys() == single.keys()
        for name, (total, weight) in single.items():
            sums, weights = stats[name]
            ours = sums[seed, b, step] / (
                1 if weight is None else weights[seed, b, step]
            )
            expected = total / (1 if weight is None else weight)
            np.testing.assert_allclose(
                ours, expected, rtol=1e-4, atol=1e-4, err_msg=name
            )
    for seed, b in np.ndindex(len(SEEDS), len(BETAS)):
        ended = sweep.pick(train, seed, b)
        assert float(ended.kl.kl_coef) == BETAS[b]
        for ours, expected in zip(
            jax.tree.leaves(ended.policy),
            jax.tree.leaves(alone[seed, b].policy),
            strict=True,
        ):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_runs_of_a_seed_begin_alike_and_part(runs):
    _, _, _, alone = runs
    first = [alone[seed, b, 0][1].tokens for seed in SEEDS for b in range(2)]
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0] != first[2]).any()
    assert not toys.leaves_equal(alone[0, 0].policy, alone[0, 1].policy)


@pytest.mark.slow
def test_the_reward_of_a_seed_is_its_members_combined(tmp_path):
    algorithm = quickstart.algorithm_of(options_in(tmp_path).of_seed(0))
    policy = decoder.init(jax.random.key(0), model=algorithm.model)
    scorers = [
        rewards.init(jax.random.key(seed), policy, model=algorithm.model)
        for seed in (1, 2, 3)
    ]
    answered = two_answers(
        policy,
        prompts=preparation.prompts_of(TRAIN_PROMPTS, batch_size=4, seed=0)[0],
        key=None,
    )
    each = np.stack(
        [
            rewards.from_model(frozen.freeze(scorer), model=algorithm.model)(answered)
            for scorer in scorers
        ]
    )
    assert each.std(axis=0).min() > 1e-3
    for how, expected in (
        ("mean", each.mean(axis=0)),
        ("minimum", each.min(axis=0)),
        ("mean_minus_std", each.mean(axis=0) - 0.5 * each.std(axis=0)),
    ):
        reward = sweep.reward_of(
            sweep.stack(scorers),
            reward_models=frozen.freeze(sweep.stack([sweep.stack(scorers)])),
            model=algorithm.model,
            ensemble=sweep.Ensemble(how, 0.5),
        )
        np.testing.assert_allclose(reward(answered).total, expected, atol=1e-5)


def test_one_model_is_not_combined(tmp_path):
    with pytest.raises(checks.InputError, match="expected several reward models, got"):
        options_in(tmp_path, combine="minimum")


# --- the experiment ---------------------------------------------------------------

ARGV = [
    *("--kl-coefs", "0", "0.5"),
    *(
        f"--{name.replace('_', '-')}={value}"
        for name, value in TOY.items()
        if name != "kl_coefs"
    ),
    *("--num-steps=6", "--chunk-steps=2", "--snapshot-every=6", "--no-progress"),
]


def play(out, *argv):
    words = ["--out", str(out), *ARGV, *argv]
    command_line.main(kl_frontier.main, kl_frontier.Config, description="", argv=words)
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def lenient():
    """A judge of words: nothing that a model this small says would parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reviews, "careful_gold", lambda _, said: reviews.gold(said))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lenient):
    out = tmp_path_factory.mktemp("frontier") / "run"
    return out, play(out)


@pytest.mark.long
def test_the_experiment_leaves_figures_and_plots(whole):
    out, summary = whole
    assert list(summary["kl_coefs"]) == ["0", "0.5"]
    assert summary["num_seeds"] == 2
    assert len(summary["responses"]) == 2 + 4
    assert summary["reference"]["kl"] == pytest.approx(0, abs=1e-4)
    assert summary["reference_verified"] is True
    assert {path.name for path in (out / "plots").iterdir()} == {
        *("frontier.png", "objective.png")
    }
    rows = metrics.read(out / "metrics.jsonl")
    assert [(of["stage"], of["step"]) for of in rows] == [
        ("sweep", step) for step in range(6)
    ]
    assert rows[0]["objective/kl_coef"] == pytest.approx(0.25)
    for of in rows:
        both = [of[f"kl_coef_{kl_coef}/objective/scores"] for kl_coef in ("0", "0.5")]
        assert of["objective/scores"] == pytest.approx(np.mean(both), abs=1e-5)
    samples = metrics.read(out / "samples.jsonl")
    assert [(of["step"], of["seed"], of["kl_coef"]) for of in samples] == [
        (step, seed, kl_coef)
        for step in (0, 2, 4)
        for seed in SEEDS
        for kl_coef in BETAS
    ]
    for of, at_start in zip(samples, (True,) * 4 + (False,) * 8, strict=True):
        assert (abs(of["kl"]) < 1e-4) == at_start
    prepared = metrics.read(out / "seed_1" / "metrics.jsonl")
    assert {of["stage"] for of in prepared} == {"sft", "reward_model"}


@pytest.mark.long
def test_an_ensemble_of_reward_models(tmp_path, lenient):
    summary = play(tmp_path / "run", "--num-members=3", "--combine=minimum")
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        members = [row[f"reward/member_{m}"] for m in range(3)]
        assert row["objective/scores"] < min(members) + 1e-6
        assert row["reward/disagreement"] > 0
    prepared = metrics.read(tmp_path / "run" / "seed_1" / "metrics.jsonl")
    stages = {row["stage"] for row in prepared}
    assert stages == {"sft", "reward_model", "reward_model_1", "reward_model_2"}
    assert summary["reference"]["score"] < 0  # a minimum of scores with mean 0


@pytest.mark.long
def test_stopped_by_a_signal_and_by_a_crash_it_goes_on_to_the_last_bit(
    whole, tmp_path, monkeypatch
):
    out, summary = whole
    parts = tmp_path / "parts"
    seen = kl_frontier.measured
    asked = []

    def stopping(*args, **kwargs):
        asked.append(None)
        if len(asked) == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # in the first chunk: saved at its end
        if len(asked) == 3:
            raise RuntimeError("power cut")  # in the last: the second was not saved
        return seen(*args, **kwargs)

    monkeypatch.setattr(kl_frontier, "measured", stopping)
    with pytest.raises(SystemExit) as exit_:
        play(parts)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert [path.name for path in (parts / "snapshots" / "sweep").iterdir()] == ["2"]
    with pytest.raises(RuntimeError, match="power cut"):
        play(parts, "--resume")
    assert len(metrics.read(parts / "metrics.jsonl")) == 4
    again = play(parts, "--resume")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (parts / name).read_bytes() == (out / name).read_bytes()
    clocks = {"seconds", "sweep_seconds"}
    assert {name: again[name] for name in again.keys() - clocks} == {
        name: summary[name] for name in summary.keys() - clocks
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_coefs": ()}, "expected at least one β and each once"),
        ({"kl_coefs": (0.1, 0.1)}, "expected at least one β and each once"),
        ({"kl_coefs": (0.1, -0.1)}, "kl_coefs: expected a finite number, 0 or"),
        ({"kl_coefs": (float("nan"),)}, "kl_coefs: expected a finite number, 0 or"),
        ({"num_seeds": 0}, "num_seeds: expected"),
        ({"chunk_steps": 0}, "chunk_steps: expected"),
        ({"measure_every": 0}, "measure_every: expected"),
        ({"num_steps": 7}, "--num-steps: expected a multiple of --chunk-steps 5"),
        ({"snapshot_every": 7}, "--snapshot-every: expected a multiple of --chunk"),
    ],
)
def test_options_that_are_refused(tmp_path, changes, message):
    with pytest.raises(checks.InputError, match=message):
        options_in(tmp_path, **changes)
