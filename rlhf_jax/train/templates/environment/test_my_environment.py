"""An episode of the expert, and one of a model that knows nothing."""

from my_environment import Spelling, expert

from rlhf_jax.environments.demonstrations import play
from rlhf_jax.extensions import entry_points

ROW = {"word": "cat"}


def test_the_expert_asks_for_every_letter():
    played = play(Spelling(), ROW, expert=expert)
    assert played.turns == ["1", "c\n", "2", "a\n", "3", "t\n", "cat"]
    assert played.reward == 1.0


def test_what_is_no_letter_is_an_error_and_the_last_turn_ends_it():
    played = play(Spelling(max_turns=2), ROW, expert=lambda row, turns: "4")
    assert played.turns == ["4", "error: no such letter\n", "4"]
    assert played.reward == 0.0


def test_it_is_found_by_its_name():
    assert entry_points.load("my_environment", group="environments") is Spelling
