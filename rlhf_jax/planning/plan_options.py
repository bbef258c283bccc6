"""What is asked of a plan: a job with its sizes, and the chips that it is to run on."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Literal

from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshOption, MeshShape
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import run_shape
from rlhf_jax.planning.run_shape import Way

Algorithm = Literal["ppo", "grpo", "sft", "reward-model", "dpo"]
_SUPERVISED = (
    "reward",
    "sampler",
    "sampler_mesh",
    "find_sampler_mesh",
    "cache",
    "continuous_batching",
    "cache_pages",
    "page_size",
    "num_epochs",
    "num_minibatches",
    "group_size",
)
UNREAD: dict[Algorithm, tuple[str, ...]] = {
    "ppo": ("group_size",),
    "grpo": (),
    "sft": ("reference", *_SUPERVISED),
    "reward-model": ("reference", *_SUPERVISED),
    "dpo": _SUPERVISED,
}
"""Options that an algorithm does not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_shape.Options):
    """A run and the chips that it is to run on."""

    algorithm: Algorithm = "ppo"
    """What is run: ppo, grpo, sft, reward-model or dpo."""
    mesh: MeshOption = ONE_DEVICE
    """How the chips share the work, as fsdp=64 or data=2,fsdp=8,tensor=4."""
    sampler_mesh: MeshOption | None = None
    """How the chips share the sampling, as data=8,tensor=8; None is --mesh."""
    find_sampler_mesh: bool = False
    """Compare the meshes that the chips allow for sampling, and plan with the fastest
    that fits; some more compiles."""
    chip: str | None = None
    """The chip of a topology that names none, as h100 with --topology 8x8; without a
    topology, the one that this machine's compiler stands in for."""
    num_epochs: int | None = None
    """Passes over each batch; None is 4 for ppo and 1 for grpo."""
    group_size: int = 8
    """Responses per prompt, of grpo."""
    lengths: Path | None = None
    """File of response lengths, an integer or an object with "length" per line; None
    is responses of all columns."""
    find_batch: bool = False
    """Also look for the largest batch that fits, with some more compiles."""
    json: Path | None = None
    """Where to write the plan."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(num_epochs=self.epochs, group_size=self.group_size)
        if ":" in (self.topology or "") and self.chip is not None:
            raise InputError(
                f"expected --topology or --chip, got {self.topology} and {self.chip}; "
                f"a topology names its chip"
            )
        if self.sampler_mesh is not None and self.find_sampler_mesh:
            raise InputError(
                f"expected --sampler-mesh or --find-sampler-mesh, got "
                f"{self.sampler_mesh} and a search for another; leave one of them out"
            )
        if self.sampler_mesh is not None and self.sampler_mesh.size != self.mesh.size:
            raise InputError(
                f"--sampler-mesh: expected axes that multiply to the {self.mesh.size} "
                f"chips of --mesh, got {self.sampler_mesh}; change an axis"
            )
        if self.sampler_mesh is not None and self.sampler_mesh.context > 1:
            raise InputError(
                f"--sampler-mesh: expected data, fsdp and tensor, got "
                f"{self.sampler_mesh}; a token that is decoded has no columns to "
                f"share: give context to data"
            )
        for name in UNREAD[self.algorithm]:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise InputError(
                    f"--{name.replace('_', '-')}: expected none with --algorithm "
                    f"{self.algorithm}, which does not read it, got {value}; leave it "
                    f"out"
                )
        if self.algorithm == "grpo":
            checks.groups(self.batch_size, group_size=self.group_size, least=2)

    @property
    def slice(self) -> str | None:
        """The topology with its chip, as h100:8x8."""
        if self.topology is None or self.chip is None:
            return self.topology
        return f"{self.chip}:{self.topology}"

    @property
    def context_devices(self) -> int:
        """Devices that share the columns of a row."""
        return self.mesh.context

    @property
    def epochs(self) -> int:
        """Passes over each batch."""
        if self.num_epochs is not None:
            return self.num_epochs
        return 4 if self.algorithm == "ppo" else 1

    @property
    def reward_model(self) -> Way | Literal["base", "none"]:
        """How the reward model is stored."""
        if self.reward is not None:
            return self.reward
        return "copy" if self.algorithm == "ppo" else "none"


def command(options: Options) -> str:
    """The command line that gives these options."""
    words = ["rlhf-jax", "plan"]
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or field.name == "json":
            continue
        if isinstance(value, bool):
            words.append(f"--{name}")
        elif isinstance(value, MeshShape):
            sizes = dataclasses.asdict(value).items()
            text = ",".join(f"{axis}={size}" for axis, size in sizes if size > 1)
            words += [f"--{name}", text]
        else:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
