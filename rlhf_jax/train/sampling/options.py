"""Sampling on a mesh and in a dtype of its own: its options."""

from __future__ import annotations

import dataclasses

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.devices.placement import Placement, SamplerPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import PAGE_SIZE, Cache
from rlhf_jax.models.generation.page_table import pages_of
from rlhf_jax.train.start import TrainerConfig

# Options of our decoder, which neither episodes nor samplers outside read.
OF_DECODER = (
    *("sampler_storage", "sampler_cache", "sampler_cache_pages", "sampler_page_size"),
    "prefill_chunk",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(TrainerConfig):
    """Options of how responses are sampled."""

    sampler_storage: Storage = frozen_models.COPY
    """Dtype of the parameters that responses are sampled with, cast once per
    iteration."""
    sampler_cache: Cache = "same"
    """How the sampler keeps keys and values: in --dtype, or in int8."""
    sampler_cache_pages: int | None = None
    """With continuous_batching: number of pages for keys and values that rows share,
    so that memory follows the tokens that are there; a row for which there is no page
    waits. On a mesh with data=N each share of the rows has an Nth of them. None gives
    every row columns for the longest response."""
    sampler_page_size: int = PAGE_SIZE
    """With --sampler-cache-pages: columns of a page, tokens."""
    prefill_chunk: int | None = None
    """Columns of prompts that the sampler runs at a time, to save memory with long
    ones; None runs them whole."""

    def check_sampler(
        self,
        recipe: PolicyRecipe,
        *,
        max_new_tokens: int,
        placement: Placement | SamplerPlacement,
        adapters: bool = False,
    ) -> None:
        """Raises InputError for pages that cannot be on the sampler's mesh.

        And where nothing would correct for the sampler's rounding.
        """
        storage = self.sampler_storage
        alone = placement.sampler.devices == "last"
        mesh = placement.sampler.mesh or (ONE_DEVICE if alone else placement.policy)
        self._check_pages(recipe, max_new_tokens=max_new_tokens, mesh=mesh)
        if self.prefill_chunk is not None:
            checks.positive(prefill_chunk=self.prefill_chunk)
        if adapters and storage != frozen_models.COPY:
            raise InputError(
                f"--sampler-storage: expected none with --lora.rank, whose base is "
                f"sampled with as --reference-storage.dtype has it, got "
                f"{storage.dtype}; leave one of them out"
            )
        if storage.dtype == "float16":
            raise InputError(
                "--sampler-storage.dtype: expected float32, bfloat16 or int8, got "
                "float16, in which a policy that is trained may overflow; choose "
                "bfloat16"
            )
        # Unless they are recomputed, the ratio is to the sampler's own log-probs.
        uncorrected = recipe.recompute_logprobs and recipe.sampler_weight_cap is None
        if uncorrected and self.sampler_tolerance > 0:
            raise InputError(
                f"--recompute-logprobs: expected --sampler-weight-cap with it where "
                f"--sampler-storage.dtype {storage.dtype} with --sampler-cache "
                f"{self.sampler_cache} rounds what responses are sampled with, else "
                f"nothing corrects for that; give the cap (2 is usual), or leave "
                f"--recompute-logprobs out"
            )

    def _check_pages(
        self, recipe: PolicyRecipe, *, max_new_tokens: int, mesh: MeshShape
    ) -> None:
        pages, size = self.sampler_cache_pages, self.sampler_page_size
        checks.positive(sampler_page_size=size)
        if pages is None:
            if size != PAGE_SIZE:
                raise InputError(
                    f"--sampler-page-size: expected --sampler-cache-pages with it, got "
                    f"{size} without; give both, or leave it out"
                )
            return
        if recipe.continuous_batching is None:
            raise InputError(
                f"--sampler-cache-pages: expected --continuous-batching with it, whose "
                f"finished responses free their pages, got {pages} without; give both, "
                f"or leave it out"
            )
        if mesh.fsdp * mesh.context > 1:
            raise InputError(
                f"--sampler-cache-pages: expected a mesh for sampling without fsdp and "
                f"context, as data=2,tensor=4, whose devices with the same rows have "
                f"all weights, got {mesh}; choose another --placement.sampler, or "
                f"leave it out"
            )
        for name, number in {
            "--sampler-cache-pages": pages,
            "--continuous-batching": recipe.continuous_batching,
        }.items():
            if number % mesh.data:
                raise InputError(
                    f"{name}: expected a multiple of {mesh.data}, as each share of the "
                    f"rows of {mesh} has pages of its own, got {number}; change it, or "
                    f"choose another --placement.sampler"
                )
        # A prompt has one token or more, and the last token of a response is not run.
        least = pages_of(max_new_tokens, size=size) * mesh.data
        if pages < least:
            raise InputError(
                f"--sampler-cache-pages: expected at least {least} pages of {size} "
                f"columns, of which one response of {max_new_tokens} tokens may take "
                f"{least // mesh.data}, got {pages}; give more, or leave it out"
            )

    @property
    def sampler_tolerance(self) -> float:
        """What its rounding adds to the distance to the trainer, nats per token.

        0.0 where sampling rounds no further than --dtype does.
        """
        dtype, tolerance = self.sampler_storage.dtype, 0.0
        if dtype == "int8" or (dtype, self.dtype) == ("bfloat16", "float32"):
            tolerance += self_check.TOLERANCE[dtype]
        if self.sampler_cache == "int8":
            tolerance += self_check.TOLERANCE["int8"]
        return tolerance
