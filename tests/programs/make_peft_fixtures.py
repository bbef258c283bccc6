"""Records outputs of `peft` for random adapters of the recorded checkpoints.

    python tests/make_peft_fixtures.py

Recorded with torch 2.13.0 (CPU), transformers 5.23.0, peft 0.21.2, Python 3.11. Run by
hand as `make_fixtures.py`, whose checkpoints are the bases.

Each folder is as `PeftModel.save_pretrained` writes it, with a `recorded.npz` of
`logits` f32[N, V] (or `scores` f32[B]) of the left-padded texts but the longest.
"""

import shutil

import numpy as np
import peft
import torch
import transformers
from make_fixtures import FIXTURES, PAD, forward, padded


def main() -> None:
    # c_attn is three layers of ours, with one A in theirs; c_proj is two modules.
    record(
        "gpt2_lora",
        transformers.AutoModelForCausalLM,
        base="gpt2",
        r=4,
        lora_alpha=6,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    record(
        "llama_lora",
        transformers.AutoModelForCausalLM,
        base="llama_sharded",
        r=3,
        lora_alpha=12,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    record(
        "gpt2_lora_reward",
        transformers.AutoModelForSequenceClassification,
        base="gpt2",
        r=2,
        lora_alpha=2,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        task_type="SEQ_CLS",
    )


def record(name: str, auto, *, base: str, **options) -> None:
    of_scores = options["task_type"] == "SEQ_CLS"
    extra = {"num_labels": 1, "pad_token_id": PAD} if of_scores else {}
    model = auto.from_pretrained(FIXTURES / base, dtype=torch.float32, **extra)
    model = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.2 * noise)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    file = folder / "adapter_config.json"  # not the path on the machine that made it
    file.write_text(file.read_text().replace(str(FIXTURES / base), base))
    tokens, mask = (array[1:] for array in padded("left"))
    logits = forward(model, tokens, mask)
    recorded = {"scores": logits[:, 0]} if of_scores else {"logits": logits[mask]}
    np.savez_compressed(folder / "recorded.npz", **recorded)


if __name__ == "__main__":
    main()
