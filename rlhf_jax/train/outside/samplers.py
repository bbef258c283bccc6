"""The sampler that --sampler names."""

from __future__ import annotations

from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.samplers.process import ProcessSampler
from rlhf_jax.samplers.server import ServerSampler
from rlhf_jax.train.outside.options import OutsideConfig, refuse_devices
from rlhf_jax.train.outside.sampler import OutsideSampler


def make_sampler(
    options: OutsideConfig, algorithm: PolicyGradient, *, home: Mesh
) -> OutsideSampler:
    """A process or a server as the sampler of a run.

    Args:
      algorithm: static.
      home: the policy's mesh, of one device.

    Raises:
      InputError: the mesh has several devices, or the sampler cannot be used.
    """
    refuse_devices(options.sampler, devices=home.devices.size)
    if not options.served:
        process = ProcessSampler(
            algorithm, weights=options.sampler_weights, timeout=options.sampler_timeout
        )
        return OutsideSampler(process, home=home)
    tolerance = options.sampler_check_tolerance
    if tolerance is None:
        tolerance = self_check.TOLERANCE[options.dtype]
    server = ServerSampler(
        options.sampler,
        algorithm,
        tolerance=tolerance,
        model=options.sampler_model,
        weights=options.sampler_weights,
        timeout=options.sampler_timeout,
    )
    return OutsideSampler(server, home=home)
