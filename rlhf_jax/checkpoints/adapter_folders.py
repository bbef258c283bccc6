"""Folders of adapters where a model is expected: what to do with them."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_jax.functional.checks import InputError

CONFIG = "adapter_config.json"  # as PEFT names it


def refuse(folder: Path) -> None:
    """InputError if the folder holds an adapter; for folders without a whole model.

    No option takes an adapter in place of a model, since a run would have to find the
    base by a name that may mean another folder here.
    """
    if not (folder / CONFIG).exists():
        return
    try:
        options = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base, task = options.get("base_model_name_or_path"), options.get("task_type")
    except (OSError, ValueError, AttributeError):
        base, task = None, None
    kind = "SequenceClassification" if task == "SEQ_CLS" else "CausalLM"
    merged = folder.absolute().parent / "model"  # where a run of ours writes it
    elsewhere = f", or give {merged}" if (merged / "config.json").exists() else ""
    raise InputError(
        f"expected a whole model, got an adapter ({CONFIG}) of the base {base!r:.200}; "
        f"no option takes an adapter in place of a model: merge it into its base with "
        f"PEFT, `AutoPeftModelFor{kind}.from_pretrained(ADAPTER).merge_and_unload()"
        f".save_pretrained(MERGED)`, and give MERGED{elsewhere}"
    )
