"""Saved folders of every family, loaded in transformers 4.57, transformers 5 and vLLM.

    RLHF_JAX_CONFORMANCE=~/.cache/rlhf-jax-conformance pytest -m slow -rs \\
        tests/checkpoints/test_conformance.py

The first run installs the environments in that folder. Without the variable, or if
an environment cannot be installed, its tests are skipped.
"""

import functools
import json
import os
import subprocess
from pathlib import Path

import conformance_environments
import jax
import numpy as np
import pytest
import tiny
from places import PROGRAMS
from test_tokenizer_files import TEXTS, ZOO, fast, qwen

from rlhf_jax import hf, policy, rewards
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.hf import tokenizer_files
from rlhf_jax.checkpoints.pretrained import Pretrained

VARIABLE = "RLHF_JAX_CONFORMANCE"
ENVIRONMENTS = tuple(conformance_environments.PACKAGES)
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] + '\\n' + m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\\n{% endif %}"
)
VOCAB, LENGTH = 264, 40  # tokens of a text: beyond windows, and original contexts
THETA = 12345.0  # of no family's default
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_theta": THETA,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GEMMA = LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BANDS = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS = {
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    },
    "llama": LLAMA,
    "llama, llama3": LLAMA | {"rope_scaling": BANDS},
    "llama, linear": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama, yarn": LLAMA | {"rope_scaling": YARN, "tie_word_embeddings": True},
    "mistral": LLAMA | {"sliding_window": 8},
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen2, yarn": LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.2}},
    "qwen3": LLAMA,
    "qwen3_5_text": LLAMA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "qwen3_moe": LLAMA
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": LLAMA
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": YARN,
        "sliding_window": 8,
        "layer_types": GEMMA["layer_types"],
    },
    "phi3": LLAMA | {"partial_rotary_factor": 0.5, "sliding_window": 8},
    "gpt_neox": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "rotary_pct": 0.25,
        "max_position_embeddings": 64,
        "rotary_emb_base": THETA,
    },
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"rope_local_base_freq": 500.0},
    "olmo2": LLAMA,
    "olmo3": LLAMA
    | {
        "rope_theta": 500_000.0,
        "rope_scaling": YARN,
        "sliding_window": 8,
        "layer_types": GEMMA["layer_types"],
    },
    "smollm3": LLAMA | {"no_rope_layers": [1, 0]},
    "granite": LLAMA
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "granitemoehybrid": LLAMA
    | {
        "num_local_experts": 0,
        "layer_types": ["attention", "attention"],
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
}
# transformers has no score for Granite.
REWARDS = [name for name in CONFIGS if "," not in name and "granite" not in name]
FOLDERS = [*CONFIGS, *(f"{name} reward" for name in REWARDS)]
# What a reader cannot, by environment and folder, with the reason.
UNKNOWN: dict[str, dict[str, str]] = {
    "transformers-4.57": dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_text-reward"), "It came with 5."
    ),
    "transformers-5": {},
    "vllm": {
        "gemma3_text-reward": "0.32 looks for the trunk's tensors without model.",
        "llama-linear": "0.32 takes the context to be that before the scaling.",
    },
}

pytestmark = pytest.mark.slow


def test_every_family_is_here():
    assert {name.partition(",")[0] for name in CONFIGS} == set(hf.FAMILIES)


def reads(tokenizer, *, context):
    """A tokenizer's ids of texts, which the other environment must also find."""
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    messages = [{"role": "user", "content": "the cat"}]
    chat = None
    if tokenizer.chat_template is not None:
        chat = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    return {
        "texts": TEXTS,
        "ids": ids,
        "plain": [tokenizer(t, add_special_tokens=False)["input_ids"] for t in TEXTS],
        "decoded": [tokenizer.decode(ids_of_text) for ids_of_text in ids],
        "visible": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
        "inputs": sorted(tokenizer(TEXTS[0])),
        "special": [
            *(tokenizer.bos_token_id, tokenizer.eos_token_id),
            tokenizer.pad_token_id,
        ],
        "side": tokenizer.padding_side,
        "chat": chat,
        "context": context,
    }


def model_of(name):
    """(shape, parameters with large numbers in every leaf)."""
    family = hf.FAMILIES[name.partition(",")[0]]
    model = family.config_from_hf(CONFIGS[name])
    return model, tiny.params(model)


def tokenizer_of(name):
    """transformers 5 reads Qwen2's folders with Qwen2's class, whatever they name."""
    options = {"chat_template": CHAT, "extra_special_tokens": ["<tool>"]}
    if name.startswith("qwen2"):
        return qwen(**options)
    return fast(pad_token="<img>", padding_side="left", **options)


def save(folder, name):
    """Saves a model or reward model as trainers do, with its computed outputs."""
    reward = name.endswith(" reward")
    model, params = model_of(name.removesuffix(" reward"))
    tokenizer = tokenizer_of(name)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (2, LENGTH), np.int32)
    mask = np.ones(tokens.shape, bool)
    stop_ids = (tokenizer.eos_token_id, 7)
    if reward:
        scorer = rewards.init(jax.random.key(0), params, model=model)
        how = {"stop_ids": stop_ids, "pad_id": 259, "dtype": "bfloat16"}
        path = folder / "model"
        hf.save_reward(path, model, scorer, tokenizer=tokenizer, **how)
        model, params = hf.load_reward(path, dtype="float32")
        score = jax.jit(rewards.sequence_scores, static_argnames="model")
        values = score(params, model=model, tokens=tokens, mask=mask)
    else:
        start = Pretrained(
            model=model,
            params=None,
            tokenizer=tokenizer,
            stop_ids=stop_ids,
            save_dtype="bfloat16",
        )
        pretrained.save(folder, params, start=start, base=None, lora=None, name=name)
        path = folder / "model"
        model, params = hf.load(path, dtype="float32")
        logprobs = jax.jit(functools.partial(policy.logprobs, model=model))
        values = logprobs(params, tokens=tokens, mask=mask)[:, 1:]
    expected = reads(tokenizer, context=model.max_positions) | {
        "what": "scores" if reward else "logprobs",
        "tokens": tokens.tolist(),
        "values": np.asarray(values).tolist(),
        "dtype": "bfloat16",
        "stop_ids": list(stop_ids),
    }
    (path / "expected.json").write_text(json.dumps(expected))
    path.rename(folder.parent / name.replace(", ", "-").replace(" ", "-"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of saved folders."""
    root = tmp_path_factory.mktemp("saved")
    for number, name in enumerate(FOLDERS):
        save(root / str(number), name)
    for name, make in ZOO.items():
        folder = root / f"tokenizer-{name.replace(', ', '-')}"
        tokenizer_files.write(make(), folder, max_positions=64)
        expected = reads(make(), context=64)
        (folder / "expected.json").write_text(json.dumps(expected))
    return root


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def program_output(request):
    """(an environment's output for every folder, its name)."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no folder for environments of gigabytes")
    home = Path(os.environ[VARIABLE]).expanduser()
    try:
        python = conformance_environments.python_of(home, request.param)
    except RuntimeError as error:
        pytest.skip(f"{request.param} cannot be installed: {error}")
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [
            *(python, PROGRAMS / "load_saved_folders.py"),
            request.getfixturevalue("saved"),
            "vllm" if request.param == "vllm" else "transformers",
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '{"']
    print(f"\n{request.param}")
    for line in lines:
        print(f"{line['folder']:24} {line['gap'] or 0:.1e}  {line['problems']}")
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, {line["folder"]: line for line in lines}


def test_every_saved_folder_is_read_as_it_was_saved(program_output, saved):
    name, lines = program_output
    assert set(lines) == {file.parent.name for file in saved.glob("*/expected.json")}
    unexpected = {
        folder: line["problems"]
        for folder, line in lines.items()
        if bool(line["problems"]) != (folder in UNKNOWN[name])
    }
    assert not unexpected
