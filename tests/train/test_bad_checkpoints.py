"""Checkpoints that trainers refuse: damaged config, weights, index or tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bad_inputs
import numpy as np
import pytest
from bad_inputs import TRAINERS
from safetensors.numpy import load_file, save_file
from tiers import one_in


class Case(NamedTuple):
    """Passes a checkpoint's folder, changed by `damage`, as --model."""

    trainer: str
    name: str
    damage: Callable[[Path], object]
    message: str  # a regular expression that the refusal holds


def config(**options) -> Callable[[Path], object]:
    """Changes options of config.json; the value ... removes one."""
    return edited("config.json", **options)


def edited(file: str, **options) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / file
        options_of_file = json.loads(path.read_text()) if path.exists() else {}
        options_of_file |= options
        options_left = {
            name: value for name, value in options_of_file.items() if value is not ...
        }
        path.write_text(json.dumps(options_left))

    return damage


def written(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def gone(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def cut(file: str, share: float) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: int(share * len(whole))])

    return damage


def a_folder(file: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return damage


def tensors(change: Callable[[dict[str, np.ndarray]], object]):
    """Changes the tensors in place."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def index(weight_map: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return damage


def filled(name: str, value: float):
    def change(weights):
        weights[name] = weights[name].copy()
        weights[name].flat[3] = value

    return tensors(change)


def cast(name: str, dtype: str):
    return tensors(lambda weights: weights.update({name: weights[name].astype(dtype)}))


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LAYERS = "config.json: expected n_layer to be a whole number from 1 to 10000, got"
SIZE = "config.json: expected {} to be a whole number from 1 to 2147483647, got"
WTE, NORM = "transformer.wte.weight", "transformer.ln_f.weight"
FINITE = "expected finite weights, got 1 tensors .* {} 1 "
HOLDS = "a number of layers that the checkpoint can hold, .*, got"
INSIDE = f"expected {INDEX} to name files of the checkpoint's folder, got"
# Of every trainer: what is read first, and what is read last.
EVERYWHERE = [
    ("config.json gone", gone("config.json"), "expected config.json, got a folder"),
    (
        "config.json cut",
        cut("config.json", 0.5),
        "config.json: expected a JSON object|config",
    ),
    ("weights gone", gone(WEIGHTS), "safetensors"),
    ("weights cut", cut(WEIGHTS, 0.5), "in model.safetensors, .*it is truncated"),
    ("NaN", filled(WTE, np.nan), FINITE.format(f"{WTE} .*:")),
    ("layers", config(n_layer=10**9), f"{LAYERS} 1000000000"),
    ("tokenizer gone", gone("tokenizer.json"), "expected a folder with tokenizer.json"),
    ("tokenizer cut", cut("tokenizer.json", 0.5), "expected a folder with tokenizer"),
]
OWN = [
    ("empty config", written("config.json", b""), "config.json|tokenizer.json"),
    ("list", written("config.json", b"[]"), "config.json|tokenizer.json"),
    ("deep", written("config.json", b"[" * 10_000), "config.json|tokenizer.json"),
    ("bytes", written("config.json", b"\xff"), "config.json|tokenizer.json"),
    ("config is a folder", a_folder("config.json"), "config.json|tokenizer.json"),
    ("no type", config(model_type=...), "expected model_type to be one of"),
    ("type", config(model_type="gpt9"), "expected model_type to be one of"),
    ("null type", config(model_type=None), "expected model_type to be one of"),
    ("number's type", config(model_type=3), "expected model_type to be a text"),
    ("bert", config(model_type="bert"), "expected model_type to be one of"),
    ("architecture", config(architectures=["X"]), "expected the architecture GPT2LM"),
    ("architectures", config(architectures="X"), "architectures to be a list of text"),
    ("quantised", config(quantization_config={"bits": 4}), "quantization_config"),
    ("no layers", config(n_layer=0), f"{LAYERS} 0"),
    ("text layers", config(n_layer="1"), f"{LAYERS} '1'"),
    ("half a layer", config(n_layer=1.5), f"{LAYERS} 1.5"),
    ("layers gone", config(n_layer=...), "n_layer"),
    ("more layers", config(n_layer=2), "missing: transformer.h.1"),
    ("many layers", config(n_layer=10_000), f"{HOLDS} 10000"),
    ("no width", config(n_embd=0), SIZE.format("n_embd")),
    ("other width", config(n_embd=8), "misshapen|expected .* got"),
    ("huge width", config(n_embd=2**31 - 1), "n_head|divide|misshapen|expected"),
    ("beyond int32", config(n_embd=2**31), SIZE.format("n_embd")),
    ("digits", config(vocab_size=10**4000), f"{SIZE.format('vocab_size')} an integer"),
    ("true width", config(n_embd=True), SIZE.format("n_embd")),
    ("heads", config(n_head=3), "divide|multiple|n_head"),
    ("no heads", config(n_head=0), SIZE.format("n_head")),
    ("vocabulary", config(vocab_size=7), "vocab_size|tokenizer with ids below"),
    (
        "huge vocabulary",
        config(vocab_size=2**31 - 1),
        # The memory check reads the small files alone.
        "vocab_size|wte|memory of the host: expected a run that fits into",
    ),
    ("positions", config(n_positions=8), "wpe|n_positions"),
    ("no positions", config(n_positions=0), SIZE.format("n_positions")),
    ("activation", config(activation_function="sine"), "activation_function"),
    ("activation 3", config(activation_function=3), "activation_function to be a text"),
    ("epsilon", config(layer_norm_epsilon=0), "layer_norm_epsilon to be a finite nu"),
    ("NaN epsilon", config(layer_norm_epsilon=float("nan")), "layer_norm_epsilon"),
    ("tied", config(tie_word_embeddings="yes"), "tie_word_embeddings to be true or"),
    ("empty weights", written(WEIGHTS, b""), "in model.safetensors, got 0 bytes"),
    ("a header alone", cut(WEIGHTS, 0.05), "it is truncated"),
    ("a byte less", cut(WEIGHTS, 0.9999), "it is truncated"),
    ("pickle", written(WEIGHTS, b"\x80\x02}q\0."), "in model.safetensors, got 6 byte"),
    ("huge header", written(WEIGHTS, b"\xff" * 16), "in model.safetensors, got 16"),
    ("weights are a folder", a_folder(WEIGHTS), "model.safetensors"),
    ("no tensors", tensors(dict.clear), f"{HOLDS} 1;"),
    ("missing", tensors(lambda weights: weights.pop(NORM)), f"missing: {NORM}"),
    (
        "extra",
        tensors(
            lambda weights: weights.update({"transformer.h.0.x": np.zeros(2, "f4")})
        ),
        "unknown: transformer.h.0.x",
    ),
    (
        "misshapen",
        tensors(lambda weights: weights.update({NORM: np.ones(15, "f4")})),
        f"misshapen: {NORM}",
    ),
    (
        "transposed",
        tensors(lambda weights: weights.update({WTE: weights[WTE].T.copy()})),
        "vocab_size|misshapen",
    ),
    ("infinite", filled(NORM, np.inf), FINITE.format(f"{NORM} .* 0 NaN and")),
    ("int32", cast(NORM, "int32"), f"{NORM}.*(int32|I32)"),
    ("bool", cast(NORM, "bool"), f"{NORM}.*(bool|BOOL)"),
    ("index of nothing", index({}), f"{HOLDS} 1;"),
    ("index a list", index([]), "weight_map"),
    ("index of numbers", index({WTE: 3}), "weight_map"),
    ("index of no file", index({WTE: "no.safetensors"}), "no.safetensors"),
    ("index up", index({WTE: "../part.safetensors"}), INSIDE),
    ("index absolute", index({WTE: "/etc/passwd"}), INSIDE),
    ("index NUL", index({WTE: "a\0b"}), INSIDE),
    ("index empty", index({WTE: ""}), INSIDE),
    ("index of itself", index({WTE: "."}), INSIDE),
    (
        "index cut",
        lambda folder: [index({})(folder), cut(INDEX, 0.5)(folder)],
        f"{INDEX}: expected a JSON object",
    ),
    ("end text", edited("generation_config.json", eos_token_id="x"), "eos_token_id"),
    ("end 1.5", edited("generation_config.json", eos_token_id=1.5), "eos_token_id"),
    ("end -2", edited("generation_config.json", eos_token_id=-2), "eos_token_id"),
    ("end deep", edited("generation_config.json", eos_token_id=[[1]]), "eos_token_id"),
    ("end true", edited("generation_config.json", eos_token_id=True), "eos_token_id"),
    ("generation", written("generation_config.json", b"{"), "generation_config.json"),
    ("generation 3", written("generation_config.json", b"3"), "generation_config.json"),
    ("tokenizer empty", written("tokenizer.json", b""), "a folder with tokenizer.json"),
    ("tokenizer {}", written("tokenizer.json", b"{}"), "a folder with tokenizer.json"),
    ("tokenizer 3", written("tokenizer.json", b"3"), "a folder with tokenizer.json"),
    ("tokenizer \xff", written("tokenizer.json", b"\xff"), "with tokenizer.json"),
    ("options of it", written("tokenizer_config.json", b"{"), "tokenizer"),
    ("options 3", written("tokenizer_config.json", b"3"), "tokenizer"),
    ("a token more", edited("tokenizer.json", added_tokens=[
        {"id": 99, "content": "<x>", "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True},
    ]), "ids below the model's vocabulary size 24, got id 24"),
]  # fmt: skip
OF_EVERY_TRAINER = [Case(trainer, *of) for trainer in TRAINERS for of in EVERYWHERE]
IN_TURN = [
    Case(list(TRAINERS)[i % len(TRAINERS)], *of)  # each by one trainer in turn
    for i, of in enumerate(OWN)
]
CASES = [*OF_EVERY_TRAINER, *IN_TURN]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return bad_inputs.make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize(
    "bad",
    [*bad_inputs.by_one_each(OF_EVERY_TRAINER), *one_in(5, IN_TURN)],
    ids=[f"{bad.trainer}: {bad.name}" for bad in CASES],
)
def test_a_checkpoint_that_is_refused(files, tmp_path, capsys, bad):
    shutil.copytree(files / "model", tmp_path / "model")
    bad.damage(tmp_path / "model")
    bad_inputs.refused(
        capsys,
        bad.trainer,
        ["--model", str(tmp_path / "model")],
        files=files,
        out=tmp_path / "run",
        message=bad.message,
    )


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (3, "chat_template in tokenizer_config.json to be a text, .* got 3"),
        ([{"name": "a", "template": "a"}], "chat_template in .* to be a text"),
        ("", "a tokenizer with a chat template|a chat template that writes the whole"),
        ("{% if", "of which it says: unexpected 'end of template'"),
        ("{{ 1/0 }}", "of which it says: division by zero"),
        ("{{ messages[9].content }}", "of which it says: .*element 9"),
        ("{{ 3 }}", "a chat template that writes the whole response"),
    ],
)
def test_a_template_that_is_refused(files, tmp_path, capsys, template, message):
    shutil.copytree(files / "model", tmp_path / "model")
    edited("tokenizer_config.json", chat_template=template)(tmp_path / "model")
    row = {
        name: [{"role": role, "content": text}]
        for name, role, text in (
            ("prompt", "user", "the cat"),
            ("response", "assistant", "sat"),
        )
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(row))
    bad_inputs.refused(
        capsys,
        "sft",
        ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "chat.jsonl")],
        files=files,
        out=tmp_path / "run",
        message=message,
    )
