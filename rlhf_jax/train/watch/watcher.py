"""Measurements of a run at each step: texts, judge, held-out prompts, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Request, Rollout, Sequences
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.text import Written
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import drift
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.train.config.watch import Watch
from rlhf_jax.train.programs import Programs, Read
from rlhf_jax.train.sampler import Sampler, versions
from rlhf_jax.train.watch import sampled_tokens

if TYPE_CHECKING:
    from rlhf_jax.environments.sampler import EpisodeSampler
    from rlhf_jax.train.loop import Drawn, Loop
    from rlhf_jax.train.watch.held_out import HeldOut
    from rlhf_jax.train.watch.judge import Judge

Array = jax.Array
Params = Any


class Watcher:
    """Measures what a run watches but does not train on."""

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
        of_reference: EpisodeSampler | None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          texts: {name: Sequences[M, b, S]}.
          prompts: one per row of the data set.
          of_reference: draws the reference's episodes; None samples responses.
        """
        self._options, self._programs = options, programs
        self._texts, self._judge, self.held_out = texts, judge, held_out
        self._policy, self._prompts = policy, prompts
        self._of_episodes = of_reference

    def before(
        self, policy: Params, shown: Rollout, reference: Frozen | None, *, step: int
    ) -> Stats:
        """Returns statistics of the policy that drew the rollout, before its update."""
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
        """Returns the likeliest tokens of the responses shown; None in most steps."""
        if step % self._options.sample_every:
            return None
        return self._programs.likeliest(
            policy, reference, self._programs.recipe.reported(shown)
        )

    def drift(self, policy: Params, reference: Frozen) -> Stats:
        """Returns `drift/...`; nothing for a reference of another shape."""
        if reference.model is not None:
            return {}
        return drift.stats(self._programs.drift(policy, reference))

    def samples(
        self,
        loop: Loop,
        drawn: Drawn,
        *,
        read: Read,
        reference: Frozen | None,
        likely: tuple[Array, Array, Array] | None,
        step: int,
        version: Array,
    ) -> list[dict[str, Any]]:
        """Returns rows of samples.jsonl, the first responses; none in most steps."""
        options, decode = self._options, self._policy.decode
        if step % options.sample_every:
            return []
        beside = None
        if options.sample_reference:
            assert reference is not None  # by the capability table
            request = loop.request(step, version)
            beside = self._of_reference(loop, reference, request)
        scores = drawn.scores
        if scores is None:  # in a run without rewards
            scores = jnp.zeros(drawn.rollout.index.shape, jnp.float32)
        total = rewards.scores_of(scores).total
        ref_logprobs = None if read.reference is None else read.reference.logprobs
        mine = row_sharding.local_rows((drawn.shown, total, ref_logprobs, beside))
        shown, total, ref_logprobs, beside = jax.tree.map(
            lambda leaf: leaf[: options.num_shown],
            self._programs.recipe.reported(mine),  # the policy's own responses
        )
        rows = [
            {
                "row": int(row),
                "prompt": prompt,
                "response": response,
                "score": float(score),
                "version": drawn_by,
                **tokens,
            }
            for row, score, drawn_by, (prompt, response), tokens in zip(
                shown.index,
                total,
                versions(shown),
                transcripts.texts(shown, decode=decode, prompts=self._prompts),
                sampled_tokens.columns(
                    shown,
                    logprobs=shown.old_logprobs,
                    ref_logprobs=ref_logprobs,
                    decode=decode,
                ),
                strict=True,
            )
        ]
        if beside is not None:
            texts = transcripts.texts(beside, decode=decode, prompts=self._prompts)
            for row, (_, text) in zip(rows, texts, strict=True):
                row["reference"] = text
        if likely is not None:
            others = sampled_tokens.alternatives(
                shown, processes.whole(likely), decode=decode
            )
            for row, likeliest in zip(rows, others, strict=True):
                row["alternatives"] = likeliest
        return rows

    def _of_reference(self, loop: Loop, reference: Frozen, request: Request) -> Rollout:
        """Draws the reference's responses to the prompts of a step, with its keys."""
        if self._of_episodes is not None:
            responses, _ = self._of_episodes(reference.stored, request)
            self._of_episodes.programs.free()  # the cache, until more
        elif isinstance(loop.sampler, Sampler) and not loop.config.staleness:
            # The version only selects the program that is compiled for the policy.
            responses = loop.sampler(reference.stored, request)
        else:  # a sampler outside, or one whose thread may be drawing
            responses = self._programs.respond(
                reference.stored,
                prompts=request.prompts,
                key=jax.random.split(request.key)[0],  # the key that the sampler takes
                greedy=False,
            )
        return loop.shown(responses)
