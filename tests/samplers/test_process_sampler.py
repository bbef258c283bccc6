"""Our decoder behind the protocol gives equal bits in a process."""

import dataclasses
import functools
import os
import signal
import subprocess
import threading
import time

import chex
import jax
import numpy as np
import optax
import pytest
import toy_files
import toys

from rlhf_jax.algorithms.batch import Prompts, Request
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import Experts
from rlhf_jax.samplers import process, protocol, weight_files
from rlhf_jax.samplers.protocol import TransientError
from rlhf_jax.train.rollouts.outside import OutsideSampler
from rlhf_jax.train.sampler import Sampler

RECIPE = GRPO(
    model=toy_files.MODEL,
    policy_optimizer=optax.adam(1e-3),
    max_new_tokens=6,
    stop_ids=(1,),
    group_size=2,
    temperature=0.8,
)
MASK = np.array([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]], bool)
PROMPTS = Prompts(
    tokens=np.where(MASK, [[0, 5, 6], [0, 5, 6], [7, 8, 9], [7, 8, 9]], 0).astype("i4"),
    mask=MASK,
    index=np.array([3, 3, 0, 0], np.int32),
    sample=np.array([0, 1, 0, 1], np.int32),
)
KEY = jax.random.key(4)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    with process.ProcessSampler(RECIPE, weights=folder) as sampler:
        yield sampler, folder
    assert not list(folder.iterdir())


def params(seed):
    return jax.device_get(toy_files.params(seed=seed))


@pytest.mark.slow
def test_it_draws_what_the_program_of_an_iteration_does(outside):
    sampler, folder = outside
    mesh = ONE_DEVICE.make()
    sample = Sampler(RECIPE, mesh=mesh, home=mesh)
    tokens = []
    for version in (0, 7):
        policy = params(version)
        arguments = sharding.place((policy, KEY, np.int32(version)), mesh=mesh)
        placed_policy, key, stamp = arguments
        prompts = row_sharding.put_rows(PROMPTS, mesh=mesh)
        expected = jax.device_get(sample(placed_policy, Request(prompts, key, stamp)))
        assert sampler.hand_over(policy, version=version) == 0
        drawn = sampler.draw(PROMPTS, key=KEY, version=version)
        rollout = protocol.rollout_of(PROMPTS, drawn, version=version)
        chex.assert_trees_all_equal(rollout, expected)
        for left, right in zip(*map(jax.tree.leaves, (rollout, expected)), strict=1):
            assert left.dtype == right.dtype
        tokens.append(expected.tokens)
        # Each version's file is gone once it was read.
        (only,) = folder.iterdir()
        assert not list(only.iterdir())
    assert (tokens[0] != tokens[1]).any()


@pytest.mark.slow
def test_the_experts_of_a_mixture_come_with_its_tokens():
    model = dataclasses.replace(toys.LLAMA, num_layers=3, experts=Experts(4, 2))
    recipe = dataclasses.replace(
        RECIPE, model=model, routing_replay=RoutingReplay("sampler")
    )
    mesh, policy = ONE_DEVICE.make(), toys.params(model)
    request = Request(PROMPTS, KEY, np.int32(0))
    with OutsideSampler(
        process.ProcessSampler(recipe),
        home=mesh,
        max_new_tokens=recipe.max_new_tokens,
        record=recipe.routing_record,
    ) as sampler:
        rollout = sampler(policy, request)
    expected = Sampler(recipe, mesh=mesh, home=mesh)(policy, request)
    chex.assert_trees_all_equal(rollout, expected)
    assert rollout.experts.shape == (4, 3 + 6, 3, 2)
    assert {*np.unique(rollout.experts)} == {-1, 0, 1, 2, 3}


@pytest.mark.slow
def test_a_draw_of_another_version_is_refused(outside):
    sampler, _ = outside
    sampler.hand_over(params(0), version=2)
    with pytest.raises(TransientError, match="has another version of the policy; hand"):
        sampler.draw(PROMPTS, key=KEY, version=3)


def test_other_parameters_than_were_written_are_told(outside, monkeypatch):
    sampler, _ = outside
    write = weight_files.write
    monkeypatch.setattr(
        weight_files, "write", lambda path, _: write(path, params(seed=3))
    )
    with pytest.raises(SelfCheckError, match=r"version 5 was written to .*, got"):
        sampler.hand_over(params(0), version=5)


def pid_of(sampler):
    (process,) = sampler._workers._processes
    return process._worker.pid


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_may_be_tried_again():
    with process.ProcessSampler(RECIPE) as sampler:
        sampler.hand_over(params(0), version=0)
        sampler.timeout = 0.02  # too short to compile
        with pytest.raises(
            TransientError, match=r"took longer than 0.02 s; raise timeout= of"
        ):
            sampler.draw(PROMPTS, key=KEY, version=0)
        sampler.timeout = 60.0
        # Another process took its place, without parameters.
        with pytest.raises(TransientError, match="has another version of the policy"):
            sampler.draw(PROMPTS, key=KEY, version=0)
        kill = threading.Timer(0.3, os.kill, (pid_of(sampler), signal.SIGKILL))
        kill.start()

        def until_it_dies():
            for version in range(1000):
                sampler.hand_over(params(0), version=version)

        with pytest.raises(TransientError, match=r"ended its process .*out of memory"):
            until_it_dies()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_a_process_that_is_killed_while_idle_gets_its_weights_again(
    pause, capsys, monkeypatch
):
    monkeypatch.setattr(protocol, "SECONDS", 0.01)
    mesh = ONE_DEVICE.make()
    version = np.int32(3)
    inner = process.ProcessSampler(RECIPE, timeout=60.0)
    with OutsideSampler(
        inner, home=mesh, max_new_tokens=RECIPE.max_new_tokens
    ) as sampler:
        policy = jax.tree.map(jax.numpy.asarray, params(0))
        draw = functools.partial(sampler, policy, Request(PROMPTS, KEY, version))
        before = draw()
        os.kill(pid_of(inner), signal.SIGKILL)
        time.sleep(pause)  # before or after it is known
        after = draw()
        assert sampler.retries.count == 1
        draw()
        assert sampler.retries.count == 1
    chex.assert_trees_all_equal(before, after)
    assert before.response_mask.any()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sampler: try 2 of 5 in 0.01 s, as the one before failed: ")


def test_parameters_as_a_file(tmp_path):
    written = {"a": {"b": np.arange(6.0, dtype=np.float32).reshape(2, 3).T}, "c": KEY}
    written["c"] = np.ones(2, jax.numpy.bfloat16)
    weight_files.write(tmp_path / "one", written)
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    params_read = weight_files.read(tmp_path / "one")
    chex.assert_trees_all_equal(params_read, written)
    assert params_read["c"].dtype == jax.numpy.bfloat16


def test_folders_of_killed_processes_are_removed(tmp_path):
    before = weight_files.HandOverFolder(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = before.path.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    (tmp_path / left / "version-3").mkdir(parents=True)
    (tmp_path / f"{weight_files.PREFIX}elsewhere-{ended.pid}-x").mkdir()
    after = weight_files.HandOverFolder(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    elsewhere = f"{weight_files.PREFIX}elsewhere-{ended.pid}-x"
    assert names == {before.path.name, after.path.name, elsewhere}


@pytest.mark.parametrize("name", ["file/below", "mistyped", "mistyped/below"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--sampler: expected an existing folder"):
        weight_files.HandOverFolder(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_an_entropy_that_a_sampler_lacks_is_estimated():
    logprobs = np.array([[-1.0, -2.0, -9.0]] * 4, np.float32)
    drawn = protocol.Drawn(
        np.full((4, 3), 5), logprobs, lengths=np.array([2, 2, 1, 3], np.int32)
    )
    rollout = protocol.rollout_of(PROMPTS, drawn, version=None)
    assert rollout.version is None
    np.testing.assert_array_equal(rollout.entropy[0], [0, 0, 0, 1, 2, 0])
    np.testing.assert_array_equal(rollout.old_logprobs[2], [0, 0, 0, -1, 0, 0])
    np.testing.assert_array_equal(rollout.mask[0], [0, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(rollout.response_mask.sum(axis=1), [2, 2, 1, 3])
