"""The presets have the published values, on the command line and in the library."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toy_files

from rlhf_jax import hf, kl_control, rewards
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.recipe import Clip, FixedLength
from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019, Recipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train.config.optimizer import Adam, Linear, TFAdam
from rlhf_jax.train.methods import ppo
from rlhf_jax.train.supervised import reward_model

PRESETS = ppo.PRESETS
NEEDED = ("--model=m", "--prompts=p", "--out=never")

# What both papers share. The name of OAI's option stands behind where it is another.
SHARED = {
    "temperature": 0.7,  # policy.temperature
    "penalty": Penalty(value_estimator="k1", placement="reward"),
    "scores": ScoreShaping(missing_stop_score=-1.0),  # penalty_reward_value
    "sampler_correction": None,
    "gamma": 1.0,
    "lam": 0.95,
    "whiten_advantages": "minibatch",
    "whiten_ddof": 0,  # tf.nn.moments; masked_var(..., unbiased=False)
    "value_clip_range": 0.2,  # cliprange_value
    "vf_coef": 0.1,
    "num_epochs": 4,  # noptepochs
    "num_minibatches": 1,  # nminibatches
    "aggregation": "token_mean",
    "loss_scale_factor": None,
    # Nothing that came later.
    "surrogate": Clip(0.2, clip_range_high=None, dual_clip=None),  # cliprange
    "off_policy_mask": None,
    "token_choice": None,
    "entropy_control": None,
    "gradient_penalty": None,
    "balance_coef": 0.0,
    "routing_replay": None,
    "entropy_coef": 0.0,
    "ptx_coef": 0.0,
    "critic_warmup": 0,
    "stop_approxkl": None,
    "max_ratio_mean": None,
    "micro_batch_size": None,
    "continuous_batching": None,
}
PUBLISHED = {
    # launch.py: books_task, sentiment; train_policy.py: PpoHParams.
    "openai-2019": SHARED
    | {
        "fixed_length": FixedLength(truncate_after=16, reward_only=True),
        "whiten_rewards": "minibatch",
        "value_after_stop": False,
        "shared_trunk": True,
    },
    # ppo.py of summarize_from_feedback_details: Args, PpoHParams.
    "n-plus": SHARED
    | {
        "fixed_length": FixedLength(truncate_after=0, reward_only=False),
        "whiten_rewards": None,
        "value_after_stop": True,
        "shared_trunk": False,
    },
}


def parse(*argv, presets=PRESETS):
    return command_line.parse(ppo.Config, description="", presets=presets, argv=argv)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("openai-2019", OPENAI_2019), ("n-plus", N_PLUS)],
)
def test_a_recipe_holds_what_was_published(name, recipe):
    assert vars(recipe) == PUBLISHED[name]
    assert PRESETS[name]["method"] is recipe


def test_around_the_recipes_too():
    openai, n_plus = PRESETS["openai-2019"], PRESETS["n-plus"]
    assert (openai["kl"].kl_coef, n_plus["kl"].kl_coef) == (0.15, 0.05)
    assert openai["kl"].kl_control == kl_control.Adaptive(
        target=6.0, unit="response", horizon=10_000
    )
    assert n_plus["kl"].kl_control == kl_control.Fixed()
    assert (openai["num_steps"], n_plus["num_steps"]) == (1954, 1953)  # 10⁶ episodes
    batches = openai["batch"], n_plus["batch"]
    assert [batch.batch_size for batch in batches] == [512, 512]
    assert [batch.max_new_tokens for batch in batches] == [24, 53]
    for preset, kind, rate in ((openai, TFAdam, 1e-5), (n_plus, Adam, 3e-6)):
        for role in (preset["optimizer"], preset["critic"]):
            assert role.optimizer == kind(eps=1e-5)
            assert role.max_grad_norm is None
            assert role.learning_rate == rate
            assert role.schedule == Linear()
    assert n_plus["critic"].start == "reward_model"


def test_the_defaults_are_those_of_both():
    """Detail 13, and the recipe's other defaults."""
    default = vars(Recipe())
    same = set(SHARED) - {"scores", "whiten_advantages"}
    assert {name: default[name] for name in same} == {
        name: SHARED[name] for name in same
    }
    assert default["whiten_advantages"] == "rollout"


# --- on the command line ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "argv"),
    [("openai-2019", ("--reward=m:f",)), ("n-plus", ("--reward-model=r",))],
)
def test_a_preset_is_other_defaults(name, argv):
    options = vars(parse(f"--preset={name}", *NEEDED, *argv))
    assert options == vars(parse(*NEEDED, *argv)) | PRESETS[name]


def test_what_the_user_asks_for_wins():
    config = parse(
        *("--kl-coef=0.3", "--preset", "n-plus", *NEEDED, "--reward=m:f"),
        *("--critic.start=policy", "--lam=0.9", "--no-value-after-stop"),
        *("--scores.missing-stop-score=-3", "--learning-rate=1e-4"),
    )
    expected = dataclasses.replace(
        N_PLUS,
        lam=0.9,
        value_after_stop=False,
        scores=ScoreShaping(missing_stop_score=-3.0),
    )
    assert config.method == expected
    assert (config.kl_coef, config.critic.start) == (0.3, "policy")
    rates = config.optimizer.learning_rate, config.critic.learning_rate
    assert rates == (1e-4, 3e-6)
    # A whole choice of a preset may be taken back.
    config = parse(
        *("--preset=openai-2019", *NEEDED, "--reward=m:f", "--kl-control=fixed"),
    )
    assert config.kl.kl_control == kl_control.Fixed()
    assert config.kl_coef == 0.15


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--preset=openai-2017",),
            "--preset: expected one of openai-2019, n-plus, got openai-2017",
        ),
        (
            ("--preset=n-plus", "--config=run/config.json"),
            "--preset: expected none with the --config of a recorded run",
        ),
    ],
)
def test_a_preset_that_cannot_be(argv, message, capsys):
    with pytest.raises(checks.InputError, match=message):
        parse(*argv, *NEEDED)
    with pytest.raises(SystemExit) as exit_:
        ppo.command([*argv, *NEEDED])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_without_presets_there_is_no_such_option():
    with pytest.raises(checks.InputError, match="got '--preset=n-plus'"):
        parse("--preset=n-plus", *NEEDED, "--reward=m:f", presets=None)


def test_help_shows_the_presets_and_their_values(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--preset", "openai-2019", "--help-all")
    assert exit_.value.code == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "--preset openai-2019|n-plus starts from the options of a published" in text
    for option, value in {
        "--kl-coef {None}|FLOAT": "0.15",
        "--batch-size INT": "512",
        "--fixed-length TRUNCATE_AFTER": "truncate_after=16,reward_only=true",
        " --optimizer adam|": "tf_adam,eps=1e-05",
        " --kl-control fixed|": "adaptive,target=6.0,unit=response",
    }.items():
        start = text.index(option)
        default = re.search(r"\(default: (.+?)\)", text[start:])[1]
        assert default.replace(", ", ",") == value  # a line may end after a comma


def test_a_critic_of_the_reward_model_needs_one():
    message = (
        "--critic.start reward_model: expected none with no reward model, as the "
        "critic starts from exactly one"
    )
    with pytest.raises(checks.InputError, match=message):
        parse("--preset=n-plus", *NEEDED, "--reward=m:f")


# --- learning rates and Adam --------------------------------------------------


def optimizers(*argv):
    """(policy's, critic's) optimizer of a run of 3 iterations, from a command line."""
    made = parse(*NEEDED, "--reward=m:f", "--num-steps=3", *argv).optimizers()
    return made["policy_optimizer"], made["critic_optimizer"]


def steps_of(optimizer, gradient: float, *, count: int, size: int = 1) -> list[float]:
    """A parameter's decrease in each update under a constant gradient."""
    params = {"w": jnp.zeros(size)}
    grads, opt, moved = {"w": jnp.full(size, gradient)}, optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(count):
        updates, opt = update(grads, opt, params)
        moved.append(-float(updates["w"][0]))
    return moved


@pytest.mark.parametrize("role", [0, 1])
def test_the_learning_rate_falls_to_0_over_all_updates(role):
    """3 iterations of 2 epochs of 2 minibatches; Adam's step is then lr·g/(g + eps)."""
    made = optimizers(
        *("--num-epochs=2", "--num-minibatches=2"),
        *("--learning-rate=0.1", "--critic.learning-rate=0.3"),
        *("--optimizer=adam,eps=1e-5", "--critic.optimizer=adam,eps=1e-5"),
    )[role]
    expected = (0.1, 0.3)[role] * (1 - np.arange(12) / 12) * 0.5 / (0.5 + 1e-5)
    sizes = steps_of(made, 0.5, count=14)
    np.testing.assert_allclose(sizes[:12], expected, rtol=1e-3)
    assert sizes[12:] == pytest.approx([0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("style", ["adam", "tf_adam"])
def test_the_place_of_eps_is_an_option(style):
    """A gradient equal to eps makes half a step, or at first 1/32.6 of one."""
    made, _ = optimizers(f"--optimizer={style},eps=1e-5", "--learning-rate=1")
    share = {"adam": 1 / 2, "tf_adam": 1 / (1 + 1 / np.sqrt(1 - 0.999))}[style]
    assert steps_of(made, 1e-5, count=1) == pytest.approx([share], rel=1e-3)


@pytest.mark.parametrize("role", [0, 1])
def test_gradients_are_scaled_down_to_a_norm(role):
    """Four entries of 4, norm 8, become half of eps each, by Adam's step."""
    scaled = optimizers(
        *("--max-grad-norm=1e-5", "--critic.max-grad-norm=1e-5"),
        *("--learning-rate=1", "--critic.learning-rate=1"),
        *("--optimizer=adam,eps=1e-5", "--critic.optimizer=adam,eps=1e-5"),
    )[role]
    sizes = steps_of(scaled, 4.0, count=1, size=4)
    assert sizes == pytest.approx([0.5 / 1.5], rel=1e-3)


def test_the_reward_model_s_falls_to_0_too(tmp_path, monkeypatch):
    """It falls over one pass of the pairs, the default."""

    class Called(Exception):
        pass

    def spy(*arguments):
        raise Called(arguments)

    monkeypatch.setattr(optax, "linear_schedule", spy)
    pair = {"prompt": "the cat", "chosen": "sat .", "rejected": "ran ."}
    config = command_line.parse(
        reward_model.Config,
        description="",
        argv=[
            *("--model", str(toy_files.checkpoint(tmp_path / "model"))),
            *("--data", str(toy_files.jsonl(tmp_path / "pairs", *[pair] * 10))),
            *("--out", str(tmp_path / "run"), "--held-out=0", "--batch-size=2"),
            *("--learning-rate=0.25", "--no-check-memory", "--normalise=None"),
        ],
    )
    with pytest.raises(Called) as raised:
        reward_model.main(config)
    assert raised.value.args == ((0.25, 0.0, 5),)


# --- runs ---------------------------------------------------------------------

REWARD = """
def score(prompts, responses, rows):
    return [float(len(set(response.split()))) for response in responses]
"""
SMALL = (
    *("--num-steps=2", "--batch-size=8", "--max-new-tokens=6", "--no-progress"),
    *("--sample-every=1", "--num-shown=8"),
)


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["openai-2019", "n-plus"])
def test_each_preset_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "distinct_words.py").write_text(REWARD)
    toy_files.checkpoint(tmp_path / "model")
    toy_files.jsonl(tmp_path / "prompts.jsonl", {"prompt": "the cat"}, {"prompt": "a"})
    scorer = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    hf.save_reward(
        tmp_path / "scorer", toy_files.MODEL, scorer, tokenizer=toy_files.tokenizer()
    )
    own = {
        "openai-2019": (
            "--reward=distinct_words:score",
            "--fixed-length=2,reward_only=true",
        ),
        "n-plus": ("--reward-model=scorer",),
    }[name]

    def play(*argv):
        ppo.command([*argv])

    play(
        *(f"--preset={name}", "--model=model", "--prompts=prompts.jsonl"),
        *("--out=run", *SMALL, *own),
    )
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    kl_coef = PRESETS[name]["kl"].kl_coef
    assert recorded["method"]["lam"] == 0.95
    assert recorded["kl"]["kl_coef"] == kl_coef
    first, second = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["objective/kl_coef"] == pytest.approx(kl_coef)
    expected = kl_coef
    if name == "openai-2019":
        expected = oracles.adaptive_kl_coef(
            0.15, first["objective/kl"], 8, target=6.0, horizon=10_000
        )
        assert expected == pytest.approx(0.15 * (1 - 0.2 * 8 / 10_000))
    assert second["objective/kl_coef"] == pytest.approx(expected, rel=1e-6)
    assert first["policy/ratio_max"] < 1.5
    assert second["update/skipped"] == 0
    # The score as the reward gave it, of what was left after truncation.
    samples = metrics.read(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 16
    for row in samples if name == "openai-2019" else ():
        assert row["score"] == len(set(row["response"].split()))
    # The options of a recorded run hold those of its preset.
    again = parse("--config=run/config.json")
    expected = PRESETS[name]["method"]
    if name == "openai-2019":
        changed = FixedLength(2, reward_only=True)
        expected = dataclasses.replace(expected, fixed_length=changed)
    assert again.method == expected
    play("--config=run/config.json", "--resume")
    play("--config=run/config.json", "--out=repeated")
    left, right = (
        (tmp_path / folder / "metrics.jsonl").read_bytes()
        for folder in ("run", "repeated")
    )
    assert left == right
