"""Algorithms compared at toy size: what each learns from, figures, and going on."""

import collections
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quickstart
import toys
from pipeline.options import TRAIN_PROMPTS
from studies import compare_algorithms, comparison
from studies.policies import algorithms as trainers
from studies.policies import preparation
from worlds import reviews

from rlhf_jax import grpo, rewards
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import best_of_n, checks
from rlhf_jax.functional.kl.control import Control
from rlhf_jax.runs import command_line, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
TOY = {
    "num_seeds": 2,
    "num_steps": 4,
    "sft_steps": 30,
    "reward_steps": 2,
    "num_pairs": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "batch_size": 8,
    "sft_batch_size": 8,
    "num_epochs": 2,
    "num_minibatches": 2,
    "num_evaluated": 16,
    "group_size": 4,
    "best_of": (2, 4),
    "num_prompts": 4,
    "sample_every": 2,
}


def options_in(folder, **changes):
    return compare_algorithms.Config(out=folder, progress=False, **(TOY | changes))


# --- the figures ------------------------------------------------------------------


def row(algorithm, seed, kl, gold, **others):
    measured = {"score": 2 * gold, "fluency": 0.9, "distinct": 1.0}
    return {"algorithm": algorithm, "seed": seed, "kl": kl, "gold": gold} | (
        measured | others
    )


@pytest.fixture
def rows():
    """Two seeds: best-of-n reaches a KL of 1 in the first and 4 in the second."""
    before = [row("reference", 0, 0.0, 0.0), row("reference", 1, 0.0, 0.5)]
    after = [
        row("ppo", 0, 0.25, 1.0),
        row("dpo", 0, 9.0, -1.0),
        *(
            row("best_of_n", 0, kl, gold, n=n, kl_bound=1.1 * kl)
            for n, kl, gold in ((2, 0.25, 0.4), (4, 1.0, 0.8))
        ),
        row("ppo", 1, 1.0, 1.5),
        row("dpo", 1, 1.0, 0.5),
        *(
            row("best_of_n", 1, kl, gold, n=n, kl_bound=1.1 * kl)
            for n, kl, gold in ((2, 0.25, 0.7), (4, 4.0, 1.0))
        ),
    ]
    points = [
        row(name, seed, kl, gold, step=step)
        for seed in (0, 1)
        for name in ("ppo", "dpo")
        for step, kl, gold in ((0, 0.0, 0.1), (4, 0.5 + seed, 0.3))
    ]
    return points, before, after


def test_figures_by_hand(rows):
    found = comparison.summarise(*rows, kl_coef=0.5)
    assert found["num_seeds"] == 2
    assert found["reference"]["gold"] == 0.25
    assert list(found["policies"]) == ["PPO", "DPO", "best of 2", "best of 4"]
    of_ppo = found["policies"]["PPO"]
    assert of_ppo["kl"] == pytest.approx(0.625)
    assert of_ppo["gold"] == pytest.approx(1.25)
    assert of_ppo["of_seeds"]["net_gold"] == pytest.approx([1 - 0.125, 1.5 - 0.5])
    assert of_ppo["net_score"] == pytest.approx((2 - 0.125 + 3 - 0.5) / 2)
    # √KL 1 is a third of the way from 0.5 (gold 0.7) to 2 (gold 1.0).
    assert of_ppo["of_seeds"]["lead"] == pytest.approx([0.6, 1.5 - 0.8])
    of_dpo = found["policies"]["DPO"]
    assert of_dpo["of_seeds"]["lead"][0] is None  # no n goes so far
    assert of_dpo["of_seeds"]["lead"][1] == pytest.approx(0.5 - 0.8)
    assert of_dpo["lead"] is None
    of_two = found["policies"]["best of 2"]
    assert (of_two["n"], of_two["kl_bound"]) == (2, pytest.approx(0.275))
    assert of_two["lead"] == pytest.approx(0)
    assert found["paths"]["ppo"] == [
        {"step": step, "kl": kl, "gold": gold, "score": 2 * gold}
        | {"fluency": pytest.approx(0.9), "distinct": 1.0}
        for step, kl, gold in ((0, 0.0, 0.1), (4, 1.0, 0.3))
    ]
    json.dumps(found, allow_nan=False)


def test_a_policy_between_the_reference_and_the_smallest_n_has_a_lead():
    best = [row("best_of_n", 0, 1.0, 2.0, n=2, kl_bound=1.0)]
    reference = row("reference", 0, 0.0, 1.0)
    near = row("ppo", 0, 0.25, 1.2)
    assert comparison.lead(near, reference, best) == pytest.approx(1.2 - 1.5)
    # An estimate of the KL may be below 0, and there may be no best-of-n at all.
    at_start = row("ppo", 0, -1e-9, 1.2)
    assert comparison.lead(at_start, reference, best) == pytest.approx(0.2)
    assert comparison.lead(near, reference, []) is None


def test_the_table_and_the_plot(rows, tmp_path, capsys):
    found = comparison.summarise(*rows, kl_coef=0.5)
    comparison.tell(found, kl_coef=0.5)
    told = capsys.readouterr().out
    for text in ("PPO", "best of 4", "±", "—", "lead in gold"):
        assert text in told
    comparison.plot(tmp_path, *rows)
    assert (tmp_path / "plots" / "comparison.png").stat().st_size > 10_000
    _, before, after = rows
    without = [of for of in after if "n" not in of]
    comparison.tell(comparison.summarise([], before, without, kl_coef=1.0), kl_coef=1.0)
    comparison.plot(tmp_path, [], before, without)


# --- what they learn from ---------------------------------------------------------


@pytest.fixture(scope="module")
def given():
    """A model that knows nothing, and one that scores at random."""
    options = options_in("unused")
    algorithm = quickstart.algorithm_of(options)
    params = toys.params(algorithm.model, scale=0.1)  # so that some responses end
    reward_model = toys.freeze(
        rewards.init(jax.random.key(1), params, model=algorithm.model)
    )
    reward = rewards.from_model(reward_model, model=algorithm.model)
    return trainers.SeedModels(0, toys.freeze(params), reward_model, reward, 0.5)


def said(text):
    return reviews.encode((*text.split(), reviews.EOS))


def two_answers(scores):
    """Says "i like it ." and "i love it .", which the reward model scores so."""

    def draw(params, *, reward, prompts, key):
        rows = len(prompts.tokens)
        said_ = [said(("i like it .", "i love it .")[k % 2]) for k in range(rows)]
        before, response = np.zeros_like(prompts.mask), np.ones((rows, 5), bool)
        answered = Rollout(
            tokens=np.concatenate([prompts.tokens, said_], axis=1),
            mask=np.concatenate([prompts.mask, response], axis=1),
            response_mask=np.concatenate([before, response], axis=1),
            old_logprobs=None,
            entropy=None,
            index=prompts.index,
            sample=prompts.sample,
        )
        return answered, jnp.tile(jnp.asarray(scores, jnp.float32), rows // 2)

    return draw


def chosen_by(scores, given, **changes):
    """Which answers are chosen, of how many pairs."""
    options = options_in("unused", **changes)
    pairs = trainers.pairs_of(given, draw=two_answers(scores), options=options)
    assert {len(pair) for pair in pairs} == {4}
    for pair in pairs:
        assert {tuple(pair.chosen), tuple(pair.rejected)} == {
            tuple(said("i like it .")),
            tuple(said("i love it .")),
        }
        assert reviews.decode(pair.prompt) in reviews.TRAIN_PROMPTS
    return [reviews.decode(pair.chosen)[1] for pair in pairs]


def test_pairs_are_as_many_as_the_responses_of_the_others(given):
    found = chosen_by((0.0, 30.0), given, num_steps=6, batch_size=16)
    assert found == ["love"] * (6 * 16 // 2)
    assert set(chosen_by((30.0, 0.0), given)) == {"like"}


def test_labels_are_bradley_terry_in_units_of_the_score(given):
    found = chosen_by((1.0, 0.0), given, num_steps=64, batch_size=64)
    share = np.mean([verb == "like" for verb in found])
    assert share == pytest.approx(1 / (1 + np.exp(-1)), abs=0.03)


def test_a_seed_has_its_own_pairs_and_the_same_twice(given):
    assert chosen_by((0.0, 0.0), given) == chosen_by((0.0, 0.0), given)
    other = given._replace(seed=1)
    assert chosen_by((0.0, 0.0), given) != chosen_by((0.0, 0.0), other)


def test_equal_answers_are_no_pair(given):
    def draw(params, *, reward, prompts, key):
        answered, scores = two_answers((0.0, 1.0))(
            params, reward=reward, prompts=prompts, key=key
        )
        answered.tokens[:, -5:] = said("i like it .")
        return answered, scores

    assert trainers.pairs_of(given, draw=draw, options=options_in("unused")) == []


def test_a_response_that_never_ends_scores_as_in_training(given):
    """One reward for all: shaped when DPO labels and best-of-n chooses, too."""
    options = options_in("unused", missing_stop_score=-7.0)
    algorithm = quickstart.algorithm_of(options)
    prompts = preparation.prompts_of(TRAIN_PROMPTS, batch_size=32, seed=0)[0]
    answered, scores = jax.jit(
        functools.partial(trainers.sampled, algorithm=algorithm, group_size=1)
    )(
        given.reference.stored,
        reward=given.reward,
        prompts=prompts,
        key=jax.random.key(0),
    )
    last = np.asarray(answered.response_mask).cumsum(axis=1).argmax(axis=1)
    ended = np.asarray(answered.tokens)[np.arange(32), last] == reviews.EOS_ID
    assert 0 < ended.sum() < 32
    raw = jax.jit(lambda reward, answered: reward(answered))(given.reward, answered)
    np.testing.assert_allclose(scores, np.where(ended, raw, -7.0), rtol=1e-5)


def test_trainers_share_what_makes_them_comparable(tmp_path):
    options = options_in(tmp_path)
    algorithm = quickstart.algorithm_of(options)
    made = compare_algorithms.trainers_of(algorithm, options)
    assert list(made) == ["ppo", "grpo", "rloo", "dpo"]
    assert {made[name].num_steps for name in ("ppo", "grpo", "rloo")} == {4}
    assert made["dpo"].num_steps == 4 * 2 * 2
    few = compare_algorithms.trainers_of(
        algorithm, options_in(tmp_path, algorithms=("rloo", "best_of_n"))
    )
    assert list(few) == ["rloo"]
    # One objective for all: a group's mean leaves 3/4 of the reward, so 3/4 of β.
    params = toys.params(algorithm.model)
    kl_coefs = {
        name: float(made[name].start(params).kl.kl_coef)
        for name in ("ppo", "grpo", "rloo")
    }
    assert kl_coefs == pytest.approx({"ppo": 0.2, "grpo": 0.15, "rloo": 0.2})
    # Nor is an advantage divided by what varies with the group.
    assert (trainers.GRPO.baseline, trainers.GRPO.normalise) == ("group", None)
    assert (grpo.RLOO.baseline, grpo.RLOO.normalise) == ("leave_one_out", None)


# --- the experiment ---------------------------------------------------------------


def words_of(options):
    found = []
    for name, value in options.items():
        several = isinstance(value, tuple)
        found += [
            f"--{name.replace('_', '-')}",
            *map(str, value if several else [value]),
        ]
    return found


def play(out, *argv):
    command_line.main(
        compare_algorithms.main,
        compare_algorithms.Config,
        description="",
        argv=["--out", str(out), "--no-progress", *words_of(TOY), *argv],
    )
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def lenient():
    """A judge of words: nothing that a model this small says would parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reviews, "careful_gold", lambda _, said: reviews.gold(said))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lenient):
    out = tmp_path_factory.mktemp("compare") / "run"
    return out, play(out)


NAMES = ["PPO", "GRPO", "RLOO", "DPO", "best of 2", "best of 4"]


@pytest.mark.long
def test_the_experiment_leaves_figures_and_a_plot(whole):
    out, summary = whole
    assert list(summary["policies"]) == NAMES
    assert summary["reference_verified"] is True
    assert summary["responses_for_training"] == 32
    assert len(summary["responses"]) == 2 * (1 + len(NAMES))
    assert summary["reference"]["kl"] == pytest.approx(0, abs=1e-4)
    for n in (2, 4):
        of_n = summary["policies"][f"best of {n}"]
        assert of_n["kl_bound"] == pytest.approx(best_of_n.kl_bound(n))
        # Few prompts, but F of what is chosen is known whatever the rewards.
        assert of_n["kl"] == pytest.approx(of_n["kl_bound"], abs=0.5)
    of_best = [summary["policies"][f"best of {n}"]["score"] for n in (2, 4)]
    assert of_best == sorted(of_best)
    for name in NAMES[:4]:
        assert abs(summary["policies"][name]["kl"]) > 1e-5
    assert (out / "plots" / "comparison.png").exists()


@pytest.mark.long
def test_every_run_leaves_its_rows(whole):
    out, summary = whole
    rows = metrics.read(out / "metrics.jsonl")
    steps = {"ppo": 4, "grpo": 4, "rloo": 4, "dpo": 16}
    assert [(of["stage"], of["step"]) for of in rows] == [
        (f"{name}_{seed}", step)
        for seed in (0, 1)
        for name, count in steps.items()
        for step in range(count)
    ]
    firsts = {of["stage"]: of for of in rows if of["step"] == 0}
    assert firsts["dpo_0"]["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5)
    assert "value/clipfrac" in firsts["ppo_0"]
    assert "value/clipfrac" not in firsts["grpo_0"]
    assert firsts["rloo_0"]["group/equal_fraction"] == 0
    samples = metrics.read(out / "samples.jsonl")
    assert [(of["stage"], of["step"]) for of in samples] == [
        (f"{name}_{seed}", step)
        for seed in (0, 1)
        for name, count in steps.items()
        for step in range(0, count, count // 2)
    ]
    for of in samples:
        assert of["stage"] == f"{of['algorithm']}_{of['seed']}"
        assert (abs(of["kl"]) < 1e-4) == (of["step"] == 0)
    for name, path in summary["paths"].items():
        assert [of["step"] for of in path] == [0, steps[name] // 2]
    prepared = metrics.read(out / "seed_1" / "metrics.jsonl")
    assert {of["stage"] for of in prepared} == {"sft", "reward_model"}


@pytest.mark.long
def test_stopped_and_alone_a_run_is_the_same_to_the_last_bit(
    whole, tmp_path, monkeypatch
):
    """By a signal in GRPO and a crash in DPO, without the other runs beside them."""
    out, summary = whole
    parts = tmp_path / "parts"
    make = compare_algorithms.trainers_of
    calls = collections.Counter()

    def stopping(name, update):
        def counted(*args, **kwargs):
            calls[name] += 1
            if name == "grpo" and calls[name] == 2:
                os.kill(os.getpid(), signal.SIGTERM)  # saved after this step
            if name == "dpo" and calls[name] == 8:
                raise RuntimeError("power cut")  # step 6 was the last to be saved
            return update(*args, **kwargs)

        return counted

    monkeypatch.setattr(
        compare_algorithms,
        "trainers_of",
        lambda *args: {
            name: trainer._replace(update=stopping(name, trainer.update))
            for name, trainer in make(*args).items()
        },
    )
    few = ("--num-seeds=1", "--snapshot-every=3", "--algorithms", "grpo", "dpo")
    with pytest.raises(SystemExit) as exit_:
        play(parts, *few)
    assert exit_.value.code == 128 + signal.SIGTERM
    saved = parts / "snapshots" / "grpo_0"
    assert [path.name for path in saved.iterdir()] == ["2"]
    with pytest.raises(RuntimeError, match="power cut"):
        play(parts, *few, "--resume")
    again = play(parts, *few, "--resume")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert metrics.read(parts / name) == [
            of for of in metrics.read(out / name) if of["stage"] in ("grpo_0", "dpo_0")
        ]
    assert again["responses"] == [
        of
        for of in summary["responses"]
        if of["seed"] == 0 and of.get("algorithm", "grpo") in ("grpo", "dpo")
    ]


# --- what a user may get wrong ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ()}, "--algorithms: expected at least one and each once"),
        ({"algorithms": ("ppo", "ppo")}, "--algorithms: expected at least one and ea"),
        ({"num_seeds": 0}, "num_seeds: expected"),
        ({"num_prompts": 5}, "--num-evaluated: expected a multiple of the 5"),
        (
            {"kl_control": Control(kind="linear", end=1.0)},
            "--kl-control: expected none",
        ),
        ({"num_prompts": 0}, "num_prompts: expected"),
        ({"dpo_learning_rate": 0.0}, "dpo_learning_rate: expected"),
        ({"group_size": 3}, "group_size: expected to divide the 8 rows of a batch"),
        ({"group_size": 1}, "group_size: expected at least 2, got 1; sample more"),
        ({"best_of": ()}, "--best-of: expected numbers above 1 that divide the larges"),
        ({"best_of": (1, 2)}, "--best-of: expected numbers above 1"),
        ({"best_of": (4, 6)}, "--best-of: expected numbers above 1"),
        ({"kl_coef": 0.0}, "kl_coef: expected a finite number above 0"),
        (
            {"num_minibatches": 8, "algorithms": ("dpo",)},
            "--batch-size: expected pairs of responses in each of the 8 minibatches",
        ),
        ({"kl_coef": -1.0}, "kl_coef: expected a finite number"),
        ({"sample_every": 0}, "sample_every: expected"),
    ],
)
def test_options_that_are_refused(tmp_path, changes, message):
    with pytest.raises(checks.InputError, match=message):
        options_in(tmp_path, **changes)


def test_options_that_others_do_not_need_are_theirs_alone(tmp_path):
    """No group has to divide PPO's batch, and PPO can do without a penalty."""
    options_in(tmp_path, algorithms=("ppo", "best_of_n"), group_size=3, kl_coef=0.0)
    options_in(tmp_path, algorithms=("dpo",), group_size=3)


def test_an_algorithm_that_there_is_not(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        play(tmp_path / "run", "--algorithms", "ppo", "trpo")
    assert exit_.value.code == 2
    assert "trpo" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
