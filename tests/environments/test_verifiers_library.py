"""Environments of the `verifiers` library, against the package itself."""

import signal

import pytest

pytest.importorskip("verifiers.legacy", reason="extra verifiers")
pytest.importorskip("datasets", reason="of the extra verifiers")

import toy_verifiers

from rlhf_jax.environments import verifiers_library
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.environments.verifiers_library import VerifiersLibrary

pytestmark = [
    pytest.mark.slow,  # the library takes seconds to import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def play(load, *responses, **options):
    """(prompt, answers) by a pool's process."""
    [row, _] = verifiers_library.dataset(load)
    with EnvironmentPool(
        VerifiersLibrary(load, **options), num_workers=1, timeout=60.0
    ) as pool:
        [begun] = pool.reset([row])
        answers, state = [], begun.state
        for response in responses:
            answers.append(pool.step(state, response).result())
            state = answers[-1].state
    return begun.prompt, answers


def test_a_single_turn():
    before = signal.getsignal(signal.SIGTERM)
    prompt, [right] = play(toy_verifiers.single, " 5 ")
    assert signal.getsignal(signal.SIGTERM) is before
    assert prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3?"},
    ]
    assert (right.reward, right.done, right.failure) == (1.0, True, None)
    assert play(toy_verifiers.single, "6")[1][0].reward == 0.0


def test_several_turns_with_a_state_of_their_own():
    prompt, answers = play(toy_verifiers.echo, "hi", "so", "bye")
    assert prompt == [{"role": "user", "content": "Talk."}]
    assert [answer.failure for answer in answers] == [None] * 3
    assert answers[0].observation == [{"role": "user", "content": "1 hi"}]
    assert answers[1].observation == [{"role": "user", "content": "2 so"}]
    assert answers[2].reward == pytest.approx(1 + 0.1 * 5)
    assert [answer.done for answer in answers] == [False, False, True]


def test_its_stop_conditions_end_an_episode():
    """Stops at the number of turns, and after the environment's last answer."""
    _, answers = play(toy_verifiers.echo, *"abcd")
    assert [answer.done for answer in answers] == [False] * 3 + [True]
    assert answers[3].reward == pytest.approx(0.1 * 7)
    _, answers = play(toy_verifiers.echo, "a", "last")
    assert answers[1].done
    assert answers[1].reward == pytest.approx(0.1 * 4)


def test_an_environment_that_raises_is_a_failure():
    _, [answer] = play(toy_verifiers.echo, "raise")
    assert answer.failure.why.startswith("raised KeyError: 'gold' for response")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def test_tools_are_called_by_text():
    prompt, answers = play(toy_verifiers.tools, f"Well. {CALL}\n{CALL}", "5")
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert '"name": "add"' in prompt[0]["content"]
    assert answers[0].observation == [{"role": "tool", "content": "5"}] * 2
    assert (answers[1].reward, answers[1].done) == (1.0, True)


def test_calls_that_are_none_are_answered_with_the_error():
    bad = ["<tool_call>add 2 3</tool_call>", '<tool_call>{"name": "mul"}</tool_call>']
    _, answers = play(toy_verifiers.tools, *bad, tool_role="user")
    assert [answer.failure for answer in answers] == [None, None]
    assert "Expecting value" in answers[0].observation[0]["content"]
    assert answers[1].observation == [{"role": "user", "content": "'mul'"}]


def test_rewards_of_groups_have_no_episode():
    with pytest.raises(ValueError, match="expected a rubric that scores an episode"):
        VerifiersLibrary(toy_verifiers.grouped).reset({"prompt": []})
