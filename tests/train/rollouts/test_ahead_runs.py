"""--max-staleness of the trainers: which policy samples, and exact resumes."""

import functools
import random
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import kill_kinds
import kill_runs
import numpy as np
import pytest

import rlhf_jax.train.methods.ppo
from rlhf_jax import hf, masked, ppo
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches, encoding
from rlhf_jax.data.files import read_prompts
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train import build, main

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
STEPS = 6
STOPPING = """
import signal
calls = 0

def score(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 3:  # in step 2: the rehearsal's call is step 0's
        signal.raise_signal(signal.SIGTERM)
    return [float(len(set(response.split()))) for response in responses]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    kill_kinds.write_files(folder)
    (folder / "stopping_rewards.py").write_text(STOPPING)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in ("stopping_rewards", "their_rewards", "their_verifiers"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def at_the_files(files, monkeypatch):
    monkeypatch.chdir(files)


def ppo_words(out, *argv, reward="their_rewards:score"):
    options = [o for o in kill_kinds.ON_PPO if not o.startswith("--num-steps")]
    steps = (f"--num-steps={STEPS}", f"--reward={reward}", "--kl-coef=0.1")
    return [*options, f"--out={out}", "--no-progress", *steps, *argv]


def run_ppo(out, *argv, reward="their_rewards:score"):
    main.main(["ppo", *ppo_words(out, *argv, reward=reward)])
    return metrics.read(out / "metrics.jsonl")


def run_grpo(out, *argv):
    options = [o for o in kill_kinds.MOVED if not o.startswith("--num-steps")]
    words = [*options, f"--out={out}", "--no-progress", f"--num-steps={STEPS}", *argv]
    main.main(["grpo", *words])
    return metrics.read(out / "metrics.jsonl")


def behind(staleness):
    """Draws each rollout by the policy of k steps before, by hand, without a queue."""
    options = command_line.parse(
        rlhf_jax.train.methods.ppo.Config, description="", argv=ppo_words("none")
    )
    policy = pretrained.load(options.start.model)
    meshes = build.Meshes.of(options)
    models = build.build(options, policy, meshes=meshes)
    rows, tokens = encoding.encode_prompts(
        TextContract(policy.tokenizer, stop_ids=policy.stop_ids),
        read_prompts(options.data.prompts),
        limits=Limits(policy.room(max_new_tokens=options.batch.max_new_tokens)),
    )
    prompts = batches.prompt_batches(tokens, batch_size=4, seed=0, pad_id=policy.pad_id)
    reward = TextReward(
        function=command_line.load_function(options.rewards.reward),
        decode=policy.decode,
        rows=rows,
    )
    sample = jax.jit(functools.partial(ppo.sample, recipe=models.recipe))
    learn = jax.jit(functools.partial(ppo.learn, recipe=models.recipe))
    state, means = models.train, []
    policies = [state.policy]
    for step in range(STEPS):
        key = jax.random.fold_in(jax.random.key(0), step)
        older = policies[max(0, step - staleness)]
        rollout = sample(older, prompts=prompts[step], key=key)
        state, stats, _ = learn(
            state,
            rollout=rollout,
            scores=jnp.asarray(reward(rollout)),
            frozen=FrozenModels(models.reference),
            key=key,
        )
        policies.append(state.policy)
        means.append(masked.mean_stats(stats))
    return means, state


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_step_s_learns_from_the_policy_of_step_s_less_k(files, tmp_path, staleness):
    argv = [f"--max-staleness={staleness}"]
    if staleness:
        argv.append("--sampler-correction=ratio")
    rows = run_ppo(tmp_path / "run", *argv)
    expected, state = behind(staleness)
    for row, stats in zip(rows, expected, strict=True):
        for name, value in stats.items():
            if name.startswith("trust/"):
                continue  # of versions, which `sample` here does not stamp
            assert row[name] == pytest.approx(float(value), rel=1e-4, abs=2e-5), name
    _, params = hf.load(tmp_path / "run" / "model")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, state.policy
    )
    drawn = metrics.read(tmp_path / "run" / "samples.jsonl")
    oldest = {row["step"]: row["version"] for row in drawn}
    assert oldest == {step: max(0, step - staleness) for step in range(STEPS)}
    if staleness:
        ages = [min(step, staleness) for step in range(STEPS)]
        assert [row["policy/staleness"] for row in rows] == ages
        assert [row["policy/staleness_max"] for row in rows] == ages
        off_policy = [row["policy/sampler_mismatch"] > 1e-4 for row in rows]
        assert off_policy == [False] + [True] * (STEPS - 1)
        for row in metrics.read(tmp_path / "run" / "timings.jsonl"):
            assert row["waits"].keys() == {"trainer", "sampler"}
    else:
        assert "policy/staleness" not in rows[0]


@pytest.mark.parametrize("staleness", [1, 3])
def test_older_samples_are_weighted_by_default(files, tmp_path, staleness):
    rows = run_grpo(tmp_path / "run", f"--max-staleness={staleness}")
    ages = [min(step, staleness) for step in range(STEPS)]
    assert [row["policy/staleness_max"] for row in rows] == ages
    assert rows[0]["policy/sampler_kl_k3"] < 1e-9
    assert all(row["policy/sampler_kl_k3"] > 1e-8 for row in rows[1:])
    assert all(row["policy/sampler_weight"] != 1 for row in rows[1:])
    plain = run_grpo(tmp_path / "plain")
    # The first rollout is that of an on-policy run; the later ones are not.
    assert rows[0]["objective/scores"] == plain[0]["objective/scores"]
    assert "policy/sampler_weight" not in plain[0]


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_stopped_run_goes_on_to_the_last_bit(files, tmp_path, staleness, capsys):
    argv = (f"--max-staleness={staleness}", "--snapshot-every=4")
    reward = "stopping_rewards:score"
    sys.modules.pop("stopping_rewards", None)
    with pytest.raises(SystemExit) as stopped:
        run_ppo(tmp_path / "run", *argv, reward=reward)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(metrics.read(tmp_path / "run" / "metrics.jsonl")) == 3
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    after = run_ppo(tmp_path / "run", *argv, "--resume", reward=reward)
    assert after == run_ppo(tmp_path / "whole", *argv, reward=reward)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run_ppo(other, "--max-staleness=2", "--resume", reward=reward)
    assert "max_staleness" in capsys.readouterr().err.replace("-", "_")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name for name in kill_kinds.KINDS if "behind" in name or name == "ppo on-policy"],
)
def test_killed_runs_go_on_to_the_last_bit(files, tmp_path, name):
    kind, rng = kill_kinds.KINDS[name], random.Random(name)
    kill_runs.play(kind, files, tmp_path / "whole", kills=0, rng=rng)
    assert kill_runs.play(kind, files, tmp_path / "killed", kills=3, rng=rng) == 3
    whole, killed = (
        kill_runs.contents(tmp_path / folder) for folder in ("whole", "killed")
    )
    assert whole == killed
