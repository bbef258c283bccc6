"""A batch of prompts to the responses of both models, with their numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.text import Written
from rlhf_jax.devices import processes
from rlhf_jax.evaluation import comparison
from rlhf_jax.evaluation.comparison import PairFunction
from rlhf_jax.evaluation.figures import Response
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import text
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.roles.rewards.verifiers import Answering
from rlhf_jax.train.evaluate import episodes
from rlhf_jax.train.evaluate.episodes import Played
from rlhf_jax.train.evaluate.programs import Programs, prompts_of
from rlhf_jax.train.evaluate.scoring import Score, first

Array = jax.Array
Model = Literal["policy", "reference"]
Guard = Callable[[], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that a batch is evaluated with."""

    programs: Programs
    start: Pretrained  # its params are not read
    models: dict[Model, Frozen]  # the policy, and a reference if there is one
    keys: dict[Model, Array]  # one for each, so that equal models differ in samples
    rows: list[Row]  # of the file of prompts
    asked: list[Written]  # their prompts as they were written
    tokens: dict[int, Tokens]  # of the prompts that leave room, by their row
    num_samples: int
    batch_size: int  # prompts
    score: Score | None
    played: Played | None  # plays episodes, which it scores, in place of responses
    answers: Answering | None  # a verifier that reads answers
    judge: PairFunction | None
    judge_called: str
    score_called: str  # what messages call the reward or verifier

    @property
    def num_steps(self) -> int:
        """Batches of prompts."""
        return -(-len(self.tokens) // self.batch_size)

    def batch(self, step: int, *, guard: Guard) -> list[Response]:
        """The responses to one batch of prompts.

        The last batch is filled with prompts of the first ones, whose responses are
        left out, so that every batch has one shape.

        Args:
          step: of the batches of prompts, in their order.
          guard: a context around the user's code.
        """
        begin, kept = step * self.batch_size, list(self.tokens)
        count = min(self.batch_size, len(kept) - begin)
        rows = [kept[(begin + i) % len(kept)] for i in range(self.batch_size)]
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
            for each in of_models.values():
                responses += each
        return responses

    def _responses(
        self, name: Model, *, rows: list[int], count: int, greedy: bool, guard: Guard
    ) -> list[Response]:
        model, num_samples = self.models[name], 1 if greedy else self.num_samples
        asked = prompts_of(
            self.tokens, rows=rows, num_samples=num_samples, pad_id=self.start.pad_id
        )
        rollout, scores = self._drawn(
            model, asked, key=self.keys[name], greedy=greedy, guard=guard
        )
        distance, reference = None, self.models.get("reference")
        if name == "policy" and reference is not None and not greedy:
            distance = self.programs.divergence(model, reference, rollout)
        count *= num_samples
        scored = None
        if scores is not None:
            scored = episodes.scored(scores, count)
        elif self.score is not None:
            with guard():
                scored = self.score(rollout, count)
        kept = first(rollout, count)
        distance = jax.tree.map(lambda leaf: leaf[:count], processes.whole(distance))
        texts = text.read(
            kept, decode=self.start.decode, rows=self.rows, asked=self.asked
        )
        mask, tokens = np.asarray(kept.response_mask), np.asarray(kept.tokens)
        logprobs = np.asarray(kept.old_logprobs).sum(axis=1)
        of_models = [logprobs, *jax.tree.leaves(distance)]
        self._check_finite(name, of_models, what="log-probs", rows=texts.index)
        if scored is not None:
            called = self.score_called
            self._check_finite(called, [scored.scores], what="scores", rows=texts.index)
        responses = []
        for i in range(count):
            written, response = tokens[i][mask[i]], texts.responses[i]
            ref_logprob = None
            if distance is not None:
                ref_logprob = float(distance.ref_logprobs[i])
            elif name == "reference" and not greedy:
                ref_logprob = float(logprobs[i])
            responses.append(
                Response(
                    model=name,
                    decoding="greedy" if greedy else "sampled",
                    row=int(kept.index[i]),
                    sample=int(kept.sample[i]),
                    prompt=texts.prompts[i],
                    response=response,
                    length=len(written),
                    ended=int(written[-1]) in self.start.stop_ids,
                    score=None if scored is None else float(scored.scores[i]),
                    failed=scored is not None and bool(scored.failed[i]),
                    answer=None if self.answers is None else self._answer(response),
                    logprob=float(logprobs[i]),
                    ref_logprob=ref_logprob,
                    kl=None if distance is None else float(distance.exact[i]),
                    k1=None if distance is None else float(distance.k1[i]),
                    verdict=None,
                )
            )
        if scores is not None:
            return self._with_turns(responses, scores, observed=kept.observed)
        return responses

    def _drawn(
        self, model: Frozen, asked: Prompts, *, key: Array, greedy: bool, guard: Guard
    ) -> tuple[Rollout, Scores | None]:
        """Responses, or episodes with their scores."""
        if self.played is None:
            return self.programs.respond(model, asked, key=key, greedy=greedy), None
        with guard():
            return self.played(model, asked, key=key, greedy=greedy)

    def _with_turns(
        self, responses: Sequence[Response], scores: Scores, *, observed: Array
    ) -> list[Response]:
        turns, ends = np.asarray(scores.parts["turns"]), episodes.ends(scores)
        read = np.asarray(observed).sum(axis=1)
        return [
            dataclasses.replace(
                each, turns=int(turns[i]), observed=int(read[i]), end=ends[i]
            )
            for i, each in enumerate(responses)
        ]

    def _check_finite(
        self, called: str, numbers: Sequence[Any], *, what: str, rows: Any
    ) -> None:
        """Raises StopError for a number that is not, which would be in every figure."""
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
        assert self.answers is not None
        try:
            answer = self.answers.answer(response)
        except Exception as error:  # whatever the user's own code raises
            raise InputError(
                f"{self.score_called}: expected answer(response) to return a text or "
                f"None, got {type(error).__name__}: {error} for {response!r:.60}; mend "
                f"it"
            ) from error
        if answer is not None and not isinstance(answer, str):
            raise InputError(
                f"{self.score_called}: expected answer(response) to return a text or "
                f"None, got {answer!r:.60}; mend it"
            )
        return answer

    def _judged(
        self,
        policy: Sequence[Response],
        reference: Sequence[Response],
        *,
        guard: Guard,
    ) -> list[Response]:
        assert self.judge is not None
        with guard():
            verdicts = comparison.judged(
                self.judge,
                prompts=[each.prompt for each in policy],
                responses=[each.response for each in policy],
                ref_responses=[each.response for each in reference],
                rows=[self.rows[each.row] for each in policy],
                called=self.judge_called,
            )
        return [
            dataclasses.replace(each, verdict=tuple(verdict))
            for each, verdict in zip(policy, verdicts, strict=True)
        ]


def stats(responses: Sequence[Response]) -> Stats:
    """What metrics.jsonl shows of a batch: the policy's samples."""
    ours = [
        each
        for each in responses
        if (each.model, each.decoding) == ("policy", "sampled")
    ]
    numbers: dict[str, list[Any]] = {
        "objective/scores": [each.score for each in ours],
        "objective/kl": [each.k1 for each in ours],
        "objective/kl_exact": [each.kl for each in ours],
        "response/length": [each.length for each in ours],
        "response/eos_fraction": [each.ended for each in ours],
        "response/turns": [each.turns for each in ours],
    }
    if any(each.failed for each in ours):
        numbers["reward/failed"] = [each.failed for each in ours]
    means: dict[str, Any] = {
        name: (np.float32(np.sum(values)), np.float32(len(values)))
        for name, values in numbers.items()
        if values[0] is not None
    }
    return means
