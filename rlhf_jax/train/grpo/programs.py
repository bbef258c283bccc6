"""The compiled programs of a run: `jax.jit` stands here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rlhf_jax.algorithms import grpo, self_check
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.models.generation import decode
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.outside.sampler import OutsideSampler
from rlhf_jax.train.packed_rollouts import RolloutPacker
from rlhf_jax.train.references import FurtherPrograms
from rlhf_jax.train.sampling.sampler import Sampler
from rlhf_jax.verification.pool import PooledReward, VerifierPool

Array = jax.Array
Params = Any


def make_algorithm(options: VerifiedConfig, *, start: Pretrained) -> PolicyGradient:
    """What is fixed during the run."""
    recipe = options.recipe
    updates = options.num_steps * recipe.num_epochs * recipe.num_minibatches
    algorithm = options.algorithm(
        model=start.model,
        policy_optimizer=optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(optax.linear_schedule(options.learning_rate, 0.0, updates)),
        ),
        max_new_tokens=options.max_new_tokens,
        stop_ids=start.stop_ids,
    )
    return options.corrected(algorithm)


class Programs:
    """What is compiled, each with its parameters as arguments."""

    def __init__(
        self,
        algorithm: PolicyGradient,
        *,
        mesh: Mesh,
        options: VerifiedConfig,
        reference: Frozen | None,
        further: dict[str, Frozen],
    ) -> None:
        self.pack = RolloutPacker(
            options, recipe=algorithm, rows=options.batch_size, mesh=mesh
        )
        shape = {
            "model": algorithm.model,
            "max_new_tokens": algorithm.max_new_tokens,
            "temperature": algorithm.temperature,
        }
        self._mesh, self.group_size = mesh, algorithm.rows_per_prompt
        jit, bind, on = jax.jit, functools.partial, functools.partial(sharding.on, mesh)
        learn = bind(on(grpo.learn), recipe=algorithm)
        self.sample = options.make_sampler(algorithm, mesh=mesh, reference=reference)
        there = mesh if reference is None else frozen.mesh_of(reference)
        self.reference_logprobs = jit(
            bind(sharding.on(there, score.reference_logprobs), **shape)
        )
        self.further = FurtherPrograms(further, options=options, recipe=algorithm)
        self.learn = jit(learn, donate_argnames=("state",))
        self.measure = jit(bind(on(self_check.measure), reference=None, **shape))
        greedy = decode.Shaping(greedy=True)
        stop_ids = algorithm.stop_ids
        self.greedy = jit(
            bind(on(rollout.rollout), **shape, stop_ids=stop_ids, shaping=greedy)
        )
        self._seen_by_reward = bind(grpo.seen_by_reward, recipe=algorithm)
        self._inside = algorithm.penalty.needs_logits
        self.reported = algorithm.reported

    def score(
        self,
        rollout: Rollout,
        *,
        reference: Frozen | None,
        reward: PooledReward | None,
        key: Array,
        scores: Scores | Callable[[], Scores] | None = None,
    ) -> dict[str, Any]:
        """Scores, and the references' log-probs, computed while processes verify.

        Args:
          rollout: of `sample`.
          reference: the frozen policy, on its own devices; None for a run without.
          reward: that verifies, in processes.
          key: of this step.
          scores: of `verify`, or of the draw, where they may be a function that waits
            for them; None verifies here.

        Returns:
          Arguments of `learn`: with these how the models read the rollout packed, in
          the step of `key`, and the reference where an exact KL runs it once more.
        """
        pending = None
        if scores is None:
            assert reward is not None  # of a draw without scores
            mine = row_sharding.local_rows(self._seen_by_reward(rollout))
            pending = reward.submit(mine)
        ref_logprobs, packing = None, self.pack(rollout, key=key)
        of_batch = None if packing is None else packing.batch
        if reference is not None:
            ref_logprobs = frozen_models.run_beside(
                lambda there: self.reference_logprobs(
                    reference, rollout=there, packing=of_batch
                ),
                reference,
                rollout,
            )
        further = self.further(rollout, packing)
        if pending is not None:
            scores = row_sharding.put_computed(pending.collect(), mesh=self._mesh)
        if callable(scores):
            scores = scores()
        assert scores is not None
        return {
            "scores": scores,
            "reference": reference if self._inside else None,
            "ref_logprobs": ref_logprobs,
            "packing": packing,
            "further": further,
        }

    def draw(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array,
        reward: PooledReward,
    ) -> tuple[Rollout, Callable[[], Scores]]:
        """A draw of the queue, verified while the next one is drawn."""
        assert isinstance(self.sample, Sampler | OutsideSampler)  # as others refuse it
        rollout = self.sample.draw(policy, prompts=prompts, key=key, version=version)
        mine = row_sharding.local_rows(self._seen_by_reward(rollout))
        pending = reward.submit(mine)
        return rollout, lambda: row_sharding.put_computed(
            pending.collect(), mesh=self._mesh
        )

    def verify(self, rollout: Rollout, *, reward: PooledReward) -> Scores:
        """The scores alone, where they decide whether to draw again."""
        mine = row_sharding.local_rows(self._seen_by_reward(rollout))
        scores = reward.submit(mine).collect()
        return row_sharding.put_computed(scores, mesh=self._mesh)


def accuracy(
    params: Params,
    held_out: tuple[list[Row], list[Tokens]],
    *,
    programs: Programs,
    pool: VerifierPool,
    start: Pretrained,
    options: VerifiedConfig,
) -> float:
    """Share of the held-out questions whose greedy response is right."""
    rows, tokens = held_out
    count = min(len(rows), options.eval_rows)
    size = min(options.batch_size, count)
    reward = pool.reward(
        decode=start.decode, rows=rows, asked=[row["asked"] for row in rows]
    )
    asked = batches.prompt_batches(
        tokens[:count], batch_size=size, seed=0, pad_id=start.pad_id
    )
    key = jax.random.key(0)  # greedy responses need none
    pending = [
        reward.submit(
            processes.whole(programs.greedy(params, prompts=asked[i], key=key))
        )
        for i in range(-(-count // size))
    ]
    # The last batch is filled with questions of the first ones.
    right = np.concatenate([scores.collect().total for scores in pending])[:count]
    return float(right.mean())
