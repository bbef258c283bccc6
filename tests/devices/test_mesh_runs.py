"""Runs on meshes of 8 devices, against the same runs on one device.

Records are compared: the responses are equal, and every metric agrees.
"""

import contextlib
import functools
import json
import signal
import sys

import jax
import numpy as np
import pytest
import toy_files
import toys
from safetensors.numpy import load_file

import rlhf_jax.train.methods.ppo
from rlhf_jax import hf, lora, ppo
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train.build import Meshes, build
from rlhf_jax.train.methods import grpo
from rlhf_jax.train.reading import read_data
from rlhf_jax.train.rewards import RewardPools
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
STEPS = 3
REWARD = """
import signal
calls = 0

def score(prompts, responses, rows):
    return [float(len(set(response.split()))) for response in responses]

def stopping(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 2:  # in step 1: the rehearsal's call is step 0's
        signal.raise_signal(signal.SIGTERM)
    return score(prompts, responses, rows)
"""
MESH = "--placement.policy=data=2,fsdp=2,tensor=2"
PPO = (
    *("--batch-size=8", "--max-new-tokens=4", "--num-minibatches=2", "--num-epochs=1"),
    *(f"--num-steps={STEPS}", "--sample-every=1", "--kl-coef=0.1"),
    *("--learning-rate=1e-2", "--critic.learning-rate=1e-2"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "mesh_rewards.py").write_text(REWARD)
    toy_files.checkpoint(folder / "model")
    toy_files.reward_model(folder / "scorer")
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is so")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    pair = {"prompt": "the cat", "chosen": "sat very good .", "rejected": "ran bad ."}
    toy_files.jsonl(folder / "pairs.jsonl", *[pair, pair | {"prompt": "a dog"}] * 12)
    answer = {"prompt": "a dog", "response": "ran by the cat so it was bad ."}
    toy_files.jsonl(
        folder / "answers.jsonl", *[answer, answer | {"prompt": "the cat"}] * 12
    )
    row = {"question": "the cat", "answer": "so it is #### 4"}
    toy_files.jsonl(folder / "questions.jsonl", *[row] * 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


def play(experiment, out, files, *argv):
    if "--resume" not in argv:  # a reward counts its calls over both parts of a run
        sys.modules.pop("mesh_rewards", None)
    words = ("--out", out, "--no-progress", *argv)
    words = [str(word).replace("FILES", str(files)) for word in words]
    experiment.command(words)
    return out


def run_ppo(out, files, *argv, reward=("--reward=mesh_rewards:score",)):
    source = ("--model=FILES/model", "--prompts=FILES/prompts.jsonl")
    return play(rlhf_jax.train.methods.ppo, out, files, *source, *reward, *PPO, *argv)


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """PPO on one device."""
    return run_ppo(tmp_path_factory.mktemp("alone") / "run", files)


def assert_same(run_folder, expected, *, extra=frozenset(), close=1e-4):
    """Asserts equal responses, and metrics that differ only by rounding."""
    lines = [(run / "samples.jsonl").read_text() for run in (run_folder, expected)]
    if expected.joinpath("samples.jsonl").stat().st_size:
        a, b = ([json.loads(line) for line in text.splitlines()] for text in lines)
        near = ("score", "logprobs", "ref_logprobs")  # rounded to four digits
        texts = [[{**row, **dict.fromkeys(near)} for row in rows] for rows in (a, b)]
        assert texts[0] == texts[1]
        for name in near[1:]:
            of_rows = [[row.get(name, []) for row in rows] for rows in (a, b)]
            for left, right in zip(*of_rows, strict=True):
                np.testing.assert_allclose(left, right, atol=2e-4)
        np.testing.assert_allclose(
            [row["score"] for row in a], [row["score"] for row in b], atol=1e-5
        )
    a, b = (metrics.read(run / "metrics.jsonl") for run in (run_folder, expected))
    assert [row.keys() for row in a] == [row.keys() | extra for row in b]
    for got, expected_row in zip(a, b, strict=True):
        for name, value in expected_row.items():
            if isinstance(value, float):
                # Scores in standard deviations are of rounding alone.
                near = 1e-2 if name.endswith("_z") else close / 5
                assert got[name] == pytest.approx(value, rel=close, abs=near), name
    for file in sorted(expected.glob("model/*.safetensors")):
        model = load_file(run_folder / "model" / file.name)
        for name, tensor in load_file(file).items():
            np.testing.assert_allclose(
                model[name], tensor, rtol=1e-7, atol=close, err_msg=name
            )


@pytest.mark.long
def test_ppo_goes_on_with_the_run_on_another_mesh(files, alone, tmp_path):
    """On (2, 2, 2) until a signal stops it, then on (1, 4, 1) and (1, 1, 4)."""
    stopped = tmp_path / "run"
    stopping = ("--reward=mesh_rewards:stopping",)
    with pytest.raises(SystemExit) as stop:
        run_ppo(stopped, files, MESH, reward=stopping)
    assert stop.value.code == 128 + signal.SIGTERM
    elsewhere = ("--placement.policy=fsdp=4", "--placement.reference=last:tensor=4")
    run_ppo(stopped, files, *elsewhere, "--resume", reward=stopping)
    assert_same(stopped, alone)


@pytest.mark.parametrize(
    "argv",
    [
        ("--placement.policy=data=8",),
        (MESH, "--placement.reference=cpu"),
        (MESH, "--placement.reference=tensor=8"),
        (
            "--placement.policy=data=2,fsdp=2",
            "--placement.reference=last:fsdp=2,tensor=2",
        ),
    ],
)
@pytest.mark.long
def test_ppo_with_a_reference_elsewhere(files, alone, argv, tmp_path):
    assert_same(run_ppo(tmp_path / "run", files, *argv), alone)


@pytest.mark.long
def test_ppo_with_a_critic_elsewhere(files, alone, tmp_path):
    """Stopped by a signal and resumed, with the critic on one device and on four."""
    out, argv = tmp_path / "run", ("--placement.critic=last:data=2,tensor=2",)
    stopping = ("--reward=mesh_rewards:stopping",)
    with pytest.raises(SystemExit) as stop:
        run_ppo(out, files, *argv, reward=stopping)
    assert stop.value.code == 128 + signal.SIGTERM
    run_ppo(out, files, *argv, "--resume", reward=stopping)
    assert_same(out, alone, extra={"critic/skipped", "critic/skipped_in_a_row"})
    whole = run_ppo(tmp_path / "whole", files, *argv)
    for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("way", ["a reward model starts the critic", "adapters"])
def test_a_critic_elsewhere_in_other_ways(files, way, tmp_path):
    argv = {
        "a reward model starts the critic": (
            *("--reward-model=FILES/scorer", "--critic.start=reward_model"),
            "--placement.reward=last",
        ),
        "adapters": (
            *("--reward=mesh_rewards:score", "--lora=2"),
            "--reference-storage.dtype=int8",
        ),
    }[way]
    run_folder = run_ppo(
        tmp_path / "apart", files, "--placement.critic=last:data=2", reward=argv
    )
    extra = {"critic/skipped", "critic/skipped_in_a_row"}
    assert_same(
        run_folder, run_ppo(tmp_path / "alone", files, reward=argv), extra=extra
    )


PACKED = ("--packing=auto,max_tokens_per_device=8",)


def test_packed_rows_on_a_mesh(files, alone, tmp_path):
    """Micro-batches cut by tokens on (2, 2, 2), whose rows form four groups."""
    out = run_ppo(tmp_path / "run", files, MESH, *PACKED)
    assert_same(out, alone)
    used = json.loads((out / "summary.json").read_text())["packing"]["used"]
    assert {name.split()[0] for name in used} == {"batch", "minibatch"}


@pytest.mark.long
def test_packed_rows_of_models_with_devices_of_their_own(files, tmp_path):
    """Reward model and critic are elsewhere; the critic's rows form other groups."""
    argv = ("--reward-model=FILES/scorer",)
    elsewhere = ("--placement.critic=last:data=2", "--placement.reward=last")
    run_folder = run_ppo(tmp_path / "apart", files, *elsewhere, *PACKED, reward=argv)
    extra = {"critic/skipped", "critic/skipped_in_a_row"}
    assert_same(
        run_folder, run_ppo(tmp_path / "alone", files, reward=argv), extra=extra
    )


@pytest.fixture(scope="module")
def one_step_behind(files):
    """A loop by hand on one device: the policy before the update draws each rollout."""
    argv = ["--out=none", f"--model={files}/model", f"--prompts={files}/prompts.jsonl"]
    options = command_line.parse(
        rlhf_jax.train.methods.ppo.Config,
        description="",
        argv=[*argv, "--reward=mesh_rewards:score", *PPO],
    )
    meshes = Meshes.of(options)
    start = pretrained.load(options.start.model)
    models = build(options, start, meshes=meshes)
    with contextlib.ExitStack() as stack:
        prompts = read_data(
            options,
            models,
            start=start,
            meshes=meshes,
            pools=RewardPools(options, mesh=meshes.policy, stack=stack),
            receipts=Receipts(),
            stack=stack,
        ).prompts

    def reward(rollout):
        responses = (
            start.decode(tokens[mask].tolist())
            for tokens, mask in zip(
                np.asarray(rollout.tokens),
                np.asarray(rollout.response_mask),
                strict=True,
            )
        )
        return np.array([len(set(text.split())) for text in responses], np.float32)

    sample = jax.jit(functools.partial(ppo.sample, recipe=models.recipe))
    learn = jax.jit(functools.partial(ppo.learn, recipe=models.recipe))
    state, means = models.train, []
    key = jax.random.key(0)
    older = state.policy
    for step in range(STEPS):
        step_key = jax.random.fold_in(key, step)
        rollout = sample(older, prompts=prompts[step], key=step_key)
        older = state.policy
        state, stats, _ = learn(
            state,
            rollout=rollout,
            scores=reward(rollout),
            frozen=FrozenModels(reference=models.reference),
            key=step_key,
        )
        means.append(toys.means(stats))
    return means, state


@pytest.mark.long
@pytest.mark.parametrize("stopped", [False, True])
def test_rollouts_are_drawn_while_the_last_are_learned_from(
    files, one_step_behind, stopped, tmp_path
):
    argv = ("--placement.policy=data=2,tensor=2", "--placement.sampler=last:fsdp=4")
    reward = ("--reward=mesh_rewards:score",)
    if stopped:
        reward = ("--reward=mesh_rewards:stopping",)
        with pytest.raises(SystemExit):
            run_ppo(tmp_path / "run", files, *argv, reward=reward)
        argv += ("--resume",)
    out = run_ppo(tmp_path / "run", files, *argv, reward=reward)
    expected, state = one_step_behind
    for row, stats in zip(metrics.read(out / "metrics.jsonl"), expected, strict=True):
        for name, value in stats.items():
            if name.startswith("trust/age") or row[name] is None:  # of no tokens
                continue
            assert row[name] == pytest.approx(float(value), rel=1e-4, abs=2e-5), name
    assert float(expected[1]["policy/sampler_mismatch"]) > 1e-3  # off-policy it is
    _, params = hf.load(out / "model")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, state.policy
    )


@pytest.mark.long
def test_an_older_sampler_is_corrected_for(files, tmp_path):
    """Recomputed log-probs are of the current policy; tokens are one version older."""
    argv = (
        *("--placement.policy=data=1", "--placement.sampler=last:data=1"),
        "--sampler-correction=mask,cap=2,floor=0.5,level=sequence",
        *("--penalty.placement=loss", "--penalty.value-estimator=k3"),
        *("--penalty.grad-estimator=k2", "--penalty.importance-weights=token"),
    )
    out = run_ppo(tmp_path / "run", files, *argv)
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["policy/staleness"] for row in rows] == [0, 1, 1]
    drawn = [row["version"] for row in metrics.read(out / "samples.jsonl")]
    assert drawn == [0] * 4 + [0] * 4 + [1] * 4
    assert rows[0]["policy/sampler_kl_k3"] < 1e-9
    assert rows[0]["policy/sampler_ess"] > 0.9999
    for row in rows[1:]:
        assert row["policy/sampler_kl_k3"] > 1e-6
        assert 0 < row["policy/sampler_ess"] < 1


WAYS = {
    "a reward model of its own devices": (
        *("--reward-model=FILES/scorer", "--placement.reward=last:data=4"),
    ),
    "adapters": ("--reward=mesh_rewards:score", "--lora=2"),
    "exact KL": (
        *("--reward=mesh_rewards:score", "--penalty.value-estimator=exact"),
        "--penalty.placement=both",
    ),
    "a reference that moves": (
        *("--reward=mesh_rewards:score", "--lifecycle.move=mix,every=2,rate=0.5"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_ppo_in_other_ways(files, way, tmp_path):
    argv = WAYS[way]
    alone = [option for option in argv if "--placement" not in option]
    mesh = "--placement.policy=fsdp=2,tensor=2" if "own" in way else MESH
    assert_same(
        run_ppo(tmp_path / "mesh", files, mesh, reward=argv),
        run_ppo(tmp_path / "alone", files, reward=alone),
    )


@pytest.mark.long
def test_adapters_of_rank_16_of_which_every_device_has_a_share(
    files, monkeypatch, tmp_path
):
    """The toy's adapters are too small for it, so that the bound is lowered."""
    for function in (sharding.shardings, sharding.create, sharding.place):
        monkeypatch.setitem(function.__kwdefaults__, "small", 64)
    model, adapters = pretrained.load(files / "model").model, lora.LoRA(rank=16)
    shapes = jax.eval_shape(
        functools.partial(lora.init, model=model, lora=adapters), jax.random.key(0)
    )
    placed = sharding.shardings(shapes, mesh=MeshShape(fsdp=8).make())
    assert not any(x.is_fully_replicated for x in jax.tree.leaves(placed))
    argv = ("--reward=mesh_rewards:score", "--lora=16")
    assert_same(
        run_ppo(tmp_path / "mesh", files, "--placement.policy=fsdp=8", reward=argv),
        run_ppo(tmp_path / "alone", files, reward=argv),
    )


TRAINED = ("--batch-size=8", f"--num-steps={STEPS}", "--held-out=0.25")
OTHERS = {
    "sft": (
        *(sft, "--model=FILES/model", "--data=FILES/answers.jsonl"),
        *(*TRAINED, "--learning-rate=1e-2", "--micro-batch-size=4"),
    ),
    "sft from nothing": (
        *(sft, "--tokenizer=FILES/model", "--data=FILES/answers.jsonl", *TRAINED),
        *("--fresh-hidden-size=16", "--fresh-num-layers=1", "--fresh-num-heads=2"),
        "--fresh-max-positions=16",
    ),
    "reward model": (
        *(reward_model, "--model=FILES/model", "--data=FILES/pairs.jsonl", *TRAINED),
        "--normalise=samples,num_samples=8,max_new_tokens=4",
    ),
    "dpo": (
        *(dpo, "--model=FILES/model", "--data=FILES/pairs.jsonl", *TRAINED),
        "--learning-rate=1e-2",
    ),
    "grpo": (
        *(grpo, "--model=FILES/model", "--prompts=FILES/questions.jsonl"),
        *("--prompt-field=question", "--verifier=gsm8k,unmarked=last_number"),
        *("--held-out=FILES/questions.jsonl", "--batch-size=8", "--num-workers=1"),
        *(f"--num-steps={STEPS}", "--max-new-tokens=4", "--group-size=4"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_experiments(files, name, tmp_path):
    experiment, *argv = OTHERS[name]
    run_folder = play(experiment, tmp_path / "mesh", files, *argv, MESH)
    assert_same(run_folder, play(experiment, tmp_path / "alone", files, *argv))


@pytest.mark.long
@pytest.mark.parametrize("name", ["reward model", "dpo"])
def test_pairs_whose_columns_are_shared(files, name, tmp_path):
    experiment, *argv = OTHERS[name]
    argv += ["--num-steps=2"]
    if name == "dpo":
        argv += ["--row-width=24"]  # two pairs may stand in one row
    mesh = "--placement.policy=data=2,fsdp=2,context=2"
    run_folder = play(experiment, tmp_path / "mesh", files, *argv, mesh)
    assert_same(
        run_folder, play(experiment, tmp_path / "alone", files, *argv), close=1e-5
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--placement.policy=data=3",), "multiply to the 8 devices, got data=3"),
        (
            ("--placement.policy=data=8", "--batch-size=12", "--num-minibatches=1"),
            "the 8 devices",
        ),
        (
            (MESH, "--placement.reference=last"),
            "expected axes that multiply to the 7 devices",
        ),
        (
            (
                "--placement.policy=data=4",
                "--placement.sampler=last:data=4",
                "--sampler-correction=recompute",
            ),
            "cannot be combined with --sampler-correction recompute, because",
        ),
        (
            ("--placement.critic=last:data=4", "--max-ratio-mean=10"),
            "--placement.critic cannot be combined with --max-ratio-mean, because a "
            "guard "
            "skips a step of both",
        ),
        (
            ("--placement.policy=data=8", "--placement.critic=last:data=4"),
            "expected axes that multiply to the 4 devices",
        ),
        (
            ("--placement.reference=cpu@pinned_host",),
            "place: expected cpu alone",
        ),
        (
            (
                *("--placement.policy=data=8", "--placement.reference=data=8"),
                "--penalty.value-estimator=exact",
            ),
            "exact --penalty cannot be combined with --placement.reference, because "
            "exact KL "
            "needs the hidden states of both",
        ),
    ],
)
def test_meshes_that_do_not_fit(files, argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        run_ppo(tmp_path / "run", files, *argv)
    assert refused.value.code == 2
    errors = capsys.readouterr().err.replace("│", " ")
    assert message in " ".join(errors.split())
    assert not (tmp_path / "run").exists()
