"""The participant rlhf_jax: `ppo.iteration` in one program or on two devices.

An iteration is what a user runs. `Together` is one jitted program with a donated state.
Its phases do the same work in separate programs that are waited for: `ppo.sample`;
reward with `score.reference_logprobs`, and `ppo.values`; the rest of `ppo.learn`,
advantages included. They run after the counted iteration, so their times need not add
up to it, and are compiled after the warm-up, whose memory is that of a run.

`Apart` has the critic on its own device, as `--placement.critic last` does. On a CPU it
is a virtual device, for models whose products are too small for two threads: XLA:CPU
runs policy and critic of one program one after the other, but two programs get a core
each. Its phases are the same programs, waited for. Seconds of an iteration, together
and apart, on 2 cores: tiny 0.103 and 0.070, small 4.7 and 4.6, gpt2-small 7.0 and 7.4.

With lengths, models read packed rows, as with `--packing auto`: the rollout is one
program, the host reads lengths and packs, and the rest is a second program. With
--padded rows are not packed and the iteration is one program.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import line_protocol
import numpy as np
import optax
import rlhf_jax_lengths
from line_protocol import Clock, Workload
from rlhf_jax_learners import Apart, Together, prompts_of

from rlhf_jax import config, decoder, ppo
from rlhf_jax.algorithms.policy_gradient.recipe import Clip
from rlhf_jax.devices import program_cache
from rlhf_jax.models import layout

Array = jax.Array

PADDED = "--padded"
LARGEST_APART = 64  # largest hidden size for which `Apart` is faster on a CPU


def algorithm_of(workload: Workload) -> ppo.PPO:
    model = layout.fastest(
        config.gpt2(
            vocab_size=workload.vocab_size,
            hidden_size=workload.hidden_size,
            num_layers=workload.num_layers,
            num_heads=workload.num_heads,
            max_positions=workload.max_positions,
        )
    )
    # 64 divides the vocabulary of tiny; the default of 128 would double its head.
    model = dataclasses.replace(model, vocab_multiple=64, attention="auto")
    adamw = functools.partial(
        optax.adamw, workload.learning_rate, weight_decay=workload.weight_decay
    )
    return ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=adamw(),
        critic_optimizer=adamw(),
        max_new_tokens=workload.response_length,
        stop_ids=(line_protocol.EOS,) if workload.lengths else (),
        temperature=workload.temperature,
        gamma=workload.gamma,
        lam=workload.lam,
        surrogate=Clip(workload.clip_range),
        vf_coef=workload.vf_coef,
        num_epochs=workload.num_epochs,
        num_minibatches=workload.num_minibatches,
    )


def main(workload: Workload) -> None:
    kind = Together
    if workload.hidden_size <= LARGEST_APART:
        jax.config.update("jax_num_cpu_devices", 2)  # before the backend starts
        kind = Apart if jax.default_backend() == "cpu" else Together
    algorithm = algorithm_of(workload)
    init = jax.jit(decoder.init, static_argnames=("model",))
    params = init(jax.random.key(0), model=algorithm.model)
    before = jax.tree.map(np.array, params["final_norm"])
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    pack = None
    if workload.lengths and PADDED not in sys.argv:
        pack = rlhf_jax_lengths.Packer(algorithm, workload=workload)
    learner = kind(algorithm, params=params, workload=workload, pack=pack)
    program_cache.give_back_memory()  # as a run does once its programs are compiled

    def lap(phase: str, done: Any) -> None:
        jax.block_until_ready(done)
        clock.lap(phase)

    def prepare() -> None:
        learner.phases(prompts=prompts, key=key, lap=lap)
        if pack is not None:  # a later batch may stay padded: compile for it now
            learner.pack = lambda rollout, *, key: None
            learner.iteration(prompts=prompts, key=key)
            learner.phases(prompts=prompts, key=key, lap=lap)
            learner.pack = pack
        program_cache.give_back_memory()

    def check() -> dict[str, Any]:
        loss, weight = stats["loss/policy"]
        assert weight is not None
        after = jax.device_get(learner.train.policy["final_norm"])
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), after, before)
        return {
            "response_tokens": int(scored.rollout.response_mask.sum()),
            "mean_score": float(scored.scores.mean()),
            "loss": float(loss / weight),
            "moved": float(max(jax.tree.leaves(moved))),
        } | ({} if pack is None else {"packing": pack.describe()["used"]})

    clock = Clock()
    for step in line_protocol.iterations(
        clock=clock,
        versions=line_protocol.versions_of("rlhf-jax", "jax", "jaxlib", "flax"),
        about={"parameters": parameters, **learner.about},
        check=check,
        prepare=prepare,
    ):
        prompts = jax.block_until_ready(prompts_of(workload, step=step))
        key = jax.block_until_ready(jax.random.fold_in(jax.random.key(2), step))
        clock.start()
        stats, scored = learner.iteration(prompts=prompts, key=key)
        if step == 0:
            program_cache.give_back_memory()
        if line_protocol.counts(step):
            clock.lap("update")
            whole = clock.total, sum(clock.cpu.values())
            key = jax.block_until_ready(jax.random.fold_in(key, 0))
            clock.start()
            learner.phases(prompts=prompts, key=key, lap=lap)
            clock.seconds["iteration"], clock.cpu["iteration"] = whole


if __name__ == "__main__":
    main(line_protocol.read_workload())
