"""The trainers on a user's files: their output, and the message for each mistake."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import new_algorithm
import numpy as np
import pytest
import toy_files
import toys
from tiers import one_in

import rlhf_jax.train.methods.ppo
from rlhf_jax import config, fingerprint, hf, rewards
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.data import tokenization
from rlhf_jax.data.splits import hold_out
from rlhf_jax.devices.placement import Place, Placement
from rlhf_jax.runs import command_line, metrics, plots
from rlhf_jax.train import build, trainer
from rlhf_jax.train.config.models import Start
from rlhf_jax.train.config.optimizer import Critic
from rlhf_jax.train.config.prompts import Prompts
from rlhf_jax.train.config.rewards import Model, Rewards
from rlhf_jax.train.supervised import reward_model, sft

PAIR = {"prompt": "the cat", "chosen": "sat very good .", "rejected": "ran bad ."}
OTHER = {"prompt": "a dog"}
ANSWERS = [
    {"prompt": "the cat", "response": "sat on a dog and it was good ."},
    {"prompt": "a dog", "response": "ran by the cat so it was bad ."},
]
PROMPTS = ("the cat", "a dog was")
MANY = 60  # rows; the shuffle of a few rows takes long for each
FIGURES = {name: plots.PLOTS[name] for name in ("kl", "dpo")}
pytestmark = pytest.mark.usefixtures("quick_compilation")
TOY_PPO = (
    *("--batch-size=4", "--max-new-tokens=4", "--num-minibatches=1"),
    *("--temperature=0.7", "--optimizer=adam,eps=1e-5"),
    "--critic.optimizer=adam,eps=1e-5",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a valid checkpoint, reward model and data."""
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.reward_model(folder / "scorer")
    toy_files.jsonl(folder / "answers.jsonl", *ANSWERS * 6)
    toy_files.jsonl(folder / "pairs.jsonl", *[PAIR, PAIR | OTHER] * 6)
    toy_files.jsonl(
        folder / "prompts.jsonl",
        *({"prompt": prompt} for prompt in PROMPTS),
    )
    return folder


def play(experiment, out, *argv):
    """Runs an experiment as its command line does; returns the summary.

    It draws few of the figures; test_report.py draws them all.
    """
    words = ["--out", str(out), "--no-progress", *map(str, argv)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "PLOTS", FIGURES)
        experiment.command(words)
    summary = out / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else None


def ppo(out, files, *argv):
    return play(
        rlhf_jax.train.methods.ppo,
        out,
        *("--model", files / "model", "--prompts", files / "prompts.jsonl"),
        *(*TOY_PPO, *argv),
    )


def contents(folder):
    """Every file without a clock in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in ("timings.jsonl", "summary.json")
        and "plots" not in path.parts
    }


@pytest.mark.long
@pytest.mark.slow
def test_ppo_samples_in_bfloat16(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    body = "def score(prompts, responses, rows):\n    return [1.0] * len(prompts)\n"
    (tmp_path / "equal_rewards.py").write_text(body)
    argv = ("--num-steps=2", "--sampler=here,dtype=bfloat16", "--sample-every=1")
    ppo(tmp_path / "run", files, "--reward=equal_rewards:score", *argv)
    for row in metrics.read(tmp_path / "run" / "metrics.jsonl"):
        assert 1e-6 < row["policy/sampler_mismatch"] < 0.05


@pytest.mark.slow
def test_a_new_algorithm_learns(tmp_path):
    words = ["--out", str(tmp_path / "run"), "--no-progress", "--num-steps=20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "PLOTS", FIGURES)
        command_line.main(
            new_algorithm.main,
            new_algorithm.Config,
            description="",
            argv=[*words, "--batch-size=32"],
        )
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert rows[0]["objective/scores"] < 1
    assert rows[-1]["objective/scores"] > rows[0]["objective/scores"] + 2
    assert 0.1 < rows[-1]["objective/kl"] < 15


@pytest.mark.slow
def test_sft_from_nothing_leaves_a_checkpoint(files, tmp_path):
    out = tmp_path / "run"
    argv = (
        *("--tokenizer", files / "model", "--data", files / "answers.jsonl"),
        *("--fresh-hidden-size=16", "--fresh-num-layers=1", "--fresh-num-heads=2"),
        *("--fresh-max-positions=16", "--batch-size=4", "--num-steps=16"),
        *("--learning-rate=3e-2", "--micro-batch-size=2", "--held-out=0.5"),
        "--held-out-by=row",  # the responses to both prompts are learned by heart
    )
    summary = play(sft, out, *argv)
    model, params = hf.load(out / "model")
    assert model.vocab_size == len(toy_files.WORDS) + 2
    # Two texts of 9 and 10 tokens; which were held out is the seed's choice.
    _, held_out = hold_out(ANSWERS * 6, share=0.5, seed=0, by="row")
    losses = np.concatenate([losses_of(out, model, params, row) for row in held_out])
    assert summary["held_out_examples"] == 6
    assert summary["held_out_loss"] == pytest.approx(losses.mean(), abs=1e-4)
    assert summary["held_out_loss"] < 1 < summary["held_out_loss_before"]
    before = contents(out)
    again = play(sft, out, *argv, "--resume")  # nothing is left to do
    assert contents(out) == before
    assert again["held_out_loss"] == summary["held_out_loss"]


def losses_of(out, model, params, row):
    """-log p of every token of the response, from logits of the saved checkpoint."""
    reader = tokenization.load_tokenizer(out / "model")
    prompt, response = reader(row["prompt"])["input_ids"], reader(row["response"])
    tokens = jnp.array([[*prompt, *response["input_ids"], reader.eos_token_id]])
    logits = toys.logits(
        params, model=model, tokens=tokens, mask=jnp.ones_like(tokens, bool)
    )
    logprobs = jax.nn.log_softmax(logits)[0, :-1]
    picked = np.asarray(logprobs)[np.arange(tokens.shape[1] - 1), tokens[0, 1:]]
    return -picked[len(prompt) - 1 :]


@pytest.mark.slow
def test_a_reward_model_learns_the_pairs(files, tmp_path):
    out = tmp_path / "run"
    argv = ("--model", files / "model", "--data", files / "pairs.jsonl")
    summary = play(
        *(reward_model, out, *argv, "--batch-size=4", "--num-steps=6"),
        "--learning-rate=1e-2",
        "--normalise=samples,num_samples=8,max_new_tokens=4",
    )
    assert summary["held_out_accuracy"] == 1
    rows = metrics.read(out / "metrics.jsonl")
    assert rows[-1]["loss/pairwise"] < rows[0]["loss/pairwise"] - 0.1
    _, params = hf.load_reward(out / "model")
    # Normalised before and after; a bias says nothing about pairs and is not trained.
    before = -summary["untrained_mean"] / summary["untrained_std"]
    assert summary["trained_std"] != pytest.approx(1, abs=0.1)
    bias = (before - summary["trained_mean"]) / summary["trained_std"]
    assert float(params["score"]["bias"]) == pytest.approx(bias, abs=1e-3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, for modules with rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


COUNT = """
def count(prompts, responses, rows):
    pairs = zip(responses, rows, strict=True)
    return [response.split().count(row["wanted"]) for response, row in pairs]
"""


@pytest.fixture(scope="module")
def traces():
    """One entry for each trace of the update in the run of `finished`."""
    return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory, traces):
    """(folder, options) of a PPO run with a Python reward."""
    learn = iteration.learn

    @functools.wraps(learn)
    def traced(*args, **kwargs):
        traces.append(learn)
        return learn(*args, **kwargs)

    folder = tmp_path_factory.mktemp("finished")
    (folder / "wanted_words.py").write_text(COUNT)
    rows = [{"prompt": prompt, "wanted": "good"} for prompt in PROMPTS] * MANY
    argv = (
        *("--model", toy_files.checkpoint(folder / "model")),
        *("--prompts", toy_files.jsonl(folder / "prompts.jsonl", *rows)),
        *("--reward=wanted_words:count", "--num-steps=10", "--batch-size=16"),
        *("--learning-rate=3e-2", "--kl-coef=0", "--sample-every=3"),
        *("--num-shown=2", "--num-epochs=2", "--sample-reference"),
        "--num-alternatives=3",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(iteration, "learn", traced)
        play(rlhf_jax.train.methods.ppo, folder / "run", *TOY_PPO, *argv)
    return folder, argv


def test_ppo_improves_a_python_reward(finished):
    folder, _ = finished
    out = folder / "run"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["score_last"] > summary["score_first"] + 0.5
    assert summary["kl_first"] == pytest.approx(0, abs=1e-4)
    assert summary["kl_last"] > 0.1  # a coefficient of 0 still measures it
    assert summary["drift_relative"] > 0
    assert summary["reference_verified"] is True
    start = fingerprint.fingerprint(hf.load(folder / "model")[1])
    assert summary["reference_fingerprint"] == start.root
    samples = metrics.read(out / "samples.jsonl")
    assert [row["step"] for row in samples] == [0, 0, 3, 3, 6, 6, 9, 9]
    named = 0
    for row in samples:
        assert row["score"] == row["response"].split().count("good")
        assert row["prompt"] == PROMPTS[row["row"] % len(PROMPTS)]
        assert "".join(row["tokens"]) == row["response"]
        assert len(row["logprobs"]) == len(row["ref_logprobs"]) == len(row["tokens"])
        for text, own, ref, others in zip(
            *(row[key] for key in ("tokens", "logprobs", "ref_logprobs")),
            row["alternatives"],
            strict=True,
        ):
            likely = [other[1] for other in others]
            assert likely == sorted(likely, reverse=True)
            assert len(others) == 3
            assert own <= likely[0] + 1e-3
            same = [other[1:] for other in others if other[0] == text]
            assert all(pair == pytest.approx([own, ref], abs=2e-3) for pair in same)
            named += len(same)
    assert named > 10  # a token that was drawn is often among the likeliest
    for row in samples[:2]:  # the policy is its reference, with the same keys
        assert row["reference"] == row["response"]
        assert row["ref_logprobs"] == pytest.approx(row["logprobs"], abs=1e-3)
    last = [np.subtract(row["logprobs"], row["ref_logprobs"]) for row in samples[-2:]]
    assert max(np.abs(values).max() for values in last) > 0.05
    assert {row["reference"] for row in samples} != {row["response"] for row in samples}
    assert summary["compiled"]["sample"] == 1  # both respond by one program
    # What was asked for, not where it sampled: the same command resumes it.
    config = json.loads((out / "config.json").read_text())["config"]
    assert config["placement"]["sampler"]["devices"] == "auto"
    model, params = hf.load(out / "model")
    assert model == toy_files.MODEL
    assert fingerprint.fingerprint(params) != start
    assert (out / "plots" / "kl.png").exists()


def test_the_rehearsal_traces_the_program_that_runs(finished, traces):
    assert len(traces) == 1


@pytest.mark.long
@pytest.mark.slow
def test_ppo_with_a_reference_of_another_shape(finished, here, capsys):
    """Its KL is measured, its weight drift is not, and it cannot be reset."""
    folder, argv = finished
    model = config.llama(
        vocab_size=toy_files.MODEL.vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_positions=32,
    )
    reference = toy_files.checkpoint(here / "reference", model=model, seed=3)
    sys.path.append(str(folder))
    argv = (*argv, "--num-steps=2", "--reference", reference)
    argv += ("--no-sample-reference", "--num-alternatives=0")  # those are of the start
    moves = "--lifecycle.move=reset,every=2"
    with pytest.raises(SystemExit):
        play(rlhf_jax.train.methods.ppo, here / "refused", *TOY_PPO, *argv, moves)
    error = " ".join(capsys.readouterr().err.split())
    assert "such a reference cannot become the policy" in error
    summary = play(rlhf_jax.train.methods.ppo, here / "run", *TOY_PPO, *argv)
    expected = fingerprint.fingerprint(hf.load(reference)[1])
    assert summary["reference_fingerprint"] == expected.root
    assert summary["kl_first"] != pytest.approx(0, abs=1e-3)
    assert "drift_relative" not in summary


# --- what a user may get wrong ------------------------------------------------


def refused(capsys, tmp_path, run):
    """The message of a refusal, with status 2 and no run folder."""
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path / "run")
    assert exit_.value.code == 2
    assert not (tmp_path / "run").exists()
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


NO_KL = ("--reward=m:f", "--reference=none", "--kl-coef=0")


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("argv", "message"),
    one_in(
        3,
        [
            ((), "expected a reward, got none; give one of --reward-model, --reward"),
            (
                ("--reward=m:f", "--reward-model=x"),
                "got --reward-model and --reward; put several rewards into --rewards",
            ),
            (
                ("--reward=m:f", "--critic.start=reward_model"),
                "cannot be combined with a run without a reward model, because the "
                "critic starts",
            ),
            (
                ("--reward=m:f", "--batch-size=0"),
                "--batch-size: expected a finite number",
            ),
            (
                ("--reward=m:f", "--kl-coef=-1"),
                "--kl-coef: expected a finite number, 0 or",
            ),
            (("--reward=m:f", "--sample-every=0"), "--sample-every: expected"),
            (("--reward=m:f", "--kl-cof=1"), "--kl-cof"),
            (("--reward=score",), "expected module:function, got 'score'"),
            (
                ("--reward=no_such:f",),
                "got ModuleNotFoundError: No module named 'no_such'",
            ),
            (("--reward=json:no_such",), "expected a function no_such in"),
            (("--reward=json:__doc__",), "json/__init__.py, got str; define it there"),
            (
                ("--reward=operator:setitem", "--batch-size=6", "--num-minibatches=4"),
                "expected --num-minibatches to divide the 6 rows of a batch, got 4",
            ),
            (
                ("--reward=operator:setitem", "--micro-batch-size=3"),
                "expected --micro-batch-size to divide the 4 rows of a minibatch",
            ),
            (
                ("--reward=operator:setitem", "--max-new-tokens=14"),
                ".jsonl:2: expected at most 2 tokens, got 3 of 'a dog was'; shorten",
            ),
            (
                ("--reward=operator:setitem", "--buckets", "2", "13"),
                "--buckets: expected a number of at most 12, got",
            ),
            (
                ("--reward=operator:setitem", "--buckets=2"),
                "2 tokens, the largest bucket or the w",
            ),
            (
                ("--reward=operator:setitem", "--max-new-tokens=1000000000"),
                "--max-new-tokens: expected a number below 16",
            ),
            (
                ("--reward=operator:setitem", "--temperature=0"),
                "--temperature: expected a finite",
            ),
            (
                ("--reward=m:f", "--kl-control=adaptive,target=-1,unit=response"),
                "target: expected a finite number",
            ),
            (
                ("--reward=operator:setitem", "--num-steps=0"),
                "--num-steps: expected a finite",
            ),
            (
                ("--reward=m:f", "--reference=none", "--kl-coef=0.1"),
                "--reference none cannot be combined with --kl-coef 0.1, because the "
                "latter",
            ),
            (
                (*NO_KL, "--reference-storage.dtype=int8"),
                "--reference none cannot be combined with --reference-storage, "
                "because the latter",
            ),
            (
                ("--reward=m:f", "--sampler=here,dtype=int8", "--lora=2"),
                "--lora cannot be combined with a --sampler dtype, because the dtype "
                "of its",
            ),
            (
                (
                    *("--reward=m:f", "--sampler-correction=truncate"),
                    *("--whiten-advantages=minibatch",),
                ),
                "--sampler-correction: expected whitening over the rollout or none",
            ),
            (
                ("--reward=m:f", "--placement.reward=cpu"),
                "--placement.reward cannot be combined with a run without a reward "
                "model, because no model is",
            ),
            (
                ("--reward=operator:setitem", "--lora=2,modules=mlp/gate"),
                "got 'mlp/gate', which matches none",
            ),
            (
                ("--reward=m:f", "--lora=2", "--placement.reference=cpu"),
                "--lora cannot be combined with --placement.reference, because the "
                "reference",
            ),
            (
                (
                    *("--reward=m:f", "--lora=2"),
                    "--lifecycle.move=mix,every=2,rate=0.5",
                ),
                "mixing adapters does not mix the weights",
            ),
            (
                (
                    *("--reward=m:f", "--lora=2", "--lifecycle.move=reset,every=2"),
                    "--reference=x",
                ),
                "--lora and --lifecycle cannot be combined with --reference x, "
                "because a reset",
            ),
            (
                ("--reward-model=x", "--lora=2", "--critic.start=reward_model"),
                "--lora cannot be combined with --critic.start reward_model, because "
                "the "
                "critic's",
            ),
            (
                ("--reward=m:f", "--timeout=3"),
                "--timeout: expected --verifier or --environment with it, got none",
            ),
            (
                ("--reward=m:f", "--judge-failure=warn"),
                "--judge-failure warn: expected --judge with it",
            ),
            (
                ("--reward=m:f", "--lifecycle.kl-every=0"),
                "--lifecycle.kl-every: expected a whole number, 1 or more, got 0",
            ),
        ],
    ),
)
def test_options_that_ppo_refuses(files, tmp_path, capsys, argv, message):
    run = lambda out: ppo(out, files, *argv)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return [0.0]",
            "--reward failing:f to return 4 numbers, one per response, got 1;",
        ),
        pytest.param(
            "return [float('nan')] * len(prompts)",
            "numbers, got nan at index 0 of 4 and",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "return ['good'] * len(prompts)",
            "got 'good' (str) at index 0 of 4, for",
            marks=pytest.mark.slow,
        ),
        (
            "return [1 / (prompt != 'a dog was') for prompt in prompts]",
            "raised ZeroDivisionError: division by zero for prompt 'a dog was' (row 1",
        ),
    ],
)
def test_a_reward_that_fails_is_told_before_anything_is_written(
    files, here, capsys, monkeypatch, body, message
):
    (here / "failing.py").write_text(f"def f(prompts, responses, rows): {body}\n")
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    run = lambda out: ppo(out, files, "--reward=failing:f")  # noqa: E731
    assert message in refused(capsys, here, run)


def test_a_reward_module_that_cannot_be_imported(files, here, capsys):
    (here / "broken_reward.py").write_text("def f(:\n")
    run = lambda out: ppo(out, files, "--reward=broken_reward:f")  # noqa: E731
    assert "got SyntaxError: invalid syntax" in refused(capsys, here, run)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts.jsonl: expected at least one row, got none"),
        ('{"prompt": "a"}\n{"prompt"\n', "prompts.jsonl:2: expected one JSON object"),
        ('{"text": "a"}\n', "prompts.jsonl:1: expected a field 'prompt', got 'text'"),
        (None, "prompts.jsonl: expected a readable file, got No such file"),
    ],
)
def test_prompts_that_ppo_refuses(files, tmp_path, capsys, content, message):
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_text(content)
    argv = ("--reward=operator:setitem", "--prompts", prompts)
    run = lambda out: ppo(out, files, *argv)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


def unsupported(folder):
    (folder / "config.json").write_text('{"model_type": "bert"}')


def truncated(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def with_another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 32}))


def with_more_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 2}))


def with_more_words(folder):
    toy_files.tokenizer([*toy_files.WORDS, "bird"]).save_pretrained(folder)


@pytest.mark.slow  # test_bad_checkpoints.py has each, by one trainer or by all
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (unsupported, "expected model_type to be one of gpt2, gpt_neox, llama, "),
        (truncated, "it is truncated, fetch it again"),
        (without_weights, "expected model.safetensors or"),
        (without_tokenizer, "expected a folder with tokenizer.json, or a hub id, got"),
        (with_another_shape, "misshapen"),
        (with_more_layers, "missing"),
        (with_more_words, "below the model's vocabulary size 24, got id 24 for 'bird'"),
    ],
)
def test_checkpoints_that_every_stage_refuses(tmp_path, files, capsys, spoil, message):
    model = toy_files.checkpoint(tmp_path / "model")
    spoil(model)
    for experiment, argv in (
        (sft, ("--data", files / "answers.jsonl")),
        (reward_model, ("--data", files / "pairs.jsonl", "--normalise=None")),
        (
            rlhf_jax.train.methods.ppo,
            (
                *("--prompts", files / "prompts.jsonl", "--reward=operator:setitem"),
                "--max-new-tokens=4",
            ),
        ),
    ):
        run = lambda out, e=experiment, a=argv: play(e, out, "--model", model, *a)  # noqa: E731
        assert message in refused(capsys, tmp_path, run)


def test_a_checkpoint_that_is_not_there(files, tmp_path, capsys):
    argv = ("--reward=operator:setitem", "--model", tmp_path / "no" / "such")
    run = lambda out: ppo(out, files, *argv)  # noqa: E731
    assert "no/such" in refused(capsys, tmp_path, run)


def other_scorer(folder, *, words):
    model = dataclasses.replace(toy_files.MODEL, vocab_size=len(words) + 2)
    trunk = toy_files.params(model)
    scorer = rewards.init(jax.random.key(1), trunk, model=model)
    hf.save_reward(folder, model, scorer, tokenizer=toy_files.tokenizer(words))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            toy_files.WORDS[1:],
            "reads the policy's tokens, got vocab_size 23 for 24",
        ),
        (toy_files.WORDS[::-1], "expected the policy's tokenizer, got one that gives"),
    ],
)
def test_a_reward_model_with_other_words(files, tmp_path, capsys, words, message):
    scorer = other_scorer(tmp_path / "scorer", words=words)
    run = lambda out: ppo(out, files, "--reward-model", scorer)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.slow
def test_ppo_on_an_ensemble_of_reward_models(files, tmp_path):
    """Each member is frozen, saved in snapshots and verified."""
    scorer = rewards.init(jax.random.key(2), toy_files.params(), model=toy_files.MODEL)
    hf.save_reward(
        tmp_path / "other", toy_files.MODEL, scorer, tokenizer=toy_files.tokenizer()
    )
    models = f"{files / 'scorer'}+{tmp_path / 'other'},combine=minimum"
    argv = ("--num-steps=2", "--snapshot-every=1")
    ppo(tmp_path / "run", files, "--reward-model", models, *argv)
    [*rows] = metrics.read(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        members = [row["reward/member_0"], row["reward/member_1"]]
        assert row["objective/scores"] <= min(members) + 1e-6
        assert row["reward/disagreement"] > 0
    for name in ("reward_0", "reward_1"):
        assert any(
            name in path.read_text()
            for path in (tmp_path / "run" / "snapshots").rglob("metadata")
        )


@pytest.mark.slow
def test_a_critic_starts_as_the_reward_model_however_that_is_held(files, tmp_path):
    """Unlike the frozen reward model, the critic is neither rounded nor on the host."""
    folder = other_scorer(tmp_path, words=toy_files.WORDS)
    config = rlhf_jax.train.methods.ppo.Config(
        out=tmp_path / "run",
        start=Start(model=str(files / "model")),
        data=Prompts(prompts=""),
        rewards=Rewards(
            reward_model=Model((str(folder),)),
            reward_storage=frozen_models.Storage(dtype="int8"),
        ),
        critic=Critic(start="reward_model"),
        placement=Placement(reward=Place.parse("pinned_host")),
    )
    meshes = build.Meshes.of(config)
    made = build.build(config, pretrained.load(str(files / "model")), meshes=meshes)
    _, expected = hf.load_reward(folder)
    assert toys.leaves_equal(made.train.critic, expected)
    for leaf in jax.tree.leaves(made.train):
        assert leaf.committed, "or every program is compiled again at its second step"
        assert leaf.sharding.memory_kind == "device"


@pytest.mark.slow
def test_models_in_the_wrong_place(files, tmp_path, capsys):
    run = lambda out: ppo(out, files, "--reward-model", files / "model")  # noqa: E731
    assert "read it with hf.load" in refused(capsys, tmp_path, run)
    shorter = dataclasses.replace(toy_files.MODEL, max_positions=8)
    other = toy_files.checkpoint(tmp_path / "other", model=shorter)
    argv = ("--reward-model", files / "scorer", "--reference", other)
    run = lambda out: ppo(out, files, *argv)  # noqa: E731
    assert (
        "expected a model that reads the policy's tokens, got max_positions 8"
        in refused(capsys, tmp_path, run)
    )


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("row", "argv", "message"),
    [
        (PAIR | {"rejected": PAIR["chosen"]}, (), "pairs.jsonl:1: expected two diff"),
        ({"prompt": "a", "chosen": "b"}, (), "pairs.jsonl:1: expected a field 'rej"),
        (
            PAIR,
            ("--margin-field=by",),
            "pairs.jsonl:1: expected a finite float32 number in 'by', got None",
        ),
        (
            PAIR | {"by": 10**400},
            ("--margin-field=by",),
            "pairs.jsonl:1: expected a finite float32 number in 'by', got 1000",
        ),
        (PAIR, ("--buckets", "4", "6"), "pairs.jsonl:1: expected at most 6 tokens"),
        (
            PAIR,
            ("--normalise=samples,max_new_tokens=1000000000",),
            "--max-new-tokens: expected a number below 16",
        ),
        (PAIR, ("--max-length=5",), "expected at most 5 tokens, got 7"),
        (
            PAIR,
            ("--max-length=17",),
            "a number of at most 16, got 17; the model's context",
        ),
        (PAIR, ("--micro-batch-size=3",), "micro-batch-size to divide the 4 rows"),
        (
            PAIR,
            ("--held-out=1",),
            "--held-out: expected a number of at least 0 and below 1",
        ),
        (PAIR, ("--held-out=0.9",), "expected rows to train on beside 2 held out"),
        (
            PAIR,
            ("--normalise=samples,max_new_tokens=15",),
            "expected a prompt of at most 1 tokens to sam",
        ),
        (
            PAIR,
            ("--normalise=samples,temperature=0",),
            "temperature: expected a finite number above 0, got 0",
        ),
    ],
)
def test_pairs_that_the_reward_model_refuses(
    files, tmp_path, capsys, row, argv, message
):
    pairs = toy_files.jsonl(tmp_path / "pairs.jsonl", row, row | OTHER)
    sampled = "--normalise=samples,max_new_tokens=4"
    argv = ("--data", pairs, "--batch-size=4", sampled, *argv)
    argv = ("--model", files / "model", *argv)
    run = lambda out: play(reward_model, out, *argv)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "expected --model, or --tokenizer for a fresh model, got neither"),
        (("--tokenizer=MODEL", "--lora=2"), "--lora: expected --model, the base of"),
        (("--model=MODEL", "--fresh-num-layers=7"), "--fresh-num-layers: expected a f"),
        (("--tokenizer=MODEL", "--fresh-num-heads=3"), "num_heads to divide hidden_si"),
        (("--model=MODEL", "--max-length=5"), "expected at most 5 tokens, got 12"),
        (
            ("--model=MODEL", "--row-width=8"),
            "answers.jsonl:1: expected at most 8 tokens, the largest bucket or the wid",
        ),
        (
            ("--model=MODEL", "--schedule=cosine,warmup=1"),
            "--schedule: warmup: expected a number of at least 0 and below 1",
        ),
        (("--model=MODEL", "--micro-batch-size=3"), "micro-batch-size to divide the 4"),
        (
            ("--model=MODEL", "--prompt-field=question"),
            "answers.jsonl:1: expected a fi",
        ),
        (("--model=MODEL", "--num-steps=0"), "--num-steps: expected a finite"),
    ],
)
def test_options_that_sft_refuses(files, tmp_path, capsys, argv, message):
    argv = [word.replace("MODEL", str(files / "model")) for word in argv]
    argv = ("--data", files / "answers.jsonl", "--batch-size=4", *argv)
    run = lambda out: play(sft, out, *argv)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.slow
def test_a_run_folder_that_may_not_be_continued(finished, capsys, monkeypatch):
    """It is used without --resume, or resumed with other options, data or reference."""
    folder, argv = finished
    out = folder / "run"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Its programs are those of the run, and what is refused here comes after it.
    monkeypatch.setattr(trainer, "rehearse", lambda *args, **options: None)
    before = contents(out)

    def refusal(*more):
        with pytest.raises(SystemExit) as exit_:
            play(rlhf_jax.train.methods.ppo, out, *TOY_PPO, *argv, *more)
        assert exit_.value.code == 2
        assert contents(out) == before
        return capsys.readouterr().err

    assert "continue that run with --resume" in refusal()
    assert "kl.kl_coef: recorded 0.0, given 0.5" in refusal("--resume", "--kl-coef=0.5")
    prompts = (folder / "prompts.jsonl").read_text()
    (folder / "prompts.jsonl").write_text(prompts.replace("cat", "dog"))
    assert "expected data_digest" in refusal("--resume")
    (folder / "prompts.jsonl").write_text(prompts)
    for file in (folder / "model").iterdir():
        file.unlink()
    toy_files.checkpoint(folder / "model", seed=1)
    errors = refusal("--resume")
    assert "reference, as source: expected fingerprint" in errors
    assert "embed/tokens" in errors
