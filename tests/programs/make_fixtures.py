"""Records outputs of `transformers` for tiny random checkpoints: tests/fixtures.

    python tests/programs/make_fixtures.py [NAME ...]

Recorded with torch 2.13.0 (CPU), transformers 5.23.0, Python 3.11. It is run by hand in
an environment with torch when a checkpoint is added; no test imports it.

Each checkpoint is a folder as `save_pretrained` writes it, with a `recorded.npz` of

    left_tokens, right_tokens    i32[B, S], the same texts padded on either side
    left_mask, right_mask        bool[B, S]
    left_logits, right_logits    f32[N, V] at the N tokens, row after row
    continuation                 i32[B, 12 or 20], greedy after the left-padded texts

and, for a classifier, `left_scores` and `right_scores` f32[B] instead of the last
three. Everything is computed in float32 from the checkpoint, with position ids that
count tokens only.
"""

import copy
import functools
import shutil
import sys

import numpy as np
import torch
import transformers
from places import FIXTURES

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


# What is new in a family bites: a window far shorter than the texts, soft caps within
# the range of the logits, heads that are no share of the hidden size, rotary positions
# whose waves yarn keeps, blends and divides.
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LINEAR = "linear_attention"
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 40.0,
    "factor": 4.0,
    "beta_fast": 0.8,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 12,
}
FAMILY = LLAMA | {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 12}
QWEN2 = transformers.Qwen2Config(
    **FAMILY,
    use_sliding_window=True,
    sliding_window=5,
    max_window_layers=1,
    rope_parameters=YARN_ROPE,
)
QWEN3 = transformers.Qwen3Config(
    **FAMILY,
    use_sliding_window=True,
    sliding_window=5,
    layer_types=[GLOBAL, LOCAL, GLOBAL],
    attention_bias=True,
    tie_word_embeddings=True,
)
MISTRAL = transformers.MistralConfig(**FAMILY, sliding_window=5)
GPT_NEOX = transformers.GPTNeoXConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=48,
    rotary_pct=0.375,
    rotary_emb_base=500.0,
    **IDS,
)
GPT_NEOX_SEQUENTIAL = copy.deepcopy(GPT_NEOX)
GPT_NEOX_SEQUENTIAL.use_parallel_residual = False
GPT_NEOX_SEQUENTIAL.attention_bias = False
GEMMA2 = transformers.Gemma2Config(
    **FAMILY,
    query_pre_attn_scalar=7,
    sliding_window=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=4.0,
)
GEMMA3 = transformers.Gemma3TextConfig(
    **FAMILY | {"num_hidden_layers": 4},
    query_pre_attn_scalar=7,
    sliding_window=5,
    layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL],
    rope_parameters={
        LOCAL: {"rope_type": "default", "rope_theta": 50.0},
        GLOBAL: {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    },
)
# Two periods of layers, with heads of their own in global ones, whose values are keys.
GEMMA4_ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 50.0},
    GLOBAL: {
        "rope_type": "proportional",
        "rope_theta": 400.0,
        "partial_rotary_factor": 0.5,
    },
}
GEMMA4 = transformers.Gemma4TextConfig(
    **FAMILY | {"num_hidden_layers": 6, "num_key_value_heads": 2},
    sliding_window=5,
    layer_types=[LOCAL, LOCAL, GLOBAL] * 2,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=6.0,
    rope_parameters=GEMMA4_ROPE,
)
# Embeddings of each layer; the last four layers read keys and values of others.
GEMMA4_E2B = transformers.Gemma4TextConfig(
    **FAMILY | {"num_hidden_layers": 8, "head_dim": 6},
    rms_norm_eps=3e-2,
    sliding_window=5,
    layer_types=[LOCAL, GLOBAL] * 4,
    global_head_dim=8,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    num_kv_shared_layers=4,
    use_double_wide_mlp=True,
    rope_parameters=GEMMA4_ROPE,
)
# Experts beside an MLP of another width.
GEMMA4_MOE = transformers.Gemma4TextConfig(
    **FAMILY | {"num_hidden_layers": 4, "num_key_value_heads": 2},
    sliding_window=5,
    layer_types=[LOCAL, GLOBAL] * 2,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    rope_parameters=GEMMA4_ROPE,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=3,
    moe_intermediate_size=12,
)
PHI3 = transformers.Phi3Config(**FAMILY, sliding_window=5, partial_rotary_factor=0.5)
FOUR_LAYERS = FAMILY | {"num_hidden_layers": 4}
OLMO2 = transformers.Olmo2Config(
    **FAMILY | {"num_key_value_heads": 2}, attention_bias=True
)
OLMO3 = transformers.Olmo3Config(
    **FOUR_LAYERS,
    sliding_window=5,
    layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL],
    rope_parameters={
        LOCAL: {"rope_type": "default", "rope_theta": 50.0},
        GLOBAL: YARN_ROPE | {"attention_factor": 1.2, "truncate": True},
    },
)
# With and without positions, local and global: a layer of each.
SMOLLM3 = transformers.SmolLM3Config(
    **FOUR_LAYERS,
    no_rope_layers=[1, 0, 1, 0],
    use_sliding_window=True,
    sliding_window=5,
    layer_types=[LOCAL, LOCAL, GLOBAL, GLOBAL],
)
GRANITE = transformers.GraniteConfig(
    **FAMILY,
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
    logits_scaling=1.7,
    mlp_bias=True,
    tie_word_embeddings=True,
)
# Of layers without positions, none of which is a Mamba layer.
GRANITE4 = transformers.GraniteMoeHybridConfig(
    **FAMILY | {"intermediate_size": 40},
    embedding_multiplier=3.0,
    residual_multiplier=0.4,
    attention_multiplier=0.5,
    logits_scaling=0.6,
    shared_intermediate_size=40,
    num_local_experts=0,
    num_experts_per_tok=0,
    layer_types=[GLOBAL] * 3,
    mamba_n_heads=1,
    position_embedding_type=None,
)
# DeltaNets whose query and key heads serve two heads of values each, and whose norms
# an epsilon reaches.
QWEN3_5 = transformers.Qwen3_5TextConfig(
    **FOUR_LAYERS | {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16},
    rms_norm_eps=3e-2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    layer_types=[LINEAR, GLOBAL] * 2,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
)
# Read for their language models alone.
QWEN3_5_MULTIMODAL = transformers.Qwen3_5Config(
    text_config=QWEN3_5.to_dict(),
    vision_config={
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 2,
        "num_position_embeddings": 4,
    },
    tie_word_embeddings=True,
)
GEMMA3_MULTIMODAL = transformers.Gemma3Config(
    text_config=GEMMA3.to_dict(),
    vision_config={
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 4,
        "patch_size": 2,
        "vision_use_head": False,
    },
    mm_tokens_per_image=4,
)
GEMMA4_MULTIMODAL = transformers.Gemma4Config(
    text_config=GEMMA4_E2B.to_dict(),
    vision_config={
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "patch_size": 2,
        "position_embedding_size": 8,
    },
    audio_config=None,
)
# Weights of a token's experts that do not sum to 1.
QWEN3_MOE = transformers.Qwen3MoeConfig(
    **FAMILY | {"intermediate_size": 24},
    use_sliding_window=True,
    sliding_window=5,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
)
MIXTRAL = transformers.MixtralConfig(
    **FAMILY | {"intermediate_size": 24},
    sliding_window=5,
    num_local_experts=4,
    tie_word_embeddings=True,
)
# Limits within the range of gate and up.
GPT_OSS = transformers.GptOssConfig(
    **FAMILY | {"intermediate_size": 24},
    sliding_window=5,
    rope_parameters=YARN_ROPE,
    num_local_experts=4,
    num_experts_per_tok=2,
    swiglu_limit=0.6,
    swiglu_alpha=1.3,
)


def record_causal(
    architecture, config, name: str, *, new_tokens: int = NEW_TOKENS, **options
) -> None:
    folder, model = written(architecture, config, name, **options)
    record = {}
    for side in ("left", "right"):
        tokens, mask = padded(side)
        record[f"{side}_tokens"], record[f"{side}_mask"] = tokens, mask
        record[f"{side}_logits"] = forward(model, tokens, mask)[mask]
    record["continuation"] = greedy(model, *padded("left"), new_tokens=new_tokens)
    np.savez_compressed(folder / "recorded.npz", **record)


def record_scores(architecture, config, name: str, **options) -> None:
    folder, model = written(architecture, config, name, **options)
    record = {}
    for side in ("left", "right"):
        tokens, mask = padded(side)
        record[f"{side}_tokens"], record[f"{side}_mask"] = tokens, mask
        record[f"{side}_scores"] = forward(model, tokens, mask)[:, 0]
    np.savez_compressed(folder / "recorded.npz", **record)


def written(
    architecture,
    config,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **save_options,
):
    """(folder, the model read back in float32)."""
    model = architecture(config).to(dtype)
    randomise(model)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **save_options)
    read = architecture.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return folder, read.eval()


def randomise(model) -> None:
    """Draws weights so large that a lost bias or scale would be noticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_((1.0 if is_scale else 0.0) + 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4, which is no parameter
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


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


def greedy(
    model, tokens: np.ndarray, mask: np.ndarray, *, new_tokens: int
) -> np.ndarray:
    for _ in range(new_tokens):
        logits = forward(model, tokens, mask)[:, -1]
        first, second = np.sort(logits, axis=-1)[:, [-1, -2]].T
        assert (first - second > 1e-3).all(), "a near tie: choose another seed"
        tokens = np.append(tokens, logits.argmax(-1)[:, None], axis=1).astype(np.int32)
        mask = np.append(mask, np.ones((len(mask), 1), bool), axis=1)
    return tokens[:, -new_tokens:]


def causal(architecture, config, **options):
    return functools.partial(record_causal, architecture, config, **options)


def scores(architecture, config, **options):
    one_label = copy.deepcopy(config)
    one_label.num_labels = 1
    return functools.partial(record_scores, architecture, one_label, **options)


# Soft caps ask for eager attention.
EAGER = {"attention": "eager", "dtype": torch.bfloat16}
LONG = EAGER | {"new_tokens": 20}
t = transformers
FIXTURE = {
    "gpt2": causal(t.GPT2LMHeadModel, GPT2),
    "llama_sharded": causal(t.LlamaForCausalLM, LLAMA_UNTIED, max_shard_size="30KB"),
    "llama_bf16": causal(t.LlamaForCausalLM, LLAMA_TIED, dtype=torch.bfloat16),
    "gpt2_reward": scores(t.GPT2ForSequenceClassification, GPT2),
    "llama_reward": scores(t.LlamaForSequenceClassification, LLAMA_UNTIED),
    "qwen2": causal(t.Qwen2ForCausalLM, QWEN2, **LONG),
    "qwen3": causal(t.Qwen3ForCausalLM, QWEN3, **LONG),
    "mistral": causal(t.MistralForCausalLM, MISTRAL, **LONG),
    "gpt_neox": causal(t.GPTNeoXForCausalLM, GPT_NEOX, **LONG),
    "gemma2": causal(t.Gemma2ForCausalLM, GEMMA2, **LONG),
    "gemma3": causal(t.Gemma3ForCausalLM, GEMMA3, **LONG),
    "gemma4": causal(t.Gemma4ForCausalLM, GEMMA4, **LONG),
    "gemma4_e2b": causal(t.Gemma4ForCausalLM, GEMMA4_E2B, **LONG),
    "gemma4_moe": causal(t.Gemma4ForCausalLM, GEMMA4_MOE, **LONG),
    "phi3": causal(t.Phi3ForCausalLM, PHI3, **LONG),
    "olmo2": causal(t.Olmo2ForCausalLM, OLMO2, **LONG),
    "olmo3": causal(t.Olmo3ForCausalLM, OLMO3, **LONG),
    "smollm3": causal(t.SmolLM3ForCausalLM, SMOLLM3, **LONG),
    "granite": causal(t.GraniteForCausalLM, GRANITE, **LONG),
    "granite4": causal(t.GraniteMoeHybridForCausalLM, GRANITE4, **LONG),
    "qwen3_5": causal(t.Qwen3_5ForCausalLM, QWEN3_5, **LONG),
    "qwen3_5_multimodal": causal(
        t.Qwen3_5ForConditionalGeneration, QWEN3_5_MULTIMODAL, **EAGER
    ),
    "gemma3_multimodal": causal(
        t.Gemma3ForConditionalGeneration, GEMMA3_MULTIMODAL, **EAGER
    ),
    "gemma4_multimodal": causal(
        t.Gemma4ForConditionalGeneration, GEMMA4_MULTIMODAL, **EAGER
    ),
    "qwen3_moe": causal(t.Qwen3MoeForCausalLM, QWEN3_MOE, **LONG),
    "mixtral": causal(t.MixtralForCausalLM, MIXTRAL, **LONG),
    "gpt_oss": causal(t.GptOssForCausalLM, GPT_OSS, **LONG),
    "qwen2_reward": scores(t.Qwen2ForSequenceClassification, QWEN2, **EAGER),
    "qwen3_reward": scores(t.Qwen3ForSequenceClassification, QWEN3, **EAGER),
    "mistral_reward": scores(t.MistralForSequenceClassification, MISTRAL, **EAGER),
    "gpt_neox_reward": scores(
        t.GPTNeoXForSequenceClassification, GPT_NEOX_SEQUENTIAL, **EAGER
    ),
    "gemma2_reward": scores(t.Gemma2ForSequenceClassification, GEMMA2, **EAGER),
    "gemma3_reward": scores(t.Gemma3TextForSequenceClassification, GEMMA3, **EAGER),
    "phi3_reward": scores(t.Phi3ForSequenceClassification, PHI3, **EAGER),
    "olmo2_reward": scores(t.Olmo2ForSequenceClassification, OLMO2, **EAGER),
    "olmo3_reward": scores(t.Olmo3ForSequenceClassification, OLMO3, **EAGER),
    "smollm3_reward": scores(t.SmolLM3ForSequenceClassification, SMOLLM3, **EAGER),
    "qwen3_5_reward": scores(t.Qwen3_5TextForSequenceClassification, QWEN3_5, **EAGER),
    "qwen3_moe_reward": scores(t.Qwen3MoeForSequenceClassification, QWEN3_MOE, **EAGER),
    "mixtral_reward": scores(t.MixtralForSequenceClassification, MIXTRAL, **EAGER),
    "gpt_oss_reward": scores(t.GptOssForSequenceClassification, GPT_OSS, **EAGER),
}


def main(*names: str) -> None:
    for name in names or FIXTURE:
        FIXTURE[name](name)


if __name__ == "__main__":
    main(*sys.argv[1:])
