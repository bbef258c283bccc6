"""Draws, scores and judges the responses of both models to a batch of prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import processes
from rlhf_jax.environments.finished import EARLY, TURNS
from rlhf_jax.evaluation import comparison
from rlhf_jax.evaluation.comparison import PairFunction
from rlhf_jax.evaluation.figures import Response
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import text, verifiers
from rlhf_jax.roles.rewards.scores import Scores, scores_of
from rlhf_jax.roles.rewards.verifiers import Verifier
from rlhf_jax.train.evaluate import episodes
from rlhf_jax.train.evaluate.episodes import Played
from rlhf_jax.train.evaluate.options import Config
from rlhf_jax.train.evaluate.programs import Programs, prompts_of
from rlhf_jax.train.rewards import RewardList
from rlhf_jax.train.rows import ReadRows

Array = jax.Array
Model = Literal["policy", "reference"]
Guard = Callable[[], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Models, data and scorers of an evaluation."""

    options: Config
    programs: Programs
    start: Pretrained  # without parameters
    models: dict[Model, Frozen]  # the policy, and a reference if there is one
    keys: dict[Model, Array]  # one per model, so that equal models draw other samples
    read: ReadRows  # the file of prompts
    rewards: RewardList
    verifier: Verifier | None
    played: Played | None  # plays and scores episodes in place of responses
    judge: PairFunction | None

    @property
    def num_steps(self) -> int:
        """Number of batches of prompts."""
        return -(-len(self.read.tokens) // self.options.batch_size)

    def batch(self, step: int, *, guard: Guard) -> list[Response]:
        """Returns the responses to one batch of prompts.

        The last batch is filled with the first prompts, so that all batches have one
        shape; their second responses are left out.

        Args:
          guard: a context for running the user's code.
        """
        size, numbers = self.options.batch_size, list(self.read.tokens)
        begin = step * size
        count = min(size, len(numbers) - begin)
        rows = [numbers[(begin + i) % len(numbers)] for i in range(size)]
        responses: list[Response] = []
        for greedy in (False, True):
            of_models = {
                name: self._responses(
                    name, rows=rows, count=count, greedy=greedy, guard=guard
                )
                for name in self.models
            }
            if self.judge is not None:
                of_models["policy"] = self._judged(
                    of_models["policy"], of_models["reference"], guard=guard
                )
            for of_model in of_models.values():
                responses += of_model
        return responses

    def _responses(
        self, name: Model, *, rows: list[int], count: int, greedy: bool, guard: Guard
    ) -> list[Response]:
        model = self.models[name]
        num_samples = 1 if greedy else self.options.num_samples
        prompts = prompts_of(
            self.read.tokens,
            rows=rows,
            count=len(rows) if self.played else count,  # an environment plays all
            num_samples=num_samples,
            pad_id=self.start.pad_id,
        )
        rollout, scores = self._drawn(
            model, prompts, key=self.keys[name], greedy=greedy, guard=guard
        )
        ref_kl, reference = None, self.models.get("reference")
        if name == "policy" and reference is not None and not greedy:
            ref_kl = self.programs.response_kl(model, reference, rollout)
        with guard():
            output = self._scored(rollout, episodes=scores)
        count *= num_samples
        shown, ref_kl, scores = jax.tree.map(
            lambda leaf: leaf[:count], processes.whole((rollout, ref_kl, output))
        )
        texts = text.read(
            shown,
            decode=self.start.decode,
            rows=self.read.rows,
            prompts=self.read.written_prompts,
        )
        logprobs = shown.old_logprobs.sum(axis=1)
        of_models = [logprobs, *jax.tree.leaves(ref_kl)]
        self._check_finite(name, of_models, what="log-probs", rows=texts.index)
        parts: dict[str, Any] = {}
        if scores is not None:
            called = self.options.score_called
            self._check_finite(called, [scores.total], what="scores", rows=texts.index)
            parts = scores.parts
        counted = dict.fromkeys((*verifiers.counted(self.verifier), *parts))
        counts = [part for part in counted if part not in (*EARLY, TURNS)]
        of_episodes: list[dict[str, Any]] = [{}] * count
        if self.played is not None and scores is not None:
            read = shown.observed.sum(axis=1)
            of_episodes = [
                {"turns": int(parts[TURNS][i]), "observed": int(read[i]), "end": end}
                for i, end in enumerate(episodes.ends(scores))
            ]
        responses = []
        for i in range(count):
            written = shown.tokens[i][shown.response_mask[i]]
            ref_logprob = None
            if ref_kl is not None:
                ref_logprob = float(ref_kl.ref_logprobs[i])
            elif name == "reference" and not greedy:
                ref_logprob = float(logprobs[i])
            responses.append(
                Response(
                    model=name,
                    decoding="greedy" if greedy else "sampled",
                    row=int(shown.index[i]),
                    sample=int(shown.sample[i]),
                    prompt=texts.prompts[i],
                    response=texts.responses[i],
                    length=len(written),
                    ended=int(written[-1]) in self.start.stop_ids,
                    score=None if scores is None else float(scores.total[i]),
                    failed=any(
                        bool(parts[why][i])
                        for why in ("failed", "timed_out")
                        if why in parts
                    ),
                    answer=self._answer(texts.responses[i]),
                    logprob=float(logprobs[i]),
                    ref_logprob=ref_logprob,
                    kl=None if ref_kl is None else float(ref_kl.exact[i]),
                    k1=None if ref_kl is None else float(ref_kl.k1[i]),
                    verdict=None,
                    **of_episodes[i],
                    counts={name: float(parts[name][i]) for name in counts},
                )
            )
        return responses

    def _drawn(
        self, model: Frozen, prompts: Prompts, *, key: Array, greedy: bool, guard: Guard
    ) -> tuple[Rollout, Scores | None]:
        """Draws responses, or episodes with their scores."""
        if self.played is None:
            return self.programs.respond(model, prompts, key=key, greedy=greedy), None
        with guard():
            return self.played(model, prompts, key=key, greedy=greedy)

    def _scored(self, rollout: Rollout, *, episodes: Scores | None) -> Scores | None:
        """Scores a rollout; an error of one process is raised in all of them."""
        output: Any = None

        def run() -> None:
            nonlocal output
            early = self.rewards.begin(rollout, episodes=episodes)()
            output = self.rewards.finish(rollout, early)

        processes.on_each(run)
        return None if output is None else scores_of(output)

    def _check_finite(
        self, called: str, numbers: Sequence[Any], *, what: str, rows: Any
    ) -> None:
        """Raises StopError for a number that is not finite."""
        for array in numbers:
            wrong = ~np.isfinite(np.asarray(array))
            if wrong.any():
                place = int(np.argmax(wrong))
                raise StopError(
                    f"{called}: expected finite {what}, got {array[place]} for a "
                    f"response to row {rows[place]} of the prompts; see whether the "
                    f"model has diverged, or leave that row out"
                )

    def _answer(self, response: str) -> str | None:
        """Returns what majority@k compares; None without a verifier that reads it."""
        if not isinstance(self.verifier, verifiers.Answering):
            return None
        cause = None
        try:
            answer = self.verifier.answer(response)
            if answer is None or isinstance(answer, str):
                return answer
            result = f"{answer!r:.60}"
        except Exception as error:  # whatever the user's own code raises
            cause, result = error, f"{type(error).__name__}: {error}"
        raise InputError(
            f"{self.options.score_called}: expected answer(response) to return a text "
            f"or None, got {result} for {response!r:.60}; mend it"
        ) from cause

    def _judged(
        self,
        policy: Sequence[Response],
        reference: Sequence[Response],
        *,
        guard: Guard,
    ) -> list[Response]:
        assert self.judge is not None
        judged = functools.partial(
            comparison.judged,
            self.judge,
            prompts=[response.prompt for response in policy],
            responses=[response.response for response in policy],
            ref_responses=[response.response for response in reference],
            rows=[self.read.rows[response.row] for response in policy],
            called=f"--judge {self.options.judge}",
        )
        with guard():
            verdicts = processes.computed_by_first(judged)
        return [
            dataclasses.replace(response, verdict=tuple(verdict))
            for response, verdict in zip(policy, verdicts, strict=True)
        ]


def stats(responses: Sequence[Response]) -> Stats:
    """Returns the statistics of a batch for metrics.jsonl, of the policy's samples."""
    ours = [
        response
        for response in responses
        if (response.model, response.decoding) == ("policy", "sampled")
    ]
    numbers: dict[str, list[Any]] = {
        "objective/scores": [response.score for response in ours],
        "objective/kl": [response.k1 for response in ours],
        "objective/kl_exact": [response.kl for response in ours],
        "response/length": [response.length for response in ours],
        "response/eos_fraction": [response.ended for response in ours],
        "response/turns": [response.turns for response in ours],
    }
    if any(response.failed for response in ours):
        numbers["reward/failed"] = [response.failed for response in ours]
    for name in ours[0].counts:
        numbers[f"reward/{name}"] = [response.counts[name] for response in ours]
    means: dict[str, Any] = {
        name: (np.float32(np.sum(values)), np.float32(len(values)))
        for name, values in numbers.items()
        if values[0] is not None
    }
    return means
