"""Tunix's PPOLearner over its RLCluster, vanilla rollout, with unchanged `train`.

Its batches wait for the driver, and the calls of `train` to the cluster are timed:
"rollout" is `generate`, "update" is `update_actor` and `update_critic`, and the rest is
"score". It runs in float32 on a mesh of one device, without checkpoints or evaluation.

The work differs. Tunix has no GPT-2; its Qwen2 of the same width, depth and heads is
used, with a gated MLP of 8/3 the width, which gives a layer as many parameters as
GPT-2's, a tied head, rotary positions and fewer biases. Its unit of work is a
minibatch: each is sampled and scored separately, by the policy after the previous one,
and trained on for all epochs before the next. Log-probs are recomputed after sampling
(`get_old_per_token_logps`), the head runs at prompt positions too, and the critic's
values are computed op by op, outside any program. Prompts and responses pass through a
tokenizer, here of numbers.

With lengths, logits are masked before the sampler draws, so that EOS ends a response at
the workload's length. Tunix packs rows (`max_seq_token_per_tpu`): a stream of responses
fills rows with a fixed number of tokens, each an optimizer step, so there are about as
many steps as minibatches, with other responses.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import line_protocol
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from line_protocol import EOS, Clock, Workload
from tunix.generate.sampler import Sampler
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.rl import utils
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

NEVER = -1e9  # a logit


class Finished(Exception):
    """The driver requests no more iterations."""


class Numbers:
    """A tokenizer whose words are token ids in decimal."""

    def __init__(self, workload: Workload) -> None:
        self.vocab_size, self._ends = workload.vocab_size, bool(workload.lengths)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int | None:
        return None

    def pad_id(self) -> int:
        return self.vocab_size  # outside the vocabulary, so that it is never sampled

    def eos_id(self) -> int:
        return EOS if self._ends else self.vocab_size + 1


def stop(workload: Workload) -> None:
    """Patches the sampler so that responses end at the workload's lengths."""
    sample, pool = Sampler._sample, np.array(workload.lengths, np.int32)

    def stopping(self: Any, logits: Any, *, sampler_state: Any, **named: Any) -> Any:
        # Prompts have no padding, so that a row is [prompt, response].
        prompts = sampler_state.token_buffer[:, : workload.prompt_length]
        stops = jnp.asarray(pool)[prompts.sum(axis=1) % len(pool)]
        drawn = sampler_state.decoding_step + 1 - workload.prompt_length
        last = (stops == drawn + 1)[:, None, None]
        is_eos = jnp.arange(logits.shape[-1]) == EOS
        logits = jnp.where(last == is_eos, logits, NEVER)
        return sample(self, logits, sampler_state=sampler_state, **named)

    Sampler._sample = stopping


def budget(workload: Workload) -> int | None:
    """Tokens of a packed row: 9/8 of the mean number in a minibatch."""
    if not workload.lengths:
        return None
    mean = workload.prompt_length + np.mean(workload.lengths)
    longest = workload.prompt_length + workload.response_length
    return max(longest, int(1.125 * workload.minibatch_size * mean))


def model_of(workload: Workload, *, seed: int, tied: bool) -> Qwen2:
    shape = ModelConfig(
        num_layers=workload.num_layers,
        vocab_size=workload.vocab_size,
        embed_dim=workload.hidden_size,
        hidden_dim=round(8 * workload.hidden_size / 3),
        num_heads=workload.num_heads,
        head_dim=workload.hidden_size // workload.num_heads,
        num_kv_heads=workload.num_heads,
        rope_theta=10_000,
        norm_eps=1e-5,
        use_tied_embedding=tied,
    )
    return Qwen2(shape, rngs=nnx.Rngs(seed))


def small(model: Qwen2) -> Qwen2:
    """Sets weights of GPT-2's scale; Tunix's initial ones always sample one token."""
    state = nnx.state(model, nnx.Param)
    shapes, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    nnx.update(
        model,
        structure.unflatten(
            leaf if leaf.ndim < 2 else 0.02 * jax.random.normal(key, leaf.shape)
            for leaf, key in zip(shapes, keys, strict=True)
        ),
    )
    return model


def main(workload: Workload) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    scoring: dict[str, Any] = {"scores": []}
    clock = Clock()

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        rows = [np.array(text.split(), int) for text in completions]
        # EOS is a token of the response, but not a word of its text.
        sizes = [row.size + bool(workload.lengths) for row in rows]
        scores = [
            (row % line_protocol.DIVISOR == 0).sum() / size
            for row, size in zip(rows, sizes, strict=True)
        ]
        scoring["scores"].append((scores, sum(sizes)))
        return scores

    if workload.lengths:
        stop(workload)
    adamw = functools.partial(
        optax.adamw, workload.learning_rate, weight_decay=workload.weight_decay
    )
    actor = small(model_of(workload, seed=0, tied=True))
    reference = small(model_of(workload, seed=0, tied=True))
    critic = utils.create_critic_model(small(model_of(workload, seed=0, tied=False)))
    cluster = RLCluster(
        actor=actor,
        critic=critic,
        reference=reference,
        tokenizer=Numbers(workload),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(Role, mesh),
            rollout_engine="vanilla",
            training_config=RLTrainingConfig(
                actor_optimizer=adamw(),
                critic_optimizer=adamw(),
                mini_batch_size=workload.minibatch_size,
                train_micro_batch_size=workload.minibatch_size,
                eval_every_n_steps=10**9,
                max_steps=10**9,
                max_seq_token_per_tpu=budget(workload),
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=workload.response_length,
                max_prompt_length=workload.prompt_length,
                kv_cache_size=workload.prompt_length + workload.response_length,
                temperature=workload.temperature,
            ),
        ),
    )
    learner = PPOLearner(
        rl_cluster=cluster,
        ppo_config=PPOConfig(
            num_iterations=workload.num_epochs,
            beta=workload.kl_coef,
            gamma=workload.gamma,
            gae_lambda=workload.lam,
            epsilon=workload.clip_range,
            clip_range_value=workload.clip_range,
            kl_method="kl",
        ),
        reward_fns=reward,
    )

    def weights() -> Any:
        models = cluster.actor_trainer.model, cluster.critic_trainer.model
        return [nnx.state(model, nnx.Param) for model in models]

    def wait() -> None:
        jax.block_until_ready(weights())

    def timed(name: str, *, before: str | None, after: str) -> None:
        """Laps `before` as the cluster's method is called, `after` as it returns."""
        called: Callable[..., Any] = getattr(cluster, name)

        def method(*args: Any, **named: Any) -> Any:
            if before is not None:
                clock.lap(before)
            output = called(*args, **named)
            wait()
            clock.lap(after)
            return output

        setattr(cluster, name, method)

    timed("generate", before=None, after="rollout")
    timed("update_actor", before="score", after="update")
    timed("update_critic", before=None, after="update")

    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights()[0]))
    before = jax.device_get(actor.final_norm.w[...])

    def check() -> dict[str, float]:
        scores, counts = zip(*scoring["scores"], strict=True)
        scoring["scores"] = []
        trained = cluster.actor_trainer
        after = jax.device_get(trained.model.final_norm.w[...])
        loss = trained._prev_buffered_train_metrics.loss
        return {
            "response_tokens": int(sum(counts[-workload.num_minibatches :])),
            "mean_score": float(np.concatenate(scores).mean()),
            "loss": float(loss) if math.isfinite(loss) else math.nan,
            "moved": float(np.abs(after - before).max()),
        }

    numbers = line_protocol.iterations(
        clock=clock,
        versions=line_protocol.versions_of("google-tunix", "jax", "jaxlib", "flax"),
        about={"parameters": parameters},
        check=check,
        wait=wait,
    )

    def batches() -> Iterator[dict[str, Any]]:
        for step in numbers:
            rows = workload.prompts(step)
            yield {"prompts": np.array([" ".join(map(str, row)) for row in rows])}
        raise Finished

    with contextlib.suppress(Finished):
        learner.train(batches())


if __name__ == "__main__":
    main(line_protocol.read_workload())
