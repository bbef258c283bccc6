"""Environments of the `verifiers` library, for processes to import."""

import datasets
import verifiers as vf


def exact(completion, answer, **_):
    """Whether the model's last message is the answer."""
    return float(completion[-1].content.strip() == answer)


def length(completion, **_):
    """The number of messages in the completion."""
    return len(completion)


def rows(question, answer):
    return datasets.Dataset.from_list([{"question": question, "answer": answer}] * 2)


def single():
    rubric = vf.Rubric(funcs=[exact])
    return vf.SingleTurnEnv(
        dataset=rows("2+3?", "5"), system_prompt="Be brief.", rubric=rubric
    )


class Echo(vf.MultiTurnEnv):
    """Repeats each message with its number, until it is bye."""

    async def setup_state(self, state):
        state["count"] = 0
        return state

    @vf.stop
    async def said_bye(self, state):
        last = state["trajectory"][-1:] and state["trajectory"][-1]["completion"][-1]
        return bool(last) and last.content == "bye"

    async def env_response(self, messages, state, **kwargs):
        state["count"] += 1
        content = messages[-1].content
        if content == "raise":
            raise KeyError("gold")
        answer = [{"role": "user", "content": f"{state['count']} {content}"}]
        if content == "last":
            state["final_env_response"] = answer
        return answer


def echo():
    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.1])
    return Echo(dataset=rows("Talk.", "bye"), rubric=rubric, max_turns=4)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: one.
      b: the other.
    """
    return a + b


def tools():
    return vf.ToolEnv(
        dataset=rows("2+3?", "5"), tools=[add], rubric=vf.Rubric(funcs=[exact])
    )


def grouped():
    def best(completions, **_):
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=rows("2+3?", "5"), rubric=vf.Rubric(funcs=[best]))
