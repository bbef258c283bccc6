"""Serves the page of a report in a thread, as `rlhf-jax report --watch` does."""

import contextlib
import threading

from rlhf_jax.reports import watching


@contextlib.contextmanager
def serving(source):
    with watching.Server(source, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
