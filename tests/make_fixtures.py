"""Records what `transformers` computes for tiny random checkpoints: tests/fixtures.

    python tests/make_fixtures.py

Recorded with torch 2.13.0 (CPU), transformers 5.23.0, Python 3.11. It is run by hand in
an environment with torch when a checkpoint is added; no test imports it.

Each checkpoint is a folder as `save_pretrained` writes it, with a `recorded.npz` of

    left_tokens, right_tokens    i32[B, S], the same texts padded on either side
    left_mask, right_mask        bool[B, S]
    left_logits, right_logits    f32[N, V] at the N tokens, row after row
    continuation                 i32[B, 12], greedy after the left-padded texts

and, for a classifier, `left_scores` and `right_scores` f32[B] instead of the last
three. Everything is computed in float32 from the checkpoint, with position ids that
count tokens only.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
PAD, EOS, VOCAB = 96, 95, 97
LENGTHS = (24, 17, 9, 1)
NEW_TOKENS = 12

IDS = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
GPT2 = transformers.GPT2Config(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=48, **IDS
)
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    **IDS,
}
# Texts three times as long as the original context. Of the four wavelengths the first
# is kept, the second blended, and the others are divided.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 0.2,
    "high_freq_factor": 1.2,
    "original_max_position_embeddings": 8,
}
LLAMA_UNTIED = transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE)
LLAMA_TIED = transformers.LlamaConfig(
    **LLAMA,
    head_dim=12,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
)


def main() -> None:
    record_causal("gpt2", transformers.GPT2LMHeadModel(GPT2))
    record_causal(
        "llama_sharded",
        transformers.LlamaForCausalLM(LLAMA_UNTIED),
        max_shard_size="30KB",
    )
    record_causal(
        "llama_bf16", transformers.LlamaForCausalLM(LLAMA_TIED).to(torch.bfloat16)
    )
    for config in (GPT2, LLAMA_UNTIED):
        config.num_labels = 1
    record_scores("gpt2_reward", transformers.GPT2ForSequenceClassification(GPT2))
    record_scores(
        "llama_reward", transformers.LlamaForSequenceClassification(LLAMA_UNTIED)
    )


def record_causal(name: str, model, **save_options) -> None:
    folder, model = written(name, model, **save_options)
    record = {}
    for side in ("left", "right"):
        tokens, mask = padded(side)
        record[f"{side}_tokens"], record[f"{side}_mask"] = tokens, mask
        record[f"{side}_logits"] = forward(model, tokens, mask)[mask]
    record["continuation"] = greedy(model, *padded("left"))
    np.savez_compressed(folder / "recorded.npz", **record)


def record_scores(name: str, model) -> None:
    folder, model = written(name, model)
    record = {}
    for side in ("left", "right"):
        tokens, mask = padded(side)
        record[f"{side}_tokens"], record[f"{side}_mask"] = tokens, mask
        record[f"{side}_scores"] = forward(model, tokens, mask)[:, 0]
    np.savez_compressed(folder / "recorded.npz", **record)


def written(name: str, model, **save_options):
    """The folder, and the model as it is read back in float32."""
    randomise(model)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **save_options)
    return folder, type(model).from_pretrained(folder, dtype=torch.float32).eval()


def randomise(model) -> None:
    """Large enough that no bias or scale could be lost unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_((1.0 if is_scale else 0.0) + 0.2 * noise)


def padded(side: str) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    size = max(LENGTHS)
    tokens = np.full((len(LENGTHS), size), PAD, np.int32)
    mask = np.zeros((len(LENGTHS), size), bool)
    for row, length in enumerate(LENGTHS):
        columns = slice(size - length, size) if side == "left" else slice(length)
        tokens[row, columns] = generator.integers(0, EOS, length)
        mask[row, columns] = True
    return tokens, mask


def forward(model, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    positions = np.cumsum(mask, axis=1) - mask
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(positions),
        ).logits.numpy()


def greedy(model, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    for _ in range(NEW_TOKENS):
        logits = forward(model, tokens, mask)[:, -1]
        first, second = np.sort(logits, axis=-1)[:, [-1, -2]].T
        assert (first - second > 1e-3).all(), "a near tie: choose another seed"
        tokens = np.append(tokens, logits.argmax(-1)[:, None], axis=1).astype(np.int32)
        mask = np.append(mask, np.ones((len(mask), 1), bool), axis=1)
    return tokens[:, -NEW_TOKENS:]


if __name__ == "__main__":
    main()
