"""JSON to and from a server over HTTP, and the errors where there is none."""

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
OVERLOADED = (429, 500, 502, 503, 504)  # statuses of a server that may answer later


class ServerError(StopError):
    """A server did not do what it was asked for."""


class Overloaded(ServerError, TransientError):
    """It could not answer now; other requests of the same moment may be answered."""


class Unreachable(ServerError, TransientError):
    """Nothing answers at the address, or it went away before it had answered."""


def is_address(url: str) -> bool:
    """Whether a URL names a host, and a port that is a number or none."""
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, or another port
        return False


class Connection:
    """A server at one address; its methods may be called from several threads."""

    def __init__(self, url: str, *, timeout: float) -> None:
        """Asks for nothing yet.

        Args:
          url: http://HOST:PORT, with or without the "/v1" of OpenAI's interface.
          timeout: seconds for an answer.
        """
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path.

        Raises:
          ServerError: an error, or no JSON object. Unreachable: no answer.
        """
        return self._ask(urllib.request.Request(f"{self.url}{path}"))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What is answered to a JSON object; {} to an empty answer.

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
