"""One policy on the review language at toy size: its training data and resuming."""

import functools
import json
import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quickstart
import toys
from pipeline.options import TRAIN_PROMPTS
from studies.policies import algorithms, made_once, preparation
from studies.policies import reviews as program
from studies.policies.options import Config
from worlds import reviews

from rlhf_jax import rewards
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import best_of_n, checks
from rlhf_jax.functional.kl.control import Adaptive, Linear
from rlhf_jax.functional.kl.penalty import IN_LOSS
from rlhf_jax.runs import command_line, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
TOY = {
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
    "responses_per_prompt": 4,
    "sample_every": 2,
}


def options_in(folder, **changes):
    return Config(out=Path(folder), progress=False, **(TOY | changes))


# --- what they learn from ---------------------------------------------------------


@pytest.fixture(scope="module")
def prepared_models():
    """An untrained model, and a reward model with random scores."""
    options = options_in("unused")
    algorithm = quickstart.algorithm_of(options)
    params = toys.params(algorithm.model, scale=0.1)  # so that some responses end
    reward_model = toys.freeze(
        rewards.init(jax.random.key(1), params, model=algorithm.model)
    )
    reward = rewards.from_model(reward_model, model=algorithm.model)
    return preparation.SeedModels(0, toys.freeze(params), (reward_model,), reward, 0.5)


def ids_of(text):
    return reviews.encode((*text.split(), reviews.EOS))


def two_answers(scores):
    """Answers "i like it ." and "i love it ." with these scores by the reward model."""

    def draw(params, *, reward, prompts, key):
        rows = len(prompts.tokens)
        responses = [ids_of(("i like it .", "i love it .")[k % 2]) for k in range(rows)]
        before, response = np.zeros_like(prompts.mask), np.ones((rows, 5), bool)
        answered = Rollout(
            tokens=np.concatenate([prompts.tokens, responses], axis=1),
            mask=np.concatenate([prompts.mask, response], axis=1),
            response_mask=np.concatenate([before, response], axis=1),
            old_logprobs=None,
            entropy=None,
            index=prompts.index,
            sample=prompts.sample,
        )
        return answered, jnp.tile(jnp.asarray(scores, jnp.float32), rows // 2)

    return draw


def chosen_by(scores, prepared_models, **changes):
    """The chosen answers, and the number of pairs."""
    options = options_in("unused", **changes)
    pairs = algorithms.pairs_of(
        prepared_models, draw=two_answers(scores), options=options
    )
    assert {len(pair) for pair in pairs} == {4}
    for pair in pairs:
        assert {tuple(pair.chosen), tuple(pair.rejected)} == {
            tuple(ids_of("i like it .")),
            tuple(ids_of("i love it .")),
        }
        assert reviews.decode(pair.prompt) in reviews.TRAIN_PROMPTS
    return [reviews.decode(pair.chosen)[1] for pair in pairs]


def test_pairs_are_as_many_as_the_responses_of_the_others(prepared_models):
    verbs = chosen_by((0.0, 30.0), prepared_models, num_steps=6, batch_size=16)
    assert verbs == ["love"] * (6 * 16 // 2)
    assert set(chosen_by((30.0, 0.0), prepared_models)) == {"like"}


def test_labels_are_bradley_terry_in_units_of_the_score(prepared_models):
    verbs = chosen_by((1.0, 0.0), prepared_models, num_steps=64, batch_size=64)
    share = np.mean([verb == "like" for verb in verbs])
    assert share == pytest.approx(1 / (1 + np.exp(-1)), abs=0.03)


def test_a_seed_has_its_own_pairs_and_the_same_twice(prepared_models):
    assert chosen_by((0.0, 0.0), prepared_models) == chosen_by(
        (0.0, 0.0), prepared_models
    )
    other = prepared_models._replace(seed=1)
    assert chosen_by((0.0, 0.0), prepared_models) != chosen_by((0.0, 0.0), other)


def test_equal_answers_are_no_pair(prepared_models):
    def draw(params, *, reward, prompts, key):
        answered, scores = two_answers((0.0, 1.0))(
            params, reward=reward, prompts=prompts, key=key
        )
        answered.tokens[:, -5:] = ids_of("i like it .")
        return answered, scores

    assert (
        algorithms.pairs_of(prepared_models, draw=draw, options=options_in("unused"))
        == []
    )


def test_a_response_that_never_ends_scores_as_in_training(prepared_models):
    """DPO's labels and best-of-n also use the shaped reward."""
    options = options_in("unused", missing_stop_score=-7.0)
    algorithm = quickstart.algorithm_of(options)
    prompts = preparation.prompts_of(TRAIN_PROMPTS, batch_size=32, seed=0)[0]
    answered, scores = jax.jit(
        functools.partial(algorithms.sampled, algorithm=algorithm, group_size=1)
    )(
        prepared_models.reference.stored,
        reward=prepared_models.reward,
        prompts=prompts,
        key=jax.random.key(0),
    )
    last = np.asarray(answered.response_mask).cumsum(axis=1).argmax(axis=1)
    ended = np.asarray(answered.tokens)[np.arange(32), last] == reviews.EOS_ID
    assert 0 < ended.sum() < 32
    raw = jax.jit(lambda reward, answered: reward(answered))(
        prepared_models.reward, answered
    )
    np.testing.assert_allclose(scores, np.where(ended, raw, -7.0), rtol=1e-5)


def test_one_objective_for_all(tmp_path):
    """The group-mean baseline leaves 3/4 of the reward, so β in the loss is 3/4 too."""
    params = toys.params(quickstart.algorithm_of(options_in(tmp_path)).model)
    kl_coefs = {}
    for name, changes in {
        "ppo": {},
        "grpo": {"penalty": IN_LOSS},
        "grpo, KL in the reward": {},
        "rloo": {},
    }.items():
        options = options_in(tmp_path, algorithm=name.partition(",")[0], **changes)
        trainer = algorithms.trainer_of(options.of_programs())
        kl_coefs[name] = float(trainer.start(params, 0.2).kl.kl_coef)
        assert trainer.num_steps == 4
    assert kl_coefs == pytest.approx(
        {"ppo": 0.2, "grpo": 0.15, "grpo, KL in the reward": 0.2, "rloo": 0.2}
    )
    dpo = algorithms.trainer_of(options_in(tmp_path, algorithm="dpo").of_programs())
    assert dpo.num_steps == 4 * 2 * 2
    best = options_in(tmp_path, algorithm="best_of_n").of_programs()
    assert algorithms.trainer_of(best) is None


def test_programs_are_shared_where_runs_differ_in_numbers_alone(tmp_path):
    def programs(**changes):
        return options_in(tmp_path, **changes).of_programs()

    first = programs(seed=0, kl_coef=0.0)
    elsewhere = options_in(tmp_path / "elsewhere").of_programs()
    assert first == elsewhere
    assert algorithms.trainer_of(first) is algorithms.trainer_of(elsewhere)
    assert first == programs(seed=7, kl_coef=0.3, prepared=tmp_path, resume=True)
    assert algorithms.trainer_of(first) is algorithms.trainer_of(programs(seed=3))
    for other in (
        {"algorithm": "rloo"},
        {"penalty": IN_LOSS},
        {"num_steps": 5},
        {"lam": 1.0},
    ):
        assert first != programs(**other)
    # A controller has bounds around β.
    control = Adaptive(target=3.0, unit="response", max_kl_coef=0.5)
    assert programs(kl_control=control, kl_coef=0.1).kl_coef == 0.1
    # What measures responses knows nothing of how they are learned from.
    measuring = options_in(tmp_path).of_measuring()
    for other in ({"algorithm": "rloo"}, {"penalty": IN_LOSS}, {"lam": 1.0}):
        assert options_in(tmp_path, **other).of_measuring() == measuring
    assert options_in(tmp_path, temperature=0.9).of_measuring() != measuring
    # β is a part of DPO's loss.
    both = [programs(algorithm="dpo", kl_coef=kl_coef) for kl_coef in (0.1, 0.2)]
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"penalty": IN_LOSS}, {"penalty": IN_LOSS}),
        ({"aggregation": "constant"}, {"aggregation": "constant"}),
        ({"whiten_advantages": None}, {"whiten_advantages": None}),
        ({"lam": 1.0}, {"lam": 1.0}),
        ({"algorithm": "grpo", "aggregation": "constant"}, {"aggregation": "constant"}),
        ({"algorithm": "rloo", "group_size": 2}, {"group_size": 2, "normalise": None}),
        ({"algorithm": "rloo"}, {"baseline": "leave_one_out"}),
    ],
)
def test_options_come_to_the_recipe(tmp_path, monkeypatch, changes, options):
    """The recipe is the one whose iteration is compiled."""
    recipes = []
    for name in ("ppo", "grpo"):
        monkeypatch.setattr(
            getattr(algorithms, name),
            "iteration",
            lambda *args, recipe, **kwargs: recipes.append(recipe),
        )
    own = options_in(tmp_path, num_evaluated=32, **changes).of_programs()
    trainer = algorithms.trainer_of.__wrapped__(own)
    trainer.update(None, batch=None, reference=None, reward=None, key=None)
    for name, value in options.items():
        assert vars(recipes[0])[name] == value


def test_models_are_made_anew_where_their_training_differs(tmp_path):
    def folder(seed=0, **changes):
        own = options_in(tmp_path, seed=seed, **changes).of_preparation(tmp_path)
        return made_once.folder_of(tmp_path, "reviews", own)

    first = folder()
    assert first == folder(kl_coef=0.0, num_steps=9, algorithm="rloo", lam=1.0)
    assert first.parent == folder(seed=1).parent
    assert first.name != folder(seed=1).name
    for other in (
        {"label_noise": 0.5},
        {"sft_steps": 31},
        {"sft_learning_rate": 1e-3},
        {"sft_batch_size": 4},
        {"reward_steps": 3},
        {"reward_learning_rate": 1e-4},
        {"num_pairs": 48},
        {"temperature": 1.0},
        {"hidden_size": 8},
        {"num_layers": 2},
        {"num_heads": 1},
        {"num_evaluated": 32},
    ):
        assert folder(**other) != first


def test_arrays_are_made_by_the_first_that_comes(tmp_path):
    """The other processes wait for it and can be stopped while waiting."""
    made, waiting = [], threading.Event()

    def make():
        made.append(None)
        waiting.wait(10)
        return {"a": {"b": np.arange(3.0)}}

    first = threading.Thread(
        target=made_once.made_once,
        args=(tmp_path / "of", make),
        kwargs={"check": lambda: None},
    )
    first.start()
    while not made:
        time.sleep(0.01)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once.made_once(tmp_path / "of", make, check=stop)
    looks = []

    def look():
        looks.append(None)
        if len(looks) == 2:
            waiting.set()

    arrays = made_once.made_once(tmp_path / "of", make, check=look)
    first.join()
    np.testing.assert_array_equal(arrays["a"]["b"], [0, 1, 2])
    assert len(made) == 1
    assert len(looks) >= 2
    (tmp_path / "of" / "arrays.safetensors").write_bytes(b"")
    with pytest.raises(checks.InputError, match="expected arrays that an earlier run"):
        made_once.made_once(tmp_path / "of", make, check=look)


@pytest.fixture(scope="module")
def lenient():
    """A judge of single words, as no response of so small a model would parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reviews, "careful_gold", lambda _, response: reviews.gold(response)
        )
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, lenient):
    return tmp_path_factory.mktemp("prepared")


def play(out, prepared, **changes):
    words = []
    for name, value in (TOY | changes | {"prepared": prepared}).items():
        values = value if isinstance(value, tuple) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    resume = ["--resume"] if (out / "config.json").exists() else []
    command_line.main(
        program.main,
        Config,
        description="",
        argv=["--out", str(out), "--no-progress", *words, *resume],
    )
    summary = json.loads((out / "summary.json").read_text())
    del summary["proof"]  # its config.json has its own --out
    return summary


def test_a_run_leaves_what_it_came_to(tmp_path, prepared):
    out = tmp_path / "run"
    summary = play(out, prepared, algorithm="rloo")
    assert summary["reference"]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(summary["policy"]["kl"]) > 1e-5
    assert summary["responses_for_training"] == 32
    assert summary["reference_verified"] is True
    rows = metrics.read(out / "samples.jsonl")
    points = [row for row in rows if "tokens" not in row]
    assert [row["step"] for row in points] == [0, 2]
    for row in points:
        assert (abs(row["kl"]) < 1e-4) == (row["step"] == 0)
    shown = [row for row in rows if "tokens" in row]
    assert [row["step"] for row in shown] == [0, 0, 2, 2]
    for row in shown:
        assert "".join(row["tokens"]) == row["response"]
        assert row["judge"] == pytest.approx(
            reviews.gold(row["response"].split()), abs=1e-4
        )
        if row["step"] == 0:  # the policy is the reference still
            assert row["logprobs"] == pytest.approx(row["ref_logprobs"], abs=2e-4)
    learned = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in learned] == [0, 1, 2, 3]
    assert ["judge/score" in row for row in learned] == [True, False, True, False]
    folders = list(prepared.glob("reviews_*/seed_0"))
    assert len(folders) == 1  # one for all runs of the seed
    made = folders[0] / "arrays.safetensors"
    before = made.stat().st_mtime_ns
    play(tmp_path / "again", prepared, algorithm="rloo")
    assert made.stat().st_mtime_ns == before
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_the_way_is_told_of_training_responses_too(tmp_path, prepared):
    """With --look training, score and KL equal those of metrics.jsonl."""
    out = tmp_path / "run"
    play(out, prepared, algorithm="rloo", look="training")
    points = [row for row in metrics.read(out / "samples.jsonl") if "tokens" not in row]
    learned = metrics.read(out / "metrics.jsonl")
    for row in points:
        own = learned[row["step"]]
        assert row["score"] == pytest.approx(own["objective/scores"], abs=1e-5)
        assert row["kl"] == pytest.approx(own["objective/kl"], abs=1e-5)
        assert row["gold"] == pytest.approx(own["judge/score"], abs=1e-5)
    assert [row["step"] for row in points] == [0, 2]
    assert points[1]["score"] != pytest.approx(points[1]["kl"], abs=1e-3)


def test_best_of_n_has_the_kl_that_theory_says(tmp_path, prepared):
    summary = play(tmp_path / "run", prepared, algorithm="best_of_n")
    rows = [summary[f"best of {n}"] for n in (2, 4)]
    for row in rows:
        assert row["kl_bound"] == pytest.approx(best_of_n.kl_bound(row["n"]))
        # Few prompts, but F of what is chosen is known whatever the rewards.
        assert row["kl"] == pytest.approx(row["kl_bound"], abs=0.5)
    assert rows[0]["score"] < rows[1]["score"]
    assert "policy" not in summary


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
@pytest.mark.cases(slow=1)
def test_stopped_and_crashed_a_run_goes_on_to_the_last_bit(
    algorithm, tmp_path, prepared, monkeypatch
):
    whole = play(tmp_path / "whole", prepared, algorithm=algorithm, snapshot_every=3)
    make, calls = program.trainer_of, []

    def stopping(options):
        trainer = make(options)

        def counted(*args, **kwargs):
            calls.append(None)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)  # saved after this step
            if len(calls) == 4:
                raise RuntimeError("power cut")  # step 3 was the last to be saved
            return trainer.update(*args, **kwargs)

        return trainer._replace(update=counted)

    monkeypatch.setattr(program, "trainer_of", stopping)
    changes = {"algorithm": algorithm, "snapshot_every": 3}
    parts = tmp_path / "parts"
    with pytest.raises(SystemExit) as exit_:
        play(parts, prepared, **changes)
    assert exit_.value.code == 128 + signal.SIGTERM
    saved = parts / "snapshots" / algorithm
    assert [path.name for path in saved.iterdir()] == ["2"]
    with pytest.raises(RuntimeError, match="power cut"):
        play(parts, prepared, **changes)
    again = play(parts, prepared, **changes)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert again | {"seconds": 0} == whole | {"seconds": 0}


def test_the_reward_of_a_seed_is_its_members_combined(tmp_path, prepared):
    def models(**changes):
        options = options_in(tmp_path, prepared=prepared, num_members=3, **changes)
        return preparation.seed_models(options, check=lambda: None)

    made = models()
    model = quickstart.algorithm_of(options_in(tmp_path)).model
    prompts = preparation.prompts_of(TRAIN_PROMPTS, batch_size=4, seed=0)[0]
    answered, _ = two_answers((0.0, 0.0))(None, reward=None, prompts=prompts, key=None)
    scores = np.stack(
        [rewards.from_model(of, model=model)(answered) for of in made.reward_models]
    )
    assert scores.std(axis=0).min() > 1e-3
    for how, expected in (
        ("mean", scores.mean(axis=0)),
        ("minimum", scores.min(axis=0)),
        ("mean_minus_std", scores.mean(axis=0) - 0.5 * scores.std(axis=0)),
    ):
        reward = models(combine=how, std_coef=0.5).reward
        np.testing.assert_allclose(reward(answered).total, expected, atol=1e-5)


# --- what a user may get wrong ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"responses_per_prompt": 5}, "--num-evaluated: expected a multiple of the 5"),
        ({"responses_per_prompt": 0}, "responses_per_prompt: expected"),
        (
            {"algorithm": "dpo", "kl_control": Linear(end=1.0)},
            "--kl-control: expected none with --algorithm dpo",
        ),
        ({"dpo_learning_rate": 0.0}, "dpo_learning_rate: expected"),
        (
            {"algorithm": "grpo", "group_size": 3},
            "group_size: expected to divide the 8 rows of a batch",
        ),
        (
            {"algorithm": "rloo", "group_size": 1},
            "group_size: expected at least 2, got 1; sample more",
        ),
        (
            {"algorithm": "best_of_n", "best_of": ()},
            "--best-of: expected numbers above 1 that divide the larges",
        ),
        ({"algorithm": "best_of_n", "best_of": (4, 6)}, "--best-of: expected numbers"),
        ({"algorithm": "dpo", "kl_coef": 0.0}, "kl_coef: expected a finite number abo"),
        (
            {"num_minibatches": 8, "algorithm": "dpo"},
            "--batch-size: expected pairs of responses in each of the 8 minibatches",
        ),
        ({"algorithm": "dpo", "penalty": IN_LOSS}, "--penalty, --look training: exp"),
        ({"kl_coef": -1.0}, "kl_coef: expected a finite number"),
        ({"combine": "minimum"}, "expected several reward models, got one"),
        ({"lam": 1.5}, "lam"),
    ],
)
def test_options_that_are_refused(tmp_path, changes, message):
    with pytest.raises(checks.InputError, match=message):
        options_in(tmp_path, **changes)


def test_options_that_others_do_not_need_are_theirs_alone(tmp_path):
    """PPO's batch need not be divisible by a group, and PPO may have no penalty."""
    options_in(tmp_path, group_size=3, kl_coef=0.0)
    options_in(tmp_path, algorithm="dpo", group_size=3)
