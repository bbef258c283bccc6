"""A server that gives every prompt the same response, and can be made to fail.

It is for tests of errors: real servers are in `studies.outside_sampler`.
"""

import base64
import contextlib
import dataclasses
import http.server
import io
import json
import threading
from pathlib import Path

import jax
import numpy as np

from rlhf_jax import decoder, hf
from rlhf_jax.roles import policy


class Toy:
    """Responds with tokens 5, 6, 7 and their log-probs; `change` alters answers."""

    def __init__(self):
        self.params, self.model = None, None
        self.requests, self.loads = [], []
        self.change = lambda path, answer: answer
        self.keeps_weights = False
        self.unused = ()  # ids that it does not draw
        self.context = 16
        self._logprobs = jax.jit(policy.logprobs, static_argnames=("model",))
        self._routed = jax.jit(decoder.hidden_and_routing, static_argnames=("model",))
        self.records = False  # whether it returns experts, in vLLM's format
        self.renumber = lambda record: record  # changes them

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "toy", "max_model_len": self.context}]}
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": True}
        self.requests.append(body)
        drawn = self.drawn(body)
        size = self.context
        tokens = np.array([[0] * size + body["prompt"] + drawn])[:, -size:]
        mask = np.arange(size) >= size - len(body["prompt"]) - len(drawn)
        logprobs = self._logprobs(
            self.params, model=self.model, tokens=tokens, mask=mask[None]
        )
        choice = {
            "token_ids": drawn,
            "logprobs": {"token_logprobs": logprobs[0, size - len(drawn) :].tolist()},
            "prompt_token_ids": body["prompt"],
        }
        if self.records:
            _, routing = self._routed(
                self.params, model=self.model, tokens=tokens, mask=mask[None]
            )
            # The last token is drawn, but not run.
            record = np.asarray(routing.chosen)[0, mask][:-1].astype(np.uint8)
            choice["routed_experts"] = encoded(self.renumber(record))
        return {"choices": [choice]}

    def drawn(self, body):
        """The tokens of a response."""
        return [5, 6, 7][: body["max_tokens"]]

    def load(self, path):
        files = sorted(file.name for file in Path(path).iterdir())
        self.loads.append((Path(path).name, files))
        if not self.keeps_weights or self.params is None:
            model, self.params = hf.load(path)
            self.model = dataclasses.replace(model, unused_ids=self.unused)


def encoded(array):
    """As vLLM 0.32 encodes `routed_experts` of a choice."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@contextlib.contextmanager
def serving(toy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self, body=None):
            answer = toy.change(self.path, toy.answer(self.path, body))
            if answer is None:
                self.connection.close()
                return
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            size = int(self.headers["Content-Length"])
            self.do_GET(json.loads(self.rfile.read(size)))

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # connections that wait; of more some are reset

    server = Server(("localhost", 0), Handler)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
