"""Loads saved folders in another environment, and reports differences.

    VENV/bin/python load_saved_folders.py FOLDER transformers
    VENV/bin/python load_saved_folders.py FOLDER vllm

It imports neither rlhf_jax nor JAX. Each folder below FOLDER contains `expected.json`:
this package's ids of texts, and log-probs or scores of tokens. Prints a line of
JSON for each: {"folder": name, "problems": [...], "gap": largest difference in nats}.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

TOLERANCE = 2e-4  # nats, or reward units


def main() -> None:
    root, reader = Path(sys.argv[1]), sys.argv[2]
    for file in sorted(root.glob("*/expected.json")):
        expected = json.loads(file.read_text())
        check = READERS[reader]
        try:
            problems, gap = check(str(file.parent), expected)
        except Exception as error:  # the next folder may be read
            problems, gap = [f"{type(error).__name__}: {error}"[:300]], None
        result = {"folder": file.parent.name, "problems": problems, "gap": gap}
        print(json.dumps(result), flush=True)


def with_transformers(folder: str, expected: dict[str, Any]) -> tuple[list[str], Any]:
    """Loads a folder by AutoTokenizer, AutoConfig and AutoModel."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    problems = []
    if "texts" in expected:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        problems += tokenizer_problems(tokenizer, expected)
    if "tokens" not in expected:
        return problems, None
    auto = {
        "logprobs": transformers.AutoModelForCausalLM,
        "scores": transformers.AutoModelForSequenceClassification,
    }[expected["what"]]
    stored = auto.from_pretrained(folder, dtype="auto")
    problems += differences(
        {
            "dtype": (str(stored.dtype).removeprefix("torch."), expected["dtype"]),
            "context": (
                stored.config.max_position_embeddings,
                expected["context"],
            ),
        }
    )
    model, info = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            problems.append(f"{kind}: {sorted(info[kind])}")
    tokens = torch.tensor(expected["tokens"])
    with torch.no_grad():
        logits = model.eval()(tokens, attention_mask=torch.ones_like(tokens)).logits
    if expected["what"] == "scores":
        numbers = logits[:, 0]
    else:
        logprobs = torch.log_softmax(logits.double(), -1)[:, :-1]
        numbers = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        problems += differences({"stop ids": (ends, expected["stop_ids"])})
    gap = float((numbers - torch.tensor(expected["values"])).abs().max())
    return problems + beyond(gap), gap


def with_vllm(folder: str, expected: dict[str, Any]) -> tuple[list[str], Any]:
    """Loads a folder by vLLM's engine, without a server."""
    if "tokens" not in expected or "texts" not in expected:
        return [], None  # vLLM serves a model
    import gc

    import vllm

    scores = expected["what"] == "scores"
    engine = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        load_format="safetensors",
        max_num_seqs=4,
        **({"runner": "pooling"} if scores else {}),
    )
    problems = tokenizer_problems(engine.get_tokenizer(), expected)
    length = engine.llm_engine.model_config.max_model_len
    problems += differences({"context": (length, expected["context"])})
    prompts = [{"prompt_token_ids": row} for row in expected["tokens"]]
    if scores:
        raw = vllm.PoolingParams(use_activation=False)
        outputs = engine.classify(prompts, pooling_params=raw, use_tqdm=False)
        values_here = [output.outputs.probs[0] for output in outputs]
        values = expected["values"]
    else:
        greedy = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = engine.generate(prompts, greedy, use_tqdm=False)
        values_here = [
            position[token].logprob
            for row, output in zip(expected["tokens"], outputs, strict=True)
            for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)
        ]
        values = [value for row in expected["values"] for value in row]
        generation = engine.llm_engine.model_config.try_get_generation_config()
        ends = generation.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        problems += differences({"stop ids": (ends, expected["stop_ids"])})
    gap = max(abs(a - b) for a, b in zip(values, values_here, strict=True))
    del engine
    gc.collect()
    return problems + beyond(gap), gap


READERS = {"transformers": with_transformers, "vllm": with_vllm}


def tokenizer_problems(tokenizer: Any, expected: dict[str, Any]) -> list[str]:
    """Differences in the ids of texts and of messages."""
    texts = expected["texts"]
    pairs = {
        "ids": ([tokenizer(text)["input_ids"] for text in texts], expected["ids"]),
        "ids of the text alone": (
            [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts],
            expected["plain"],
        ),
        "decoded": (
            [tokenizer.decode(ids) for ids in expected["ids"]],
            expected["decoded"],
        ),
        "without special tokens": (
            [tokenizer.decode(i, skip_special_tokens=True) for i in expected["ids"]],
            expected["visible"],
        ),
        "inputs": (sorted(tokenizer(texts[0])), expected["inputs"]),
        "special ids": (
            [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
            expected["special"],
        ),
        "padding side": (tokenizer.padding_side, expected["side"]),
        "longest text": (tokenizer.model_max_length, expected["context"]),
    }
    if expected["chat"] is not None:
        messages = [{"role": "user", "content": "the cat"}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = chat["input_ids"] if hasattr(chat, "keys") else chat
        pairs["chat"] = (list(ids), expected["chat"])
    return differences(pairs)


def differences(pairs: dict[str, tuple[Any, Any]]) -> list[str]:
    """{what: (found, expected)} of unequal values."""
    return [
        f"{what}: expected {expected!r:.120}, got {value!r:.120}"
        for what, (value, expected) in pairs.items()
        if value != expected
    ]


def beyond(gap: float) -> list[str]:
    """The difference, if it is too large."""
    return [] if gap < TOLERANCE else [f"log-probs or scores differ by {gap:.2g}"]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
