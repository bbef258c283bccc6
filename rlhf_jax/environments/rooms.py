"""A text game: rooms in a house, a key somewhere, and a door that it opens.

    prompt        You are in the hall. Doors: kitchen, study. Find the key, open the...
    response      go kitchen
    observation   You are in the kitchen. Doors: hall. There is a key.⏎
    response      take key
    observation   You have the key.⏎
    response      go hall
    ...
    response      open                              1 in the room with the locked door

The house is drawn from the row's `seed` alone, so a row is a game. Worker processes
import this module: it loads no JAX.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import NamedTuple

from rlhf_jax.environments.protocol import Row, Started, Turn, Written
from rlhf_jax.functional.errors import expect_between

NAMES = ("hall", "kitchen", "study", "cellar", "attic", "garden", "bath", "shed")


class House(NamedTuple):
    """A tree of rooms."""

    doors: dict[str, list[str]]
    start: str
    key: str
    """The room where the key lies at first."""
    exit: str
    """The room with the locked door."""


class State(NamedTuple):
    """The state of a game."""

    house: House
    room: str
    has_key: bool
    moves: int


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Rows with the `seed` of a house; the reward is 1 for opening the locked door."""

    num_rooms: int = 5
    """Rooms of a house, 2 to 8."""
    max_moves: int = 20
    """Moves after which the game ends without a reward."""
    key_reward: float = 0.0
    """Reward of the turn that takes the key."""

    def __post_init__(self) -> None:
        expect_between(2, len(NAMES), num_rooms=self.num_rooms)
        expect_between(1, 10**9, max_moves=self.max_moves)

    def reset(self, row: Row) -> Started:
        """Returns the first room and the task."""
        house = build(int(row["seed"]), num_rooms=self.num_rooms)
        state = State(house, house.start, False, 0)
        return Started(
            f"{_look(state)} Find the key and open the locked door. Say: go ROOM, take"
            " key, open.\n",
            state,
        )

    def step(self, state: State, response: str) -> Turn:
        """Makes one move; returns a description of the room or an error."""
        command = " ".join(response.split()).lower()
        state = state._replace(moves=state.moves + 1)
        house, reward = state.house, 0.0
        word, _, rest = command.partition(" ")
        if word == "go" and rest in house.doors[state.room]:
            state = state._replace(room=rest)
            observation = _look(state)
        elif command == "take key" and state.room == house.key and not state.has_key:
            state = state._replace(has_key=True)
            observation, reward = "You have the key.", self.key_reward
        elif command == "open" and state.room == house.exit and state.has_key:
            return Turn("", 1.0, True, None)
        elif command == "open" and state.room == house.exit:
            observation = "It is locked."
        else:
            observation = "You cannot do that."
        done = state.moves >= self.max_moves
        return Turn("" if done else f"{observation}\n", reward, done, state)


def build(seed: int, *, num_rooms: int) -> House:
    """Draws a house: each room after the first has a door to an earlier one."""
    expect_between(2, len(NAMES), num_rooms=num_rooms)
    draw = random.Random(seed)
    rooms = draw.sample(NAMES, num_rooms)
    doors: dict[str, list[str]] = {room: [] for room in rooms}
    for place, room in enumerate(rooms[1:], start=1):
        other = draw.choice(rooms[:place])
        doors[room].append(other)
        doors[other].append(room)
    key, way_out = draw.sample(rooms[1:], 2) if num_rooms > 2 else (rooms[1], rooms[0])
    return House(doors, rooms[0], key, way_out)


def rows(count: int, *, seed: int) -> list[Row]:
    """Makes games, all with different seeds."""
    return [{"seed": seed * 1_000_003 + place} for place in range(count)]


@dataclasses.dataclass(frozen=True)
class Walker:
    """The expert: the shortest way to the key, and from there to the locked door."""

    num_rooms: int = 5
    """As in the environment."""

    def __call__(self, row: Row, turns: list[Written]) -> str:
        house = build(int(row["seed"]), num_rooms=self.num_rooms)
        moves = [f"go {room}" for room in _way(house, house.start, house.key)]
        moves.append("take key")
        moves += [f"go {room}" for room in _way(house, house.key, house.exit)]
        return [*moves, "open"][len(turns) // 2]


def _look(state: State) -> str:
    house = state.house
    scene = f"You are in the {state.room}. Doors: {', '.join(house.doors[state.room])}."
    if state.room == house.key and not state.has_key:
        scene += " There is a key."
    if state.room == house.exit:
        scene += " There is a locked door."
    return scene


def _way(house: House, start: str, end: str) -> list[str]:
    """Lists the rooms on the shortest way, without the first."""
    before = {start: start}
    waiting = collections.deque([start])
    while end not in before:
        room = waiting.popleft()
        for other in house.doors[room]:
            if other not in before:
                before[other] = room
                waiting.append(other)
    way: list[str] = []
    while end != start:
        way.insert(0, end)
        end = before[end]
    return way
