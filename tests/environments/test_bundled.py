"""The bundled environments: transcripts by hand, and their experts."""

import collections
import subprocess
import sys

import pytest

from rlhf_jax import verifiers
from rlhf_jax.environments import calculator, demonstrations, guessing, rooms
from rlhf_jax.environments.calculator import Calculator
from rlhf_jax.environments.guessing import Bisection, Guessing
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.environments.protocol import Started, Turn
from rlhf_jax.environments.rooms import House, Rooms, Walker
from rlhf_jax.environments.single_turn import SingleTurn


def transcript(environment, row, *responses):
    """The environment's answer to each response."""
    _, state = environment.reset(row)
    turns = []
    for response in responses:
        turn = environment.step(state, response)
        turns.append((turn.observation, turn.reward, turn.done))
        state = turn.state
    return turns


def test_a_verifier_is_an_environment_of_one_turn():
    environment = SingleTurn(verifiers.LastInteger())
    row = {"prompt": "2+3?", "answer": 5}
    started = environment.reset(row)
    assert started == Started("2+3?", row)
    assert environment.step(started.state, "It is 5.") == Turn("", 1.0, True, None)
    assert environment.step(started.state, "It is 6.").reward == 0.0
    messages = [{"role": "user", "content": "2+3?"}]
    assert environment.reset(row | {"prompt": messages}).prompt == messages
    assert (
        SingleTurn(length).step(row | {"prompt": [*messages, *messages]}, "ab").reward
        == 902
    )


def length(prompt, response, row):
    return 100 * len(prompt) + len(response)


def test_a_calculation():
    row = {"question": "(7+5)*3", "answer": 36}
    environment = Calculator(call_cost=0.25, max_calls=4)
    assert environment.reset(row).prompt == "(7+5)*3\n"
    assert transcript(
        *(environment, row, "calc: 7+5", "so\ncalc:12 * 3 \n", "answer: 36")
    ) == [("= 12\n", -0.25, False), ("= 36\n", -0.25, False), ("", 1.0, True)]
    error = "error: expected calc: 12*7 or answer: 84\n"
    assert transcript(environment, row, "36", "calc: 1/0", "answer: 35") == [
        *[(error, -0.25, False)] * 2,
        ("", 0.0, True),
    ]
    assert transcript(environment, row, *["calc: 1+1"] * 4)[3] == ("", -0.25, True)
    assert transcript(environment, row, "calc: 999999999999*9", "calc: -3--4") == [
        ("error: overflow\n", -0.25, False),
        ("= 1\n", -0.25, False),
    ]
    # Neither a number of a million digits nor one in other letters is read.
    for response in (f"answer: {'9' * 10**6}", "answer: ３６", "answer: 36 or 37", ""):
        assert transcript(environment, row, response) == [(error, -0.25, False)]


def test_questions_are_right_and_differ():
    rows = calculator.rows(300, seed=0, steps=3)
    assert rows == calculator.rows(300, seed=0, steps=3)
    assert rows != calculator.rows(300, seed=1, steps=3)
    assert len({row["question"] for row in rows}) == 300
    for row in rows:  # Python's own arithmetic is another
        assert eval(row["question"]) == row["answer"]
    with pytest.raises(ValueError, match="got 100 of which 27 differ"):
        calculator.rows(100, seed=0, steps=1, largest=3)


def test_a_game_of_guesses():
    environment = Guessing(largest=9, max_guesses=4, guess_cost=0.25)
    row = {"number": 7}
    assert environment.reset(row).prompt == "Guess a number from 1 to 9.\n"
    assert transcript(environment, row, "5", "I say 8.", "no idea", "7") == [
        ("higher\n", 0.0, False),
        ("lower\n", 0.0, False),
        ("a number, please\n", 0.0, False),
        ("", 0.25, True),
    ]
    assert transcript(environment, row, "7") == [("", 1.0, True)]
    assert transcript(environment, row, "1", "2", "3", "4")[3] == ("", 0.0, True)
    costly = Guessing(guess_cost=0.6)
    assert transcript(costly, row, "1", "2", "7")[2] == ("", 0.0, True)


def test_numbers_to_guess_are_even():
    counts = collections.Counter(r["number"] for r in guessing.rows(100, seed=3))
    assert counts == dict.fromkeys(range(1, 21), 5)


HOUSE = House(
    {"hall": ["study", "bath"], "study": ["hall"], "bath": ["hall"]},
    *("hall", "study", "bath"),
)


def test_there_is_a_number_to_guess():
    with pytest.raises(ValueError, match=r"largest: expected at least 1 and .* got 0"):
        guessing.rows(1, seed=0, largest=0)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (Guessing, {"largest": 0}),
        (Guessing, {"largest": 10**9}),
        (Guessing, {"max_guesses": 0}),
        (Rooms, {"num_rooms": 1}),
        (Rooms, {"num_rooms": 9}),
        (Rooms, {"max_moves": 0}),
    ],
)
def test_an_environment_that_cannot_be_played_is_not_made(environment, options):
    [name] = options
    with pytest.raises(ValueError, match=f"{name}: expected at least"):
        environment(**options)


def test_processes_that_run_an_environment_load_no_jax():
    """A fresh interpreter imports the modules that its workers do."""
    names = "calculator guessing programming rooms single_turn verifiers_library"
    modules = ", ".join(f"rlhf_jax.environments.{name}" for name in names.split())
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_game_of_rooms(monkeypatch):
    monkeypatch.setattr(rooms, "build", lambda seed, num_rooms: HOUSE)
    environment = Rooms(max_moves=9, key_reward=0.5)
    prompt = environment.reset({"seed": 0}).prompt
    assert prompt.startswith("You are in the hall. Doors: study, bath. Find the key")
    played = transcript(
        *(environment, {"seed": 0}, "take key", "go cellar", "go bath", "open"),
        *("go  HALL", "go study", "take key", "go hall", "go bath"),
    )
    assert [turn[0] for turn in played] == [
        *["You cannot do that.\n"] * 2,
        "You are in the bath. Doors: hall. There is a locked door.\n",
        "It is locked.\n",
        "You are in the hall. Doors: study, bath.\n",
        "You are in the study. Doors: hall. There is a key.\n",
        "You have the key.\n",
        "You are in the hall. Doors: study, bath.\n",
        "",
    ]
    assert [turn[1] for turn in played] == [0, 0, 0, 0, 0, 0, 0.5, 0, 0]
    assert [turn[2] for turn in played] == [False] * 8 + [True]
    won = transcript(
        *(environment, {"seed": 0}, "go study", "take key", "go hall", "go bath"),
        "open",
    )
    assert won[4] == ("", 1.0, True)
    assert Walker()({"seed": 0}, []) == "go study"


def test_houses_hang_together_and_differ():
    houses = [rooms.build(seed, num_rooms=6) for seed in range(50)]
    assert len({str(house) for house in houses}) == 50
    for house in houses:
        assert sum(map(len, house.doors.values())) == 2 * 5  # a tree of six
        assert len({house.start, house.key, house.exit}) == 3
    with pytest.raises(ValueError, match=r"num_rooms: .* at most 8, got 9"):
        rooms.build(0, num_rooms=9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "rows", "expert", "least"),
    [
        (Calculator(), calculator.rows(40, seed=0, steps=4), calculator.expert, 1.0),
        (Guessing(), guessing.rows(40, seed=0), Bisection(), 0.6),
        (Rooms(), rooms.rows(40, seed=0), Walker(), 1.0),
        (Rooms(num_rooms=2), rooms.rows(9, seed=0), Walker(num_rooms=2), 1.0),
    ],
    ids=["calculator", "guessing", "rooms", "two rooms"],
)
def test_experts_do_what_is_asked(environment, rows, expert, least):
    """In a process, repeating a step from a state gives the same answer."""
    for row in rows:
        played = demonstrations.play(environment, row, expert=expert)
        assert least <= played.reward <= 1.0
    demonstrated = demonstrations.demonstrations(environment, rows, expert=expert)
    assert demonstrated[-1] == {"prompt": played.prompt, "turns": played.turns}
    with EnvironmentPool(environment, num_workers=1) as pool:
        [begun] = pool.reset(rows[-1:])
        assert begun.prompt == played.prompt
        state, reward = begun.state, 0.0
        for place in range(0, len(played.turns), 2):
            answers = [pool.step(state, played.turns[place]).result() for _ in range(2)]
            assert answers[0] == answers[1]
            state, reward = answers[0].state, reward + answers[0].reward
            observation = played.turns[place + 1 : place + 2]
            assert [answers[0].observation] == (observation or [""])
    assert reward == pytest.approx(played.reward)


def test_an_expert_that_does_not_end():
    class Endless(Guessing):
        def step(self, state, response):
            return Turn("", 0.0, False, state)

    with pytest.raises(ValueError, match="expected an episode that ends, got 1000"):
        demonstrations.play(Endless(), {"number": 3}, expert=lambda row, turns: "1")
