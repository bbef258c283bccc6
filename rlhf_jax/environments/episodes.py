"""The host's loop of a rollout of episodes.

    device   advance ........ read advance ............ read advance
    pool          step(b's turn) ....└ answer     step(a's turn) ...

A finished turn goes to the pool at once, and the other places keep drawing until its
answer arrives. An episode gives up its place when it ends, or when its answer takes
long (`places`). The rollout is done when all of its episodes are.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.environments import finished
from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.finished import Finished
from rlhf_jax.environments.places import NOWHERE, Episode, Places
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.verification.worker import Failed, shown

if TYPE_CHECKING:
    from rlhf_jax.environments.sampler import EpisodeSampler

HostArray = Any
ENDED = 8  # the device returns once a fraction 1 / ENDED of the turns has ended
REJECTED = "returned an observation that cannot be encoded"
STEPS = 32  # the most tokens drawn before the host checks for answers
POLL = 0.05  # seconds between checks of the clock while the host only waits


class Limits(NamedTuple):
    """Limits of an episode; `Scores.parts` counts the episodes that each has ended."""

    tokens: int  # R, of all turns and observations
    turn_tokens: int  # of a turn; a turn without a stop token by then is the last
    turns: int
    seconds: float | None = None  # for all episodes of a rollout; None is no limit


class Play:
    """Plays an episode from every row of prompts; `run` starts it."""

    def __init__(
        self, sampler: EpisodeSampler, *, prompts: Prompts, keys: HostArray
    ) -> None:
        """Draws nothing yet.

        Args:
          sampler: its programs have all places free.
          prompts: Prompts[B, P], of NumPy arrays.
          keys: u32[B, ...], key data of the rows.
        """
        self.device, self.pool = sampler.programs, sampler.pool
        self.limits, self._sampler = sampler.limits, sampler
        self.prompts, self.keys = prompts, keys
        self._finished = finished.none(
            prompts,
            size=self.limits.tokens,
            counts=self.pool.counts,
            record=self.device.record,
        )
        self._places = Places(self.device)
        self._live: list[Episode] = []
        self._failures: list[Failed] = []
        self._view: Episodes | None = None

    def run(self) -> Finished:
        """Plays until all episodes have ended or the time is over.

        Returns:
          Rows [B, P + R] in the order of the prompts. An episode that a limit or a
          failure ended keeps its tokens and rewards so far.

        Raises:
          StopError: the environment failed, and the pool's `on_failure` is "stop".
        """
        began, seconds = time.monotonic(), self.limits.seconds
        waiting = list(range(len(self.prompts.index)))[::-1]
        try:
            while self._live or waiting:
                if seconds is not None and time.monotonic() - began > seconds:
                    self._end_late(waiting)
                    break
                self._take_answers()
                self._places.exchange(self._live, beginning=len(waiting))
                while self._places.free and waiting:
                    self._begin(waiting.pop())
                # Read everything first: a step draws a token in every place at once.
                while self._read():
                    pass
                forgotten = [
                    episode.row
                    for episode in self._live
                    if not (episode.drawing or episode.future or episode.returns)
                ]
                if forgotten:  # a mistake here, which would loop without end
                    raise RuntimeError(
                        "expected every episode to draw or to wait once all have read,"
                        f" got rows {forgotten} that do neither; report this mistake"
                    )
                if any(episode.drawing for episode in self._live):
                    self._advance()
                elif self._live:
                    answers = [
                        episode.future for episode in self._live if episode.future
                    ]
                    concurrent.futures.wait(
                        answers, timeout=POLL, return_when="FIRST_COMPLETED"
                    )
        finally:
            for episode in self._live:
                if episode.future is not None:
                    episode.future.cancel()
        self.pool.warn(self._failures, num_episodes=len(self.prompts.index))
        return self._finished

    def _begin(self, row: int) -> None:
        tokens = self.prompts.tokens[row][self.prompts.mask[row]].tolist()
        index = int(self.prompts.index[row])
        episode = Episode(
            row,
            self._places.free.pop(),
            self._sampler.states[index],
            tokens,
            len(tokens),
        )
        if len(tokens) > self.device.chunk:
            episode.first = next(
                (
                    candidate
                    for candidate in self._live
                    if candidate.begins
                    and candidate.first is None
                    and self._places.share(candidate) == self._places.share(episode)
                    and int(self.prompts.index[candidate.row]) == index
                ),
                None,
            )
        self._live.append(episode)

    def _read(self) -> bool:
        """Reads the next columns of prompts and observations; False if none remain."""
        size, chunk = self.device.arriving, self.device.chunk
        reading = self._places.slots(
            episode
            for episode in self._live
            if episode.reading is not None
            and episode.first is None
            and episode.place != NOWHERE
        )
        if not reading:
            return False
        of_row = np.zeros(size, np.int32)
        arrays: dict[str, HostArray] = {
            "place": np.full(size, self.device.places, np.int32),
            "tokens": np.zeros((size, chunk), np.int32),
            **{name: np.zeros(size, np.int32) for name in ("count", "turn")},
            **{name: np.zeros(size, bool) for name in ("begins", "prompt", "draws")},
        }
        for at, episode in reading:
            tokens = episode.reading or []
            part, episode.reading = tokens[:chunk], tokens[chunk:] or None
            of_row[at], arrays["place"][at] = episode.row, episode.place
            arrays["tokens"][at, : len(part)] = part
            arrays["count"][at] = len(part)
            arrays["begins"][at], episode.begins = episode.begins, False
            of_prompt = not episode.rewards
            arrays["prompt"][at] = of_prompt
            if not of_prompt:
                episode.size += len(part)
            arrays["draws"][at] = episode.drawing = episode.reading is None
            room = self.limits.tokens - episode.size
            arrays["turn"][at] = min(self.limits.turn_tokens, room)
        self.device.read(Arrivals(**arrays, keys=self.keys[of_row]))
        self._copy()
        return True

    def _copy(self) -> None:
        """Copies shared prompts that have been read up to their last columns."""
        size, chunk = self.device.arriving, self.device.chunk
        while ready := self._places.slots(
            episode
            for episode in self._live
            if episode.first is not None
            and not episode.first.begins
            and len(episode.first.reading or ()) <= chunk
        ):
            source, of_row = np.zeros((2, size), np.int32)
            place = np.full(size, self.device.places, np.int32)
            for at, episode in ready:
                assert episode.first is not None
                source[at], of_row[at] = episode.first.place, episode.row
                place[at], episode.begins = episode.place, False
                episode.reading, episode.first = episode.first.reading, None
            self.device.copy(source=source, place=place, keys=self.keys[of_row])

    def _advance(self) -> None:
        """Draws tokens, and sends the turns that ended to the pool."""
        drawing = [episode for episode in self._live if episode.drawing]
        count = np.zeros(self.device.shares, np.int32)
        for episode in drawing:
            count[self._places.share(episode)] += 1
        until = np.maximum(count - np.maximum(1, count // ENDED), 0)
        self._view = view = self.device.advance(until=until, steps=STEPS)
        for episode in drawing:
            if view.drawing[episode.place]:
                continue
            start, end = episode.prompt + episode.size, view.length[episode.place]
            tokens = view.tokens[episode.place, start:end].tolist()
            episode.drawing = False
            episode.size = episode.turns_size = int(end) - episode.prompt
            episode.stopped = tokens[-1] in self.device.stop_ids
            response = self._sampler.decode(tokens[:-1] if episode.stopped else tokens)
            where = f"row {int(self.prompts.index[episode.row])}"
            episode.future = self.pool.step(episode.state, response, where=where)
            episode.submitted = time.monotonic()

    def _take_answers(self) -> None:
        for episode in list(self._live):
            if episode.future is None or not episode.future.done():
                continue
            answer, episode.future = episode.future.result(), None
            episode.rewards.append((episode.size - 1, answer.reward))
            for name, count in zip(self.pool.counts, answer.counts, strict=False):
                self._finished.parts[name][episode.row] += count
            if answer.failure is not None:
                self._fail(episode, answer.failure)
            elif answer.done:
                self._end(episode, None if episode.stopped else "truncated")
            elif not episode.stopped:
                self._end(episode, "truncated")
            elif len(episode.rewards) >= self.limits.turns:
                self._end(episode, "out_of_turns")
            else:
                self._go_on(episode, answer)

    def _go_on(self, episode: Episode, answer: Answer) -> None:
        where = f"an observation of row {int(self.prompts.index[episode.row])}"
        room = self.limits.tokens - episode.size - 1  # room for one sampled token
        try:
            observed = self._sampler.encoder.observation(
                answer.observation, where=where, room=room
            )
        except Exception as error:  # the template and `tokenizers` may raise anything
            why = f"{REJECTED}: {shown(error)}"
            self._fail(episode, Failed(why, where=where))
            return
        if observed is None:
            self._end(episode, "out_of_room")
            return
        episode.state, episode.reading = answer.state, observed  # [] is read, too

    def _fail(self, episode: Episode, failure: Failed) -> None:
        """Ends an episode whose environment failed; its last turn has reward 0."""
        self.pool.require(failure)
        self._failures.append(failure)
        episode.rewards[-1] = (episode.rewards[-1][0], 0.0)
        self._end(episode, "timed_out" if failure.timed_out else "failed")

    def _end_late(self, waiting: list[int]) -> None:
        """Ends all episodes as they are; episodes that have not begun stay empty."""
        nobody = np.zeros(self.device.shares, np.int32)
        self._view = self.device.advance(until=nobody, steps=0)
        for episode in list(self._live):
            if episode.drawing:
                length = int(self._view.length[episode.place])
                episode.turns_size = length - episode.prompt
            self._end(episode, "late")
        self._finished.parts["late"][waiting] = 1.0

    def _end(self, episode: Episode, why: str | None) -> None:
        """Writes the episode into its row and frees its place."""
        if self._view is not None and episode.turns_size:
            parked, experts = episode.parked, None
            if parked is not None:
                experts = parked.experts
            elif self.device.record is not None:
                experts = self.device.experts(place=episode.place)
            self._finished.keep(
                episode,
                self._view if parked is None else parked,
                episode.place if parked is None else (),
                experts=experts,
            )
        if why is not None:
            self._finished.parts[why][episode.row] = 1.0
        if episode.future is not None:
            episode.future.cancel()
        self._live.remove(episode)
        self._places.leave(episode)
