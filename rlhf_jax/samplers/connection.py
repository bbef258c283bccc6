"""Exchanges JSON with a server over HTTP, and classifies errors."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import parsing
from rlhf_jax.samplers.protocol import TransientError

SHOWN = 300  # characters of an answer in a message
HEADERS = {"Content-Type": "application/json"}
OVERLOADED = (429, 500, 502, 503, 504)  # status codes after which a retry may succeed


class ServerError(StopError):
    """A server answered with an error or an invalid answer."""


class Overloaded(ServerError, TransientError):
    """The server could not answer this request now; it may answer others."""


class Unreachable(ServerError, TransientError):
    """The server does not answer, or the connection was lost before its answer."""


def is_address(url: str) -> bool:
    """Whether a URL is of HTTP and names a host and, if any, a valid port."""
    try:
        parts = urllib.parse.urlsplit(url)
        of_http = parts.scheme in ("http", "https")
        return of_http and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or an invalid port
        return False


class Connection:
    """A server at one address; its methods may be called from several threads."""

    def __init__(self, url: str, *, timeout: float) -> None:
        """Stores the address; sends nothing yet.

        Args:
          url: http://HOST:PORT, with or without the "/v1" of OpenAI's interface.
          timeout: seconds per answer.
        """
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout

    def get(self, path: str) -> dict[str, Any]:
        """Gets the JSON object at a path.

        Raises:
          ServerError: an error, or no JSON object. Unreachable: no answer.
        """
        return self._ask(urllib.request.Request(f"{self.url}{path}"))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts a JSON object; returns the answer, {} if it is empty.

        Raises:
          ServerError: an error, or no JSON object. Unreachable: no answer.
        """
        data = json.dumps(body).encode()
        return self._ask(
            urllib.request.Request(f"{self.url}{path}", data=data, headers=HEADERS)
        )

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        path = request.selector
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            kind = Overloaded if error.code in OVERLOADED else ServerError
            raise kind(
                f"{self.url}{path}: expected an answer, got status {error.code}: "
                f"{text[:SHOWN]}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = (
                f"expected a server there, got: {str(reason) or type(reason).__name__};"
                " start it (again), and go on with --resume where the run has a folder"
            )
            if isinstance(reason, TimeoutError):
                why = (
                    f"expected an answer within {self.timeout:g} s, got none; see"
                    " whether the server hangs, or raise timeout= of --sampler"
                )
            raise Unreachable(f"{self.url}{path}: {why}") from error
        if not text.strip():
            return {}
        source = parsing.Source(
            f"{self.url}{path}", "a JSON object", "is it another kind of server?"
        )
        try:
            answered = parsing.of_json(text, source, foreign=True)
        except InputError as error:
            raise ServerError(f"{error}") from None
        if not isinstance(answered, dict):
            raise ServerError(f"{source.refusal(repr(text[:SHOWN]))}")
        return answered
