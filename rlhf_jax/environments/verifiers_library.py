"""Runs environments of the `verifiers` library: `MultiTurnEnv` and its subclasses.

    def load():                                     at the top of a module of yours
        return verifiers.load_environment("wordle")

    environment = VerifiersLibrary(load)
    rows = dataset(load)                            {"prompt": [...], "answer": ...}

Needs the extra `verifiers`, a version before 0.4, which removed these classes. An
episode follows the library's own `rollout`: stop conditions, `setup_state`,
`env_response`, and the score of the rubric once at the end.

The library's models answer with structured tool calls, ours with text. So the prompt of
a `ToolEnv` explains how to write a call, and calls are read from the text, in the
format of Qwen and Hermes:

    <tool_call>⏎{"name": "add", "arguments": {"a": 1, "b": 2}}⏎</tool_call>
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import importlib
import json
import re
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from rlhf_jax.environments.protocol import Message, Row, Started, Turn
from rlhf_jax.runs import parsing

Load = Callable[[], Any]  # -> verifiers.Environment

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
TOOLS = (
    "# Tools\n\nYou may call functions. Their signatures, a JSON object a line:\n{}\n\n"
    "A call is a JSON object with a name and arguments within <tool_call></tool_call>:"
    '\n<tool_call>\n{{"name": ..., "arguments": {{...}}}}\n</tool_call>'
)
# Entries of the state that are made anew, or only serve the library's own client.
_LEFT_OUT = ("client", "usage", "usage_tracker")


@dataclasses.dataclass(frozen=True)
class VerifiersLibrary:
    """Rows of the library's data set; the reward at the end is its rubric's score."""

    load: Load
    """Function at the top level of a module that makes the library's environment."""
    tool_role: str = "tool"
    """Role of tool results in the chat template; "user" for templates without tools."""

    def reset(self, row: Row) -> Started:
        """Returns the row's prompt with the signatures of the tools.

        Raises:
          ValueError: the rubric scores groups, or the prompt is not text.
        """
        environment = _environment(self.load)
        if environment.requires_group_rollouts:
            raise ValueError(
                "expected a rubric that scores an episode, got one that scores groups;"
                " remove its group rewards"
            )
        state = asyncio.run(_begun(environment, row))
        prompt = [self._message(message) for message in state["prompt"]]
        if state["tool_defs"]:
            system = TOOLS.format("\n".join(map(_signature, state["tool_defs"])))
            if prompt[0]["role"] == "system":
                first = prompt.pop(0)["content"]
                system = f"{first}\n\n{system}"
            prompt.insert(0, {"role": "system", "content": system})
        return Started(prompt, _bare(state))

    def step(self, state: dict[str, Any], response: str) -> Turn:
        """Returns the environment's answer to a response, or the rubric's score."""
        environment = _environment(self.load)
        return asyncio.run(self._step(environment, copy.deepcopy(state), response))

    async def _step(self, environment: Any, state: Any, response: str) -> Turn:
        library = _library()
        environment._get_usage_tracker(state, create_if_missing=True)
        prompt = state["asked"]
        message = _assistant(response, tools=bool(state["tool_defs"]))
        step = library.types.TrajectoryStep(
            prompt=prompt,
            completion=[message],
            response=None,
            tokens=None,
            reward=None,
            advantage=None,
            is_truncated=False,
            trajectory_id=state["trajectory_id"],
            extras={},
        )
        await environment.add_trajectory_step(state, step)
        if not await environment.is_completed(state):
            messages = await environment.get_prompt_messages(state)
            messages = library.utils.message_utils.maybe_normalize_messages(
                messages, field_name="prompt_messages"
            )
            if state.get("final_env_response") is None:
                state["asked"] = messages
                new_messages = messages[len(prompt) + 1 :]
                observation = [self._message(message) for message in new_messages]
                return Turn(observation, 0.0, False, _bare(state))
            await environment.is_completed(state)  # records why the episode is over
        await environment.cleanup(state)
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return Turn("", state["reward"], True, None)

    def _message(self, message: Any) -> Message:
        if isinstance(message, dict):
            role, content = message["role"], message["content"]
        else:
            role, content = message.role, message.content
        if not isinstance(content, str):
            raise ValueError(
                f"expected messages of text, got {content!r:.60}; images and sounds"
                " have no tokens here"
            )
        role = {"text": "user", "tool": self.tool_role}.get(role, role)
        return {"role": role, "content": content}


def dataset(load: Load, *, num_rows: int = -1, seed: int | None = None) -> list[Row]:
    """Returns rows of the library's training data: prompt, answer and other fields.

    Args:
      num_rows: number of rows; -1 is all.
      seed: of a shuffle beforehand; None does not shuffle.
    """
    dataset = _environment(load).get_dataset(n=num_rows, seed=seed)
    return [dict(row) for row in dataset.to_list()]


@functools.lru_cache(maxsize=4)
def _environment(load: Load) -> Any:
    """Makes the library's environment, but keeps this process's signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (2, 15)}
    try:
        return load()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@functools.cache
def _library() -> Any:
    library = importlib.import_module("verifiers")
    for module in ("types", "utils.message_utils", "clients"):
        importlib.import_module(f"verifiers.{module}")
    return library


async def _begun(environment: Any, row: Row) -> Any:
    config = _library().types.ClientConfig(api_base_url="http://127.0.0.1:9")
    input_row: dict[str, Any] = {"example_id": 0, **row}
    state = await environment.init_state(input_row, config, "policy", None)
    made: Coroutine[Any, Any, Any] = environment.setup_state(state)
    state = await made or state
    messages = await environment.get_prompt_messages(state)
    state["asked"] = _library().utils.message_utils.maybe_normalize_messages(
        messages, field_name="prompt_messages"
    )
    state["prompt"] = state["asked"]
    return state


def _bare(state: Any) -> Any:
    """Removes entries that cannot be sent to another process."""
    for name in _LEFT_OUT:
        state.pop(name, None)
    return state


def _assistant(text: str, *, tools: bool) -> Any:
    """Makes the library's message of a response, with its tool calls.

    A call that is not a JSON object becomes a call without a name, with the text as
    arguments, which the library reports as an error.
    """
    types = _library().types
    calls = []
    for place, call in enumerate(_CALL.findall(text) if tools else ()):
        name, arguments = "", call.strip()
        try:
            read = parsing.of_json(call, parsing.Source("the response", "a call"))
            name, arguments = str(read["name"]), json.dumps(read.get("arguments", {}))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # keep the text as arguments of a nameless call
        calls.append(types.ToolCall(id=f"call_{place}", name=name, arguments=arguments))
    return types.AssistantMessage(content=text, tool_calls=calls or None)


def _signature(tool: Any) -> str:
    return json.dumps(
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
    )
