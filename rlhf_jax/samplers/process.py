"""Our decoder in a process of its own; parameters are handed over in files.

    here                            the process
    hand_over: version-3 ──file──>  reads it, returns its fingerprint
    draw:      prompts, key ──────> the program of `iteration.sample`
    rollout    <─────────────────── tokens, log-probs, experts for routing replay

On the same kind of hardware its draws equal those of `--sampler here` to the bit.
"""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.samplers import TIMEOUT, weight_files
from rlhf_jax.samplers.decoder import OTHER_VERSION, Decoder
from rlhf_jax.samplers.protocol import Drawn, TransientError
from rlhf_jax.verification import user_objects
from rlhf_jax.verification.worker import Failed
from rlhf_jax.verification.workers import Workers

Array = jax.Array
Params = Any
STARTED = 60.0  # seconds for the process to start, in addition to the timeout


class ProcessSampler(contextlib.AbstractContextManager[Any]):
    """A process that samples; a context manager that ends it.

    The process starts with the first hand-over and uses the devices that JAX finds. It
    ends with this process, however this process ends.
    """

    def __init__(
        self,
        recipe: PolicyGradient,
        *,
        weights: Path | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """Makes a sampler; its process starts later.

        Args:
          recipe: without adapters.
          weights: folder for the files; None is the system's temporary folder.
          timeout: seconds per hand-over or draw, including compilation.

        Raises:
          InputError: the folder is not writable, or the recipe cannot be pickled.
        """
        checks.positive(timeout=timeout)
        self.timeout = timeout
        pickled = user_objects.pickled(Decoder(recipe), kind="sampler")
        self._folder = weight_files.HandOverFolder(weights)
        # Spawned, not forked: a fork of a process with JAX's threads may hang.
        self._workers = Workers(pickled, of="that sample", num_workers=1)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def hand_over(self, params: Params, *, version: int) -> float:
        """Sends parameters in a file, which is removed afterwards.

        Raises:
          TransientError: the process ended or took too long.
          StopError: the process failed otherwise.
          SelfCheckError: the process read other parameters than were written.
          WriteError: the file cannot be written.
        """
        params = jax.device_get(params)  # gathers shards on the host, not on a device
        with self._folder.version(version) as path:
            weight_files.write(path, params)
            # The process computes the fingerprint of the parameters that it read, so a
            # truncated or old file is detected.
            root = self._call(Decoder.load, str(path), version)
        expected = _root(params)
        if root != expected:
            raise SelfCheckError(
                f"the sampler's process: expected parameters with the fingerprint "
                f"{expected}, as version {version} was written to {path}, got {root}; "
                f"see to that disk, or choose another weights= of --sampler"
            )
        return 0.0

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """Draws a response to every prompt, as `Decoder.draw` does.

        Raises:
          TransientError: the process ended, took too long, or lacks this version since
            it replaced another process.
          StopError: the process failed otherwise.
        """
        return self._call(
            Decoder.draw,
            jax.tree.map(np.asarray, prompts),
            # Typed keys cannot be pickled: send key data and implementation.
            np.asarray(jax.random.key_data(key)),
            str(jax.random.key_impl(key)),
            version,
        )

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._workers.close()
        self._folder.close()

    def _call(self, function: Any, *args: Any) -> Any:
        what = "hand-over" if function is Decoder.load else "draw"
        future = self._workers.submit(function, *args, timeout=self.timeout)
        try:
            # The workers' timeout counts from when the process begins the call.
            returned = future.result(timeout=self.timeout + STARTED)
        except FutureTimeoutError:
            future.cancel()
            returned = Failed("did not start", timed_out=True)
        if not isinstance(returned, Failed):
            return returned
        kind, remedy = TransientError, "raise timeout= of --sampler"
        if returned == OTHER_VERSION:
            # A new process in place of another has no parameters until the next
            # hand-over.
            remedy = "hand that version over first"
        elif returned.status == -signal.SIGKILL:
            remedy = "it may be out of memory: lower --batch-size"
        elif returned.status is not None:
            remedy = "read what it printed"
        elif not returned.timed_out:
            kind, remedy = StopError, "mend that"
        raise kind(
            f"the sampler's process: expected a {what} to return, got a process that "
            f"{returned.why}; {remedy}, or leave out --sampler process"
        )


def _root(params: Params) -> str:
    """Computes the fingerprint's root, with one leaf on the device at a time."""
    pairs = [
        jax.device_get(fingerprint.digest(jnp.asarray(leaf), path=path))
        for path, leaf in zip(
            fingerprint.paths(params), jax.tree.leaves(params), strict=True
        )
    ]
    return fingerprint.named(params, jnp.asarray(np.stack(pairs))).root
