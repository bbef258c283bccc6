"""What a run watches, step by step: texts, judge, held-out prompts, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from rlhf_jax.algorithms.batch import Rollout, Sequences
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.text import Written
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference import drift
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.config.watch import Watch
from rlhf_jax.train.programs import Programs, Read
from rlhf_jax.train.sampling.sampler import Sampler
from rlhf_jax.train.watch.held_out import HeldOut
from rlhf_jax.train.watch.judge import Judge
from rlhf_jax.train.watch.samples import sample_rows

if TYPE_CHECKING:
    from rlhf_jax.train.loop import Loop

Array = jax.Array
Params = Any


class Watcher:
    """What a run looks at and does not train on."""

    def __init__(
        self,
        options: Watch,
        *,
        programs: Programs,
        texts: Mapping[str, Sequences],
        judge: Judge | None,
        held_out: HeldOut | None,
        policy: Pretrained,
        prompts: Sequence[Written],
    ) -> None:
        """Measures nothing yet.

        Args:
          texts: {name: Sequences[M, b, S]} of --texts.
          held_out: of --held-out.
          policy: that decodes.
          prompts: the prompts as they were written, by row of the data set.
        """
        self._options, self._programs = options, programs
        self._texts, self._judge, self.held_out = texts, judge, held_out
        self._policy, self._prompts = policy, prompts

    def before(
        self, policy: Params, shown: Rollout, reference: Frozen | None, *, step: int
    ) -> Stats:
        """Statistics of the policy that responded, before it learns."""
        stats: Stats = {}
        if step % self._options.eval_every == 0:
            stats |= self._programs.text_stats(policy, self._texts)
            stats |= {} if self._judge is None else self._judge(shown)
        every = self._options.held_out_every
        if self.held_out is not None and every is not None and step % every == 0:
            stats |= self.held_out(policy, programs=self._programs, reference=reference)
        return stats

    def likeliest(
        self, policy: Params, reference: Frozen | None, shown: Rollout, *, step: int
    ) -> tuple[Array, Array, Array] | None:
        """The likeliest tokens beside those of the responses that are shown."""
        if step % self._options.sample_every:
            return None
        return self._programs.likeliest(
            policy, reference, self._programs.recipe.reported(shown)
        )

    def drift(self, policy: Params, reference: Frozen) -> Stats:
        """`drift/...` where the reference has the policy's shape."""
        if reference.model is not None:
            return {}
        return drift.stats(self._programs.drift(policy, reference))

    def samples(
        self,
        loop: Loop,
        *,
        rollout: Rollout,
        scores: Array | Scores | None,
        read: Read,
        reference: Frozen | None,
        likely: tuple[Array, Array, Array] | None,
        step: int,
        version: Array,
    ) -> list[dict[str, Any]]:
        """Rows of samples.jsonl; none in most steps."""
        if step % self._options.sample_every:
            return []
        beside = None
        if self._options.sample_reference:
            assert reference is not None  # as the capability table has it
            prompts, key = loop.prompts[step], loop.key(step)
            if isinstance(loop.sampler, Sampler) and not loop.config.staleness:
                beside = loop.sampler(
                    reference.stored,
                    prompts=prompts,
                    key=key,
                    version=version,  # of nothing; it is the same program
                )
            else:  # it has the policy's parameters, or may be drawing
                beside = self._programs.respond(
                    reference.stored,
                    prompts=prompts,
                    key=jax.random.split(key)[0],  # as it takes it
                    greedy=False,
                )
            beside = loop.shown(beside)
        return sample_rows(
            loop.shown(rollout),
            scores,
            reported=self._programs.recipe.reported,
            ref_logprobs=None if read.reference is None else read.reference.logprobs,
            policy=self._policy,
            prompts=self._prompts,
            count=self._options.num_shown,
            beside=beside,
            likely=likely,
        )
