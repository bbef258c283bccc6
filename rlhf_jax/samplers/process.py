"""Our decoder in a process of its own; parameters pass through files.

    here                            the process
    hand_over: version-3 ──file──>  reads it, returns its fingerprint
    draw:      prompts, key ──────> the program of `iteration.sample`
    rollout    <─────────────────── tokens, log-probs

It draws what our decoder here draws, to the bit, on a machine of the same kind.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.samplers import weight_files, worker
from rlhf_jax.samplers.decoder import DecoderSampler
from rlhf_jax.samplers.protocol import Drawn
from rlhf_jax.verification import processes
from rlhf_jax.verification.worker import Failed

Array = jax.Array
Params = Any
TIMEOUT = 600.0
OF = "that sample"  # whose processes they are, for messages
STARTED = 60.0  # seconds for the process to start, beside the timeout


class ProcessSampler:
    """A process that samples; a context manager that ends it.

    It starts with the first hand-over, spawned and not forked, with the devices that
    JAX finds there. It ends with this process, however that ends.
    """

    def __init__(
        self,
        recipe: PolicyGradient,
        *,
        weights: Path | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """A sampler whose process is not started yet.

        Args:
          recipe: static, without adapters.
          weights: folder for the files; None is the system's temporary folder.
          timeout: seconds for a hand-over or a draw, compilation included.

        Raises:
          InputError: the folder cannot be written, or the recipe cannot be sent.
        """
        checks.positive(timeout=timeout)
        self.timeout = timeout
        self._pickled = processes.pickled(DecoderSampler(recipe), kind="sampler")
        self._folder = weight_files.HandOverFolder(weights)
        self._pool = processes.start(self._pickled, num_workers=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def hand_over(self, params: Params, *, version: int) -> float:
        """Has the next draws made with these parameters, whose file is removed then.

        Raises:
          StopError: the process failed.
          SelfCheckError: it read other parameters than were written.
          WriteError: the file cannot be written.
        """
        with self._folder.version(version) as path:
            weight_files.write(path, params)
            root = self._call(worker.load, str(path), version)
        expected = fingerprint.fingerprint(params).root
        if root != expected:
            raise SelfCheckError(
                f"the sampler's process: expected parameters with the fingerprint "
                f"{expected}, as version {version} was written to {path}, got {root}; "
                f"see to that disk, or choose another --sampler-weights"
            )
        return 0.0

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """A response to every prompt, as `DecoderSampler.draw`.

        Raises:
          StopError: the process failed, took too long, or has another version.
        """
        return self._call(
            worker.draw,
            jax.tree.map(np.asarray, prompts),
            np.asarray(jax.random.key_data(key)),
            str(jax.random.key_impl(key)),
            version,
        )

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._pool.stop()
        self._pool.join()
        self._folder.close()

    def _call(self, function: Any, *args: Any) -> Any:
        what = "hand-over" if function is worker.load else "draw"
        future = processes.schedule(
            self._pool,
            function,
            args=(self._pickled, *args),
            timeout=self.timeout,
            of=OF,
        )
        try:
            # The pool counts from when the process takes the call.
            returned = future.result(timeout=self.timeout + STARTED)
        except Exception as error:
            ended = processes.ended(error, timeout=self.timeout)
            if ended is None:
                raise processes.broken(error, of=OF) from error
            why, remedy = ended.why, "raise --sampler-timeout"
            if not ended.timed_out:
                remedy = _remedy(error)
        else:
            if not isinstance(returned, Failed):
                return returned
            why, remedy = returned.why, "mend that"
        raise StopError(
            f"the sampler's process: expected a {what} to return, got a process that "
            f"{why}; {remedy}, or leave out --sampler process"
        )


def _remedy(error: Any) -> str:
    if getattr(error, "exitcode", None) == -signal.SIGKILL:
        return "it may be out of memory: lower --batch-size"
    return "read what it printed"
