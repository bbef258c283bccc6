"""The host's part of a rollout of episodes: who draws, who waits, who reads.

    device   advance ........ read advance ............ read advance
    pool          step(b's turn) ....└ answer     step(a's turn) ...

A finished turn goes to the pool at once, and the other places draw on while it is
answered. An episode that ends leaves its place to the next one, and so does one whose
answer takes long (`places`). The rollout is done when all of its episodes are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.environments import answers, finished
from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.device import Device
from rlhf_jax.environments.finished import Finished
from rlhf_jax.environments.places import NOWHERE, Episode, Places
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.verification.worker import shown

HostArray = Any
ENDED = 8  # the host looks when one turn in so many has ended
REJECTED = "returned an observation that cannot be encoded"
POLL = 0.05  # seconds between looks at the clock while nothing else is to be done


class Limits(NamedTuple):
    """Of an episode; `Scores.parts` counts the episodes that one of them ended."""

    tokens: int  # R, of all turns and observations
    turn_tokens: int  # of a turn; one without a stop token by then is the last
    turns: int
    seconds: float | None = None  # of all episodes of a rollout; None waits for them


@dataclasses.dataclass(kw_only=True)
class Play:
    """An episode from every row of prompts, once `run` is called."""

    device: Device  # with places that are free
    prompts: Prompts  # [B, P], of NumPy arrays
    states: Sequence[bytes]  # of the environment, by `prompts.index`
    keys: HostArray  # u32[B, ...], data of the rows' keys
    pool: EnvironmentPool  # answers turns
    encoder: TurnEncoder  # of observations
    decode: Callable[[list[int]], str]  # of a turn, for the environment alone
    stop_ids: tuple[int, ...]  # tokens that end a turn
    limits: Limits

    def __post_init__(self) -> None:
        self._finished = finished.none(
            self.prompts, size=self.limits.tokens, counts=self.pool.counts
        )
        self._places = Places(self.device)
        self._live: list[Episode] = []
        self._failures: list[Answer] = []
        self._view: Episodes | None = None

    def run(self, *, steps: int = 32) -> Finished:
        """Plays until all have ended, or the time is over.

        Args:
          steps: tokens that are drawn before the host looks for answers.

        Returns:
          Episodes[B, P + R] in the order of the prompts. One that a limit or a failure
          ended keeps its tokens and rewards up to there.

        Raises:
          StopError: the environment failed, and the pool is to stop then.
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
                # All of it first: a step draws as many tokens as there are places.
                while self._read():
                    pass
                self._check_none_is_forgotten()
                if any(episode.drawing for episode in self._live):
                    self._advance(steps)
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
            row, self._places.free.pop(), self.states[index], tokens, len(tokens)
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
        """The next columns of what some episodes are to read; False if none are."""
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
        """Copies what has been read of a prompt, but for its last columns."""
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

    def _check_none_is_forgotten(self) -> None:
        """RuntimeError if an episode would wait for ever: a mistake of this module."""
        rows = [
            episode.row
            for episode in self._live
            if not (episode.drawing or episode.future or episode.returns)
        ]
        if rows:
            raise RuntimeError(
                "expected every episode to draw or to wait once all have read, got"
                f" rows {rows} that do neither; report this mistake"
            )

    def _advance(self, steps: int) -> None:
        """Draws on, and hands the turns that ended to the pool."""
        drawing = [episode for episode in self._live if episode.drawing]
        count = np.zeros(self.device.shares, np.int32)
        for episode in drawing:
            count[self._places.share(episode)] += 1
        until = np.maximum(count - np.maximum(1, count // ENDED), 0)
        self._view = view = self.device.advance(until=until, steps=steps)
        for episode in drawing:
            if view.drawing[episode.place]:
                continue
            start, end = episode.prompt + episode.size, view.length[episode.place]
            tokens = view.tokens[episode.place, start:end].tolist()
            episode.drawing = False
            episode.size = episode.turns_size = int(end) - episode.prompt
            episode.stopped = tokens[-1] in self.stop_ids
            response = self.decode(tokens[:-1] if episode.stopped else tokens)
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
            if answer.why:
                self._fail(episode, answer)
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
        room = self.limits.tokens - episode.size - 1  # a token at least is drawn
        try:
            observed = self.encoder.observation(
                answer.observation, where=where, room=room
            )
        except Exception as error:  # the template's, or a bare one of `tokenizers`
            why = f"{REJECTED}: {shown(error)}"
            self._fail(episode, answers.failed(why, where=where))
            return
        if observed is None:
            self._end(episode, "out_of_room")
            return
        episode.state, episode.reading = answer.state, observed  # it may be of nothing

    def _fail(self, episode: Episode, answer: Answer) -> None:
        """Ends an episode whose environment failed; its last turn is worth nothing."""
        self.pool.require(answer)
        self._failures.append(answer)
        episode.rewards[-1] = (episode.rewards[-1][0], 0.0)
        self._end(episode, "timed_out" if answer.timed_out else "failed")

    def _end_late(self, waiting: list[int]) -> None:
        """Ends all episodes as they are; those that have not begun stay empty."""
        nobody = np.zeros(self.device.shares, np.int32)
        self._view = self.device.advance(until=nobody, steps=0)
        for episode in list(self._live):
            if episode.drawing:
                length = int(self._view.length[episode.place])
                episode.turns_size = length - episode.prompt
            self._end(episode, "late")
        self._finished.parts["late"][waiting] = 1.0

    def _end(self, episode: Episode, why: str | None) -> None:
        """Keeps what the episode has come to, and frees its place."""
        if self._view is not None and episode.turns_size:
            parked = episode.parked
            finished.keep(
                self._finished,
                self._view if parked is None else parked,
                episode.place if parked is None else (),
                row=episode.row,
                start=episode.prompt,
                size=episode.turns_size,
                rewards=episode.rewards,
            )
        if why is not None:
            self._finished.parts[why][episode.row] = 1.0
        if episode.future is not None:
            episode.future.cancel()
        self._live.remove(episode)
        self._places.leave(episode)
