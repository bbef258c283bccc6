"""Requests for one response of an OpenAI-compatible server, and checked answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlhf_jax.functional import unused_ids
from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.samplers import routed_experts
from rlhf_jax.samplers.connection import SHOWN, ServerError

PATH = "/v1/completions"
# Samples the policy's own distribution, whatever the server's defaults are.
UNSHAPED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
NEVER = -100.0  # the lowest logit bias that servers accept; scales odds by e^-100


class Response(NamedTuple):
    """Tokens of a response, including a stop token, their log-probs and experts."""

    tokens: list[int]
    logprobs: list[float]  # nats
    experts: Any = None  # [P + R - 1, L, k], integers; None: not asked for


def request(
    prompt: list[int],
    *,
    model: str,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    seed: int,
    unused: Ranges = (),
) -> dict[str, Any]:
    """Makes the body of a request for one response.

    Args:
      prompt: token ids.
      model: the model's name at the server.
      seed: 0 to 2^31 - 1.
      unused: ranges of ids without a token, which the policy never draws.
    """
    forbidden = {str(i): NEVER for i in unused_ids.listed(unused)}
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # only the stop ids end a response
        "logprobs": 0,  # of the sampled token only
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "n": 1,
        "stream": False,
        **UNSHAPED,
        **({"logit_bias": forbidden} if forbidden else {}),
    }


def response(
    answer: dict[str, Any],
    *,
    request: dict[str, Any],
    model: ModelConfig,
    url: str,
    record: bool = False,
) -> Response:
    """Checks an answer and returns its response.

    Args:
      answer: to `request`.
      model: of the policy.
      url: of the server, for messages.
      record: whether to read the experts of the tokens of a mixture.

    Raises:
      ServerError: the answer lacks token ids, log-probs or experts, or does not fit the
        request or the model.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    required = _required(choice, request=request, model=model, record=record)
    for holds, expected, remedy in required:
        if not holds:
            got = str(answer if choice is None else choice)[:SHOWN]
            raise ServerError(f"{url}{PATH}: expected {expected}, got {got}; {remedy}")
    assert choice is not None
    logprobs = choice["logprobs"]["token_logprobs"]
    return Response(
        choice["token_ids"],
        [float(number) for number in logprobs],
        routed_experts.read(choice) if record else None,
    )


def _required(
    choice: Any, *, request: dict[str, Any], model: ModelConfig, record: bool
) -> Iterator[tuple[bool, str, str]]:
    """Yields (condition, what is expected, remedy); later ones need earlier ones."""
    yield isinstance(choice, dict), "one choice", "is it a server of completions?"
    tokens: Any = choice.get("token_ids")
    yield (
        _all(tokens, int),
        "token_ids in a choice, as return_token_ids asks for",
        "serve with a version that returns them (vLLM 0.10.2 or newer)",
    )
    reported = choice.get("logprobs")
    logprobs: Any = None
    if isinstance(reported, dict):
        logprobs = reported.get("token_logprobs")
    yield (
        _all(logprobs, int, float) and len(logprobs) == len(tokens),
        f"a log-prob of each of the {len(tokens)} tokens in logprobs.token_logprobs",
        "serve with log-probs (vLLM: --logprobs-mode processed_logprobs)",
    )
    yield (
        all(math.isfinite(number) and number <= 1e-3 for number in logprobs),
        "finite log-probs of at most 0",
        "see to its weights",
    )
    yield (
        choice.get("prompt_token_ids") in (None, request["prompt"]),
        f"a response to the prompt {request['prompt']}, not to"
        f" {choice.get('prompt_token_ids')}",
        "have the server change no prompt",
    )
    most, stops = request["max_tokens"], request["stop_token_ids"]
    ended = len(tokens) == most or (bool(tokens) and tokens[-1] in stops)
    inside = any(token in stops for token in tokens[:-1])
    yield (
        1 <= len(tokens) <= most and ended and not inside,
        f"{most} tokens, or fewer and the last of them one of the stop ids {stops}",
        "serve a longer context (vLLM: --max-model-len), and no other stop words",
    )
    yield (
        all(0 <= token < model.vocab_size for token in tokens),
        f"tokens of a vocabulary of {model.vocab_size}",
        "serve the model that is trained",
    )
    absent = sorted({*unused_ids.listed(model.unused_ids)} & {*tokens})
    yield (
        not absent,
        f"tokens of the tokenizer, which has none of id {', '.join(map(str, absent))},"
        " as the request's logit_bias asks for",
        "serve with a version that takes logit_bias",
    )
    if record:
        # The last token is drawn, but not run.
        run = len(request["prompt"]) + len(tokens) - 1
        yield from routed_experts.required(choice, model=model, tokens=run)


def _all(values: Any, *kinds: type) -> bool:
    return isinstance(values, list) and all(type(value) in kinds for value in values)
