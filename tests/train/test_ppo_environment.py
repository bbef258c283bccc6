"""`rlhf-jax ppo --environment`: against a loop by hand, resumed, sampled ahead."""

import contextlib
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import toy_episodes
import toy_files

from rlhf_jax import hf, masked, ppo
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train import build, rewards, rows, sampler
from rlhf_jax.train.methods.ppo import Config, command

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORDS = ["go", "left", "right", "key", "door", "hall"]
STEPS = 3
LIMITS = "max_turn_tokens=4,max_turns=3,observation_chunk=3"
HALL = f"halls:LongHall,{LIMITS}"
LONG = pytest.mark.long
# Adam makes steps of the rounding of gradients that are nearly 0.
LORA = ("--lora=2", "--learning-rate=1e-4")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    toy_files.checkpoint(tmp_path / "model", words=WORDS)
    rows = [{"start": word} for word in ("left", "right", "go", "hall")]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    return tmp_path


def words_of(files, out, *options):
    return [
        *(f"--environment={HALL}", f"--model={files}/model"),
        *(f"--prompts={files}/rows.jsonl", "--max-new-tokens=14"),
        *("--batch-size=8", f"--num-steps={STEPS}", "--num-minibatches=2"),
        *("--learning-rate=1e-2", "--critic.learning-rate=1e-2"),
        *("--kl-coef=0.1", "--gamma=0.9", "--sample-every=1", "--snapshot-every=1"),
        *("--keep-snapshots=4", "--num-workers=2", "--no-progress"),
        f"--out={files / out}",
        *options,
    ]


def train(files, out, *options):
    command(words_of(files, out, *options))
    return files / out


def by_hand(files):
    """Runs episodes and `ppo.learn` step by step."""
    options = command_line.parse(
        Config, description="", argv=words_of(files, "hand"), presets={}
    )
    start, meshes = pretrained.load(options.start.model), build.Meshes.of(options)
    models = build.build(options, start, meshes=meshes)
    with contextlib.ExitStack() as stack:
        responder = rows.Responder(
            options,
            start=start,
            meshes=meshes,
            context=start.model.max_positions,
            stack=stack,
        )
        pools = rewards.RewardPools(options, mesh=meshes.policy, stack=stack)
        receipt = Receipts().source("--prompts", options.data.prompts)
        data = responder.read(options.data.prompts, pools=pools, receipt=receipt)
        draw = responder.episodes(data, models.recipe, rows=8, base=models.base)
        prompts = batches.prompt_batches(
            data.prompts, batch_size=8, seed=0, pad_id=start.pad_id
        )
        learn = jax.jit(functools.partial(ppo.learn, recipe=models.recipe))
        state, by_step = models.train, []
        for step in range(STEPS):
            key = jax.random.fold_in(jax.random.key(0), step)
            request = Request(prompts[step], key, state.step)
            rollout, scores = draw(state.policy, request)
            state, stats, scored = learn(
                state,
                rollout=rollout,
                scores=scores,
                frozen=FrozenModels(models.reference),
                key=key,
            )
            by_step.append((masked.mean_stats(stats), scored))
    return by_step, state


@pytest.mark.slow
def test_a_run_is_a_loop_of_episodes_and_learn(files):
    run = train(files, "run", "--snapshot-every=100")
    by_step, state = by_hand(files)
    rows = metrics.read(run / "metrics.jsonl")
    assert len(rows) == STEPS
    for row, (stats, _) in zip(rows, by_step, strict=True):
        assert {"value/explained_variance", "objective/kl", "reward/turns"} <= set(row)
        for name, value in stats.items():
            if name.startswith("trust/") and row[name] is None:
                continue  # nothing to take a mean of
            assert row[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
        assert row["policy/sampler_mismatch"] < 1e-5
    # Rewards before the last turn stand at their turns, and reach the run.
    of_turns = np.concatenate(
        [np.asarray(scored_of_step.turn_rewards) for _, scored_of_step in by_step]
    )
    assert (of_turns > 0).any()
    assert max(row["response/observed"] for row in rows) > 0
    _, params = hf.load(run / "model")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, state.policy
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["score_last"] == rows[-1]["objective/scores"]
    assert summary["turns_last"] == rows[-1]["response/turns"] > 1
    assert summary["kl_last"] == rows[-1]["objective/kl"]
    samples = metrics.read(run / "samples.jsonl")
    first = np.asarray(by_step[0][1].scores[: len(samples) // STEPS])
    np.testing.assert_allclose(
        [row["score"] for row in samples if row["step"] == 0], first
    )
    assert any("⟦door hall⟧" in row["response"] for row in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--max-staleness=2",), marks=LONG),
        ("--lora=2", "--max-staleness=1"),
        pytest.param(("--lora=2", "--reference-storage.dtype=int8"), marks=LONG),
        ("--shared-trunk", "--packing=auto"),
        ("--value-after-stop", "--continuous-batching=4"),
    ],
    ids=" ".join,
)
def test_runs_resume_to_the_bit(files, options):
    run, names = train(files, "run", *options), ("metrics.jsonl", "samples.jsonl")
    before = [(run / name).read_bytes() for name in names]
    rows = metrics.read(run / "metrics.jsonl")
    assert abs(rows[0]["objective/kl"]) < 1e-4
    assert rows[-1]["objective/kl"] != 0
    for step in range(2, STEPS + 1):
        shutil.rmtree(run / "snapshots" / "ppo" / str(step))
    train(files, "run", *options, "--resume")
    assert [(run / name).read_bytes() for name in names] == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param((), marks=LONG), LORA])
def test_a_run_on_eight_devices_is_that_of_one(files, options):
    expected = train(files, "one", *options)
    output = train(files, "eight", *options, "--placement.policy=data=4,tensor=2")
    toy_episodes.assert_same_run(output, expected)


@pytest.mark.slow
def test_the_base_is_copied_to_where_episodes_are_drawn_alone(files, monkeypatch):
    """The sampler of responses draws nothing here, and has no copy."""
    bases = []

    def refused(*_, frozen, **__):
        bases.append(frozen.base)
        raise InputError("that is all")

    monkeypatch.setattr(sampler, "Sampler", refused)
    meshes = ("--placement.policy=fsdp=8", "--placement.sampler=data=8")
    with pytest.raises(SystemExit):
        train(files, "run", *LORA, *meshes)
    assert bases == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--buckets=4"], "--environment cannot be combined with --buckets"),
        (["--fixed-length=0"], "--environment cannot be combined with --fixed-length"),
        (
            ["--critic.start=reward_model"],
            "cannot be combined with a run without a reward model",
        ),
        pytest.param(
            [f"--environment=halls:Late,{LIMITS}"],
            "expected a number for some response",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_refused_beside_an_environment(files, capsys, options, message):
    with pytest.raises(SystemExit):
        train(files, "run", *options)
    errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in errors
    assert not (files / "run").exists()
