"""What the process of `process` runs: our decoder, called from another process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jax

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.samplers import weight_files
from rlhf_jax.samplers.decoder import DecoderSampler
from rlhf_jax.samplers.protocol import Drawn
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Failed


def load(pickled: bytes, file: str, version: int) -> str | Failed:
    """Takes the parameters in a file; the root of their fingerprint.

    Args:
      pickled: the `DecoderSampler`, which stays in this process between calls.
    """
    # Ctrl-C is for the trainer, which ends its step and then this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def use(sampler: DecoderSampler) -> str:
        params = weight_files.read(Path(file))
        sampler.hand_over(params, version=version)
        return fingerprint.fingerprint(params).root

    return worker.call(pickled, use)


def draw(
    pickled: bytes, prompts: Prompts, key_data: Any, impl: str, version: int
) -> Drawn | Failed:
    """A draw with the parameters of the last `load`.

    Args:
      prompts: in NumPy arrays.
      key_data, impl: of the key of the step, as typed keys cannot be pickled.
    """

    def use(sampler: DecoderSampler) -> Drawn:
        key = jax.random.wrap_key_data(key_data, impl=impl)
        return sampler.draw(prompts, key=key, version=version)

    return worker.call(pickled, use)
