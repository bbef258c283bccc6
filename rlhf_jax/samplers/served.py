"""Writes checkpoints that servers can reload.

    python -m rlhf_jax.samplers.served MODEL FOLDER
    vllm serve FOLDER ...

The output head is always written, even if the policy ties it to the embedding: from a
checkpoint without a head vLLM 0.32 reloads only the embedding, and keeps the old head
(observed with GPT-2 and Llama).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.samplers import routed_experts

Params = Any
USAGE = "python -m rlhf_jax.samplers.served MODEL FOLDER"


def untied(model: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Returns an equal model whose output head is not tied to the embedding.

    Models of families whose checkpoints cannot untie them are returned unchanged.
    """
    if not model.tied_head:
        return model, params
    apart = dataclasses.replace(model, tied_head=False)
    family = hf.FAMILIES[model.family]
    if family.config_from_hf(family.config_to_hf(apart)).tied_head:
        return model, params
    return apart, params | {"head": {"kernel": params["embed"]["tokens"]}}


def save(
    path: Path, model: ModelConfig, params: Params, *, tokenizer: Any = None, **ids: Any
) -> None:
    """Writes a checkpoint to serve, all or nothing.

    Args:
      path: a folder that does not exist yet.
      params: f32, of the policy.
      tokenizer: written beside the weights; a reload needs none.
      ids: `stop_ids`, as for `hf.save`.

    Raises:
      InputError: the folder is in use, or the family cannot express the model.
    """
    apart, of_both = untied(model, params)
    hf.save(path, apart, of_both, tokenizer=tokenizer, **ids)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes FOLDER, and prints the command that serves it."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 2 or words[0].startswith("-"):
        sys.exit(f"usage: {USAGE}")
    try:
        start = pretrained.load(words[0])
        save(
            Path(words[1]),
            start.model,
            start.params,
            tokenizer=start.tokenizer,
            stop_ids=start.stop_ids,
        )
    except InputError as error:
        sys.exit(f"error: {error}")
    print(
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {words[1]} --dtype float32 "
        f"--load-format safetensors --logprobs-mode processed_logprobs "
        f"--generation-config vllm"
    )
    if start.model.experts is not None:
        print(
            f"for --routing-replay sampler: VLLM_USE_V2_MODEL_RUNNER=1 and "
            f"{routed_experts.FLAG}"
        )


if __name__ == "__main__":
    main()
