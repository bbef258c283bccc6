"""--held-out: scores of the policy on prompts that it is never trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Request, Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.functional import masked
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import scores_of
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.programs import Programs
from rlhf_jax.train.rewards import RewardList
from rlhf_jax.train.rows import ReadRows

if TYPE_CHECKING:
    from rlhf_jax.environments.sampler import EpisodeSampler

Array = jax.Array
Params = Any
HostArray = Any
Scored = dict[str, HostArray]  # f32[B] each: TOTAL, and the parts of the scores
TOTAL = "score"
IN_SUMMARY = {  # names in the summary that differ from that of the metric
    "eval/greedy_score": "held_out_score",
    f"eval/{TOTAL}": "held_out_sampled_score",
}


class HeldOut:
    """Evaluates a policy on held-out prompts, by the rewards of the run."""

    def __init__(
        self,
        config: PolicyGradientConfig,
        data: ReadRows,
        *,
        rewards: Callable[..., RewardList],
        episodes: Callable[..., EpisodeSampler | None],
        start: Pretrained,
        mesh: Mesh,
    ) -> None:
        """Compiles nothing yet.

        Args:
          episodes: makes the sampler of episodes of some rows, or None for responses.
        """
        share = row_sharding.row_share(mesh)  # its count must divide every batch
        whole = -(-len(data.rows) // share.count) * share.count
        self._size = size = min(config.batch.batch_size, whole)
        self._data, self._mesh = data, mesh
        self._of_teacher = data.teacher_prompts(pad_id=start.pad_id)
        self._samples = config.watch.held_out_samples
        named = [f"reward/{reward.name}" for reward in config.rewards.rewards]
        self._solving = {TOTAL, *named}  # scores above 0 mean that a row is solved
        self._rewards = rewards(rows=data.rows, prompts=data.written_prompts)
        self._episodes = {
            greedy: episodes(data, rows=size, greedy=greedy) for greedy in (True, False)
        }
        self._key = jax.random.key(config.seed)  # the same in every evaluation
        self._batches = batches.prompt_batches(
            data.prompts, batch_size=size, seed=0, pad_id=start.pad_id, share=share
        )

    def __call__(
        self, policy: Params, *, programs: Programs, reference: Frozen | None
    ) -> Stats:
        """Returns statistics of greedy responses, and of samples if there are any.

        Args:
          reference: for the KL of samples; None measures none.

        Returns:
          `eval/greedy_score`, the mean score of greedy responses. With samples
          `eval/score`, their mean score; `eval/pass_at_k`, the share of rows with a
          score above 0 among k samples; `eval/kl`, k1 to the reference, nats per
          response; and `eval/length`, tokens. `eval/greedy_reward/NAME` and
          `eval/reward/NAME` are the means of every part of the scores: the rewards of
          --rewards without their weights, which also have
          `eval/pass_at_k_reward/NAME`, and their counts, as `eval/reward/refused`.
        """
        greedy = [scored for _, scored in self._drawn(policy, programs, greedy=True)]
        stats: Stats = {
            f"eval/greedy_{name}": _mean(
                self._of_rows([scored[name] for scored in greedy])
            )
            for name in greedy[0]
        }
        if not self._samples:
            return stats
        every: dict[str, list[HostArray]] = {}
        lengths, kls = [], []
        for sample in range(self._samples):
            drawn = [*self._drawn(policy, programs, greedy=False, sample=sample)]
            for name in drawn[0][1]:
                of_rows = self._of_rows([scored[name] for _, scored in drawn])
                every.setdefault(name, []).append(of_rows)
            for rollout, _ in drawn:
                lengths.append(processes.whole(rollout.response_mask.sum(axis=1)))
                if reference is not None:
                    output = programs.reference_output(
                        reference, rollout, of_teacher=self._of_teacher
                    )
                    kls.append(processes.whole(_kl(rollout, output.logprobs)))
        tables = {name: np.stack(of) for name, of in every.items()}  # [k, rows]
        stats |= {f"eval/{name}": _mean(table) for name, table in tables.items()}
        solved = {
            name: _mean((of > 0).any(axis=0))
            for name, of in tables.items()
            if name in self._solving
        }
        stats["eval/pass_at_k"] = solved.pop(TOTAL)
        stats |= {f"eval/pass_at_k_{name}": share for name, share in solved.items()}
        per_pass = len(lengths) // self._samples
        for name, parts in {"eval/length": lengths, "eval/kl": kls}.items():
            if parts:
                of_samples = [
                    self._of_rows(parts[i : i + per_pass])
                    for i in range(0, len(parts), per_pass)
                ]
                stats[name] = _mean(np.stack(of_samples))
        return stats

    def summary(
        self, when: str, policy: Params, programs: Programs, reference: Frozen | None
    ) -> dict[str, float]:
        """Evaluates the policy, and returns the figures for the summary."""
        return of_held_out(self(policy, programs=programs, reference=reference), when)

    def _drawn(
        self, policy: Params, programs: Programs, *, greedy: bool, sample: int = 0
    ) -> Iterator[tuple[Rollout, Scored]]:
        """Yields rollouts of all rows, batch by batch, with their scores on the host.

        Verifiers score one batch while the next is drawn.
        """
        episodes, waiting = self._episodes[greedy], None
        for number in range(-(-len(self._data.rows) // self._size)):
            prompts = self._batches[number]
            samples = np.asarray(prompts.sample) + sample
            if episodes is None:  # an environment plays all
                # Rows of a second epoch fill up the last batch, and are not scored.
                samples = np.where(np.asarray(prompts.sample) > 0, ~samples, samples)
            prompts = dataclasses.replace(prompts, sample=samples)
            prompts = row_sharding.put_rows(prompts, mesh=self._mesh)
            if episodes is None:
                rollout = programs.respond(
                    policy, prompts=prompts, key=self._key, greedy=greedy
                )
                early = self._rewards.begin(rollout)
            else:
                request = Request(prompts, self._key, jnp.int32(0))
                rollout, scores = episodes(policy, request)
                early = self._rewards.begin(rollout, episodes=scores)
            if waiting is not None:
                yield self._scored(*waiting)
            waiting = rollout, early
        if waiting is not None:
            yield self._scored(*waiting)
        if episodes is not None:
            episodes.programs.free()  # the cache, until the next evaluation

    def _scored(self, rollout: Rollout, early: Any) -> tuple[Rollout, Scored]:
        output = self._rewards.finish(rollout, early())
        if output is None:
            return rollout, {TOTAL: np.zeros(len(rollout.index), np.float32)}
        scores = scores_of(output)
        parts = {f"reward/{name}": scores.parts[name] for name in sorted(scores.parts)}
        arrays = {TOTAL: scores.total} | parts
        return rollout, {name: processes.whole(x) for name, x in arrays.items()}

    def _of_rows(self, parts: list[HostArray]) -> HostArray:
        """Returns one number per row; the last batch repeats rows of the first."""
        return np.concatenate(parts)[: len(self._data.rows)]


def _kl(rollout: Rollout, ref_logprobs: Array) -> Array:
    """Returns Σ_t log π - log π_ref of each response, f32[B], nats."""
    distance = jnp.where(rollout.response_mask, rollout.old_logprobs - ref_logprobs, 0)
    return distance.sum(axis=1)


def _mean(numbers: HostArray) -> tuple[Array, Array]:
    return jnp.float32(np.sum(numbers, dtype=np.float64)), jnp.float32(numbers.size)


def of_held_out(stats: Stats, when: str) -> dict[str, float]:
    """Renames an evaluation for the summary, as held_out_score_before."""
    means = {name: float(value) for name, value in masked.mean_stats(stats).items()}
    return {
        f"{IN_SUMMARY.get(name, name.replace('eval/', 'held_out_'))}_{when}": mean
        for name, mean in means.items()
    }
