"""Samples with a server: OpenAI-compatible completions, weights as safetensors.

    hand_over   FOLDER/version-3 ──reload_weights──> server, prefix cache emptied
                responses to fixed prompts: its log-probs against the trainer's
    draw        a request for each row ──> token ids, log-probs, experts (R3)

The server is vLLM's in its development mode (VLLM_SERVER_DEV_MODE=1), whose
`/collective_rpc` reloads weights from a path. The server must be able to read that path
itself, so it is on this machine or a shared file system. Requests are seeded by key and
row, but the server need not give equal responses to equal requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import decode
from rlhf_jax.samplers import (
    TIMEOUT,
    completions,
    routed_experts,
    served,
    weight_files,
)
from rlhf_jax.samplers.agreement import Agreement
from rlhf_jax.samplers.connection import (
    Connection,
    Overloaded,
    ServerError,
    Unreachable,
)
from rlhf_jax.samplers.protocol import Drawn, Retries

Array = jax.Array
Params = Any
Result = TypeVar("Result")
CONNECTIONS = 64  # requests at a time
HOW = "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs"
# Routed experts need the model runner V2, which vLLM does not choose everywhere.
RECORDING = f"VLLM_USE_V2_MODEL_RUNNER=1 {HOW} {routed_experts.FLAG}"


class ServerSampler(contextlib.AbstractContextManager[Any]):
    """A server at an address; a context manager that ends requests, not the server."""

    def __init__(
        self,
        url: str,
        recipe: PolicyGradient,
        *,
        tolerance: float,
        mesh: Mesh | None = None,
        model: str | None = None,
        weights: Path | None = None,
        timeout: float = TIMEOUT,
        retries: Retries | None = None,
        save: Callable[..., None] = served.save,
    ) -> None:
        """Checks that the server has the model, and records experts to replay.

        Args:
          url: http://HOST:PORT.
          recipe: without adapters; responses end at its stop ids.
          tolerance: the largest mean distance of a response's log-probs from the
            trainer's after a hand-over, nats per token.
          mesh: of the policy; None is one device.
          model: the model's name at the server; None is the only one there.
          weights: folder that the server can read; None is the system's temporary
            folder.
          timeout: seconds per answer.
          retries: repeats requests that an overloaded server did not answer; None is
            the default.
          save: writes the checkpoint of a hand-over.

        Raises:
          InputError: the server does not answer or lacks the model, its context is
            shorter than a response, it returns no experts to replay, or the folder is
            not writable.
        """
        checks.positive(timeout=timeout, tolerance=tolerance)
        self._recipe, self._save = recipe, save
        self._retries = Retries() if retries is None else retries
        mesh = ONE_DEVICE.make() if mesh is None else mesh
        self._agreement = Agreement(recipe, tolerance=tolerance, mesh=mesh)
        self._server = Connection(url, timeout=timeout)
        self._record = recipe.routing_record
        self._how = HOW if self._record is None else RECORDING
        try:
            self._model = self._served(model)
            if self._record is not None:  # refused now, before any weights are sent
                prompt = np.asarray(self._agreement.prompts.tokens)[0, -1:]
                self._respond(self._request(prompt, max_new_tokens=1, seed=0))
        except ServerError as error:
            raise InputError(
                f"--sampler {error}. Expected an OpenAI-compatible server, with vLLM: "
                f"{self._how}"
            ) from error
        self._folder = weight_files.HandOverFolder(weights)
        # Concurrent requests, so that the server can batch them.
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="draws")
        self._seeds = jax.jit(_seeds)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def hand_over(self, params: Params, *, version: int) -> float:
        """Has the server load these parameters, and compares its log-probs.

        Raises:
          ServerError: the server cannot load them, or does not answer.
          SelfCheckError: the server samples with other parameters.
          WriteError: the checkpoint cannot be written.
        """
        recipe = self._recipe
        with self._folder.version(version) as path:
            self._save(path, recipe.model, params, stop_ids=recipe.stop_ids)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            try:
                self._server.post("/collective_rpc", body)
            except ServerError as error:
                if isinstance(error, Unreachable):
                    raise
                raise type(error)(
                    f"{error}. It was to reload the weights in {path}: serve this "
                    f"model with {self._how}, where that folder can be read "
                    f"(weights= of --sampler), and see what it printed"
                ) from error
        # Otherwise keys and values of the old weights would be reused for prompts.
        emptied = self._server.post("/reset_prefix_cache", {})
        if emptied.get("success") is False:
            raise ServerError(
                f"{self._server.url}/reset_prefix_cache: expected an empty prefix "
                f"cache, got {emptied}, as other requests are running; let nothing "
                f"else use the server"
            )
        drawn = self._draw(
            self._agreement.prompts,
            key=jax.random.key(0),
            max_new_tokens=self._agreement.max_new_tokens,
        )
        return self._agreement.require(params, drawn)

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """Draws a response to every prompt.

        Raises:
          ServerError: the server does not answer, or an answer is invalid.
          InputError: a prompt has no tokens.
        """
        del version  # always the one handed over last
        sample_key, _ = jax.random.split(key)  # as in our decoder
        return self._draw(
            prompts, key=sample_key, max_new_tokens=self._recipe.max_new_tokens
        )

    def close(self) -> None:
        """Cancels requests that are waiting, and removes the files."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._folder.close()

    def _draw(self, prompts: Prompts, *, key: Array, max_new_tokens: int) -> Drawn:
        lengths = np.asarray(prompts.mask).sum(axis=1)
        if not lengths.all():
            raise InputError(
                f"--sampler: expected prompts of a token or more, which a server "
                f"needs, got none in row {int(lengths.argmin())} of a batch; leave "
                f"such prompts out"
            )
        seeds = jax.device_get(
            self._seeds(key, index=prompts.index, sample=prompts.sample)
        )
        requests = [
            self._request(tokens[mask], max_new_tokens=max_new_tokens, seed=int(seed))
            for tokens, mask, seed in zip(
                np.asarray(prompts.tokens), np.asarray(prompts.mask), seeds, strict=True
            )
        ]
        responses: dict[int, completions.Response] = {}
        self._retries(
            lambda: self._respond_to_rest(requests, responses), after=Overloaded
        )
        rows, before = prompts.tokens.shape
        experts = None
        if self._record is not None:
            shape = rows, before + max_new_tokens, *self._record
            experts = np.full(shape, OWN, np.int32)
        tokens = np.zeros((rows, max_new_tokens), np.int32)
        # Padded to R columns, so that the rollout's shape is fixed.
        logprobs = np.zeros((rows, max_new_tokens), np.float32)
        of_prompts, lengths = lengths, np.zeros(rows, np.int32)
        for row, response in responses.items():
            lengths[row] = size = len(response.tokens)
            if experts is not None:
                first = before - of_prompts[row]
                experts[row, first : before + size - 1] = response.experts
            tokens[row, :size] = response.tokens
            logprobs[row, :size] = response.logprobs
        return Drawn(tokens, logprobs, lengths, experts=experts)

    def _request(
        self, prompt: np.ndarray, *, max_new_tokens: int, seed: int
    ) -> dict[str, Any]:
        return completions.request(
            prompt.tolist(),
            model=self._model,
            max_new_tokens=max_new_tokens,
            temperature=self._recipe.temperature,
            stop_ids=self._recipe.stop_ids,
            seed=seed,
            unused=self._recipe.model.unused_ids,
        )

    def _respond_to_rest(
        self,
        requests: list[dict[str, Any]],
        responses: dict[int, completions.Response],
    ) -> None:
        """Requests the responses that are still missing.

        Raises:
          Overloaded: some requests were not answered; all were made.
          ServerError: another failure, after which no further request is made. After
            `Unreachable` a restarted server may have old weights.
        """
        futures = {
            row: self._threads.submit(self._respond, request)
            for row, request in enumerate(requests)
            if row not in responses
        }
        failures: list[Overloaded] = []
        try:
            for row, future in futures.items():
                try:
                    responses[row] = future.result()
                except Overloaded as error:
                    failures.append(error)
        finally:
            for future in futures.values():
                future.cancel()
        if failures:
            count = f" ({len(failures)} of {len(futures)} requests)"
            raise Overloaded(f"{failures[0]}{count}") from failures[0]

    def _respond(self, request: dict[str, Any]) -> completions.Response:
        answer = self._server.post(completions.PATH, request)
        return completions.response(
            answer,
            request=request,
            model=self._recipe.model,
            url=self._server.url,
            record=self._record is not None,
        )

    def _served(self, name: str | None) -> str:
        """Returns the model's name at the server, and checks its context."""
        listed = self._server.get("/v1/models").get("data")
        models = {
            model["id"]: model.get("max_model_len")
            for model in (listed if isinstance(listed, list) else [])
            if isinstance(model, dict) and isinstance(model.get("id"), str)
        }
        if name is None and len(models) == 1:
            (name,) = models
        if name is None or name not in models:
            expected = "one model" if name is None else f"the model {name}"
            raise InputError(
                f"--sampler: expected {expected} at {self._server.url}, got "
                f"{', '.join(models) or 'none'}; name one of them as model="
            )
        context, needed = models[name], self._recipe.max_new_tokens
        if isinstance(context, int) and context <= needed:
            raise InputError(
                f"--sampler: expected a context beyond the {needed} tokens of a "
                f"response at {self._server.url}, got {context}; serve a longer one "
                f"(vLLM: --max-model-len), or lower --max-new-tokens"
            )
        return name


def _seeds(key: Array, *, index: Array, sample: Array) -> Array:
    """u32[B], a seed below 2^31 for each row, independent of the batch."""
    keys = decode.row_keys(key, index=index, sample=sample)
    # Servers take a signed 32-bit integer.
    return jax.vmap(lambda own: jax.random.bits(own, dtype=jnp.uint32) >> 1)(keys)
