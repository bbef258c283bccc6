"""Reads and writes adapters in PEFT's layout: adapter_config.json and safetensors.

    peft.save("out", model=model, adapters=adapters, lora=lora, base_fingerprint=root)
    lora, adapters = peft.load("out", model=model, base=base)

`peft.PeftModel.from_pretrained` loads these folders, and its own are read. The names
follow from the family's key table. Where a family fuses layers (GPT-2's c_attn is our
query, key and value), PEFT's adapter of rank 3r holds our three adapters of rank r,

    lora_A = [A_q; A_k; A_v]        lora_B = diag(B_q, B_k, B_v)

and a layer that is not adapted is a block of zeros. An A that all three layers share,
as PEFT makes it, is read as three equal ones; three equal ones are written as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from rlhf_jax.checkpoints import fused_adapters, mapping, shards
from rlhf_jax.checkpoints.fused_adapters import Linear
from rlhf_jax.checkpoints.hf import PathLike, SaveDtype, casting
from rlhf_jax.devices import processes
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.models import decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.leaves import misfits
from rlhf_jax.models.lora import LoRA, attach, paths
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof import exported

Params = Any
Tensors = dict[str, np.ndarray]

_CONFIG = mapping.ADAPTER
_WEIGHTS = "adapter_model.safetensors"
_SCORE = f"{fused_adapters.PREFIX}score.weight"
# Options that do not affect the weights, or are read below. Dropout only affects
# training, which has none here.
_READ = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules"),
    *("peft_type", "task_type", "modules_to_save", "lora_dropout", "fan_in_fan_out"),
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
    *("inference_mode", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
}
# Values of other options, besides empty and false ones, under which an adapter is
# W + (alpha / rank) · A B.
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}


def check_names(adapted: Iterable[str], *, model: ModelConfig) -> None:
    """Checks that PEFT has names for adapters of these layers, such as "experts/up".

    Raises:
      InputError: some layers have no name, as one tensor holds all experts.
    """
    named = {path for linear in fused_adapters.linears(model) for path in linear.paths}
    if nameless := sorted({*adapted} - named):
        raise InputError(
            f"--lora: expected adapters of layers that PEFT has a name for, got "
            f"{', '.join(nameless)} of {model.family}, each one tensor of all experts; "
            f"choose others, as modules=attention/*"
        )


def save(
    path: PathLike,
    *,
    model: ModelConfig,
    adapters: Params,
    lora: LoRA,
    base_fingerprint: str,
    base_name: str | None = None,
    dtype: SaveDtype | None = None,
) -> None:
    """Writes adapters that `peft.PeftModel.from_pretrained` loads, all or nothing.

    Args:
      adapters: of a decoder, or {"trunk", "score"} of a reward model. PEFT's score has
        no bias, so the bias is stored in the metadata, and PEFT's scores are lower by
        that constant.
      base_fingerprint: `frozen.source_fingerprint_of(base).root`, which `load` checks.
      dtype: of the file. Adapters are rounded to nearest even, except a reward model's
        score; None keeps their own dtype.

    Raises:
      InputError: the folder is in use, dtype cannot hold a weight, or the adapters are
        not the model's.
    """
    jax.eval_shape(
        lambda base: attach(base, adapters, lora=lora), decoder.shapes(model)
    )
    trunk = adapters["trunk"] if "score" in adapters else adapters
    casting.check(traverse_util.flatten_dict(trunk, sep="/"), dtype=dtype)
    adapters = processes.whole(adapters)
    if not processes.is_first():
        return
    tensors: Tensors = {}
    metadata = {"format": "pt", "base_fingerprint": base_fingerprint}
    trunk = adapters
    if "score" in adapters:
        trunk = adapters["trunk"]
        tensors[_SCORE] = np.asarray(adapters["score"]["kernel"])[None]
        metadata["score_bias"] = repr(float(adapters["score"]["bias"]))
    leaves = traverse_util.flatten_dict(trunk["layers"], sep="/")
    adapted, fused = [], {}
    for linear in fused_adapters.linears(model):
        if any(f"{path}/lora_a" in leaves for path in linear.paths):
            down, up = fused_adapters.to_theirs(
                linear, leaves, model=model, rank=lora.rank
            )
            adapted.append(linear)
            if down.shape[1] != lora.rank:
                fused[linear.pattern] = len(linear.paths)
            for number, (name_a, name_b) in enumerate(linear.tensors(model)):
                tensors[name_a] = np.ascontiguousarray(down[number])
                tensors[name_b] = np.ascontiguousarray(up[number])
    check_names(paths(trunk), model=model)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if "score" in adapters else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        # Layers of several kinds have one name.
        "target_modules": [*dict.fromkeys(linear.pattern for linear in adapted)],
        "rank_pattern": {name: n * lora.rank for name, n in fused.items()},
        "alpha_pattern": {name: _number(n * lora.alpha) for name, n in fused.items()},
        "modules_to_save": ["score"] if "score" in adapters else None,
        "fan_in_fan_out": adapted[0].key.layout == "same",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = dict(casting.cast_all(tensors.items(), dtype=dtype, but={_SCORE}))
    with shards.new_folder(Path(path)) as folder:
        shards.write_json(folder / _CONFIG, config)
        shards.save(tensors, folder / _WEIGHTS, metadata=metadata)


def load(path: PathLike, *, model: ModelConfig, base: Frozen) -> tuple[LoRA, Params]:
    """Reads adapters that `save` or PEFT wrote, in float32, for further training.

    Args:
      path: a folder with adapter_config.json and adapter_model.safetensors.

    Returns:
      The LoRA settings and the adapters; {"trunk": adapters, "score": ...} for sequence
      classification with one label.

    Raises:
      InputError: a file is missing, names another base, sets an option that is not
        implemented, does not fit the model, or has a weight that is not finite. The
        message names every option and tensor.
    """
    folder = urls.fetched(path)
    with located(f"adapters {path}"):
        if not folder.is_dir():
            raise InputError(f"expected a folder with {_CONFIG}, got none")
        exported.require(folder)
        config = shards.read_json(folder / _CONFIG)
        _supported(config)
        file = shards.open_file(folder / _WEIGHTS)
        metadata = file.metadata() or {}
        _check_base(metadata.get("base_fingerprint"), base)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        lora, adapters = _read(config, tensors, model=model)
        bias = np.array(metadata.get("score_bias", 0.0), np.float32)
        numbers = {**tensors, "score_bias": bias}
        mapping.refuse_not_finite(
            {
                f"{name} in {_WEIGHTS}": (mapping.NotFinite.of(array), array.size)
                for name, array in numbers.items()
            }
        )
    if _SCORE not in tensors:
        return lora, adapters
    score = {
        "kernel": _float32(tensors[_SCORE][0]),
        "bias": jnp.asarray(bias),
    }
    return lora, {"trunk": adapters, "score": score}


def _read(
    config: Mapping[str, Any], tensors: Tensors, *, model: ModelConfig
) -> tuple[LoRA, Params]:
    rank, alpha = config["r"], config["lora_alpha"]
    sizes = fused_adapters.layer_sizes(model)
    problems, expected = [], {_SCORE: (1, model.hidden_size)}
    linears: list[tuple[Linear, list[tuple[str, str]]]] = []
    for linear in fused_adapters.linears(model):
        names = linear.tensors(model)
        if not any(name in tensors for pair in names for name in pair):
            continue
        k, scaled = _rank_and_alpha(config, names[0][0])
        n = len(linear.paths)
        if k not in (rank, n * rank) or scaled * rank != alpha * k:
            problems.append(
                f"{linear.pattern}: expected rank {rank} and alpha {alpha}"
                + (f", or {n} times both" if n > 1 else "")
                + f"; got {k} and {scaled}"
            )
        size_in = sizes[linear.paths[0]][0]
        size_out = sum(sizes[path][1] for path in linear.paths)
        for name_a, name_b in names:
            expected |= {name_a: (k, size_in), name_b: (size_out, k)}
        linears.append((linear, names))
    if config.get("task_type") != "SEQ_CLS":
        expected.pop(_SCORE)
    problems += misfits(tensors, shapes=expected)
    if problems or not linears:
        raise InputError(
            f"expected adapters of the linear layers of this {model.family} with "
            f"{model.num_layers} layers, got {len(tensors)} tensors with "
            f"{len(problems)} problems; were they made for another model?\n  "
            + "\n  ".join(problems)
        )
    adapters: dict[str, Any] = {}
    for linear, names in linears:
        down = np.stack([tensors[name].T for name, _ in names])
        up = np.stack([tensors[name].T for _, name in names])
        widths = [sizes[path][1] for path in linear.paths]
        up = up[..., linear.key.columns(sum(widths))]
        blocks = fused_adapters.to_ours(down, up, widths=widths, rank=rank)
        for path, pair in zip(linear.paths, blocks, strict=True):
            if pair is not None:
                for leaf, array in zip(("lora_a", "lora_b"), pair, strict=True):
                    stacked = model.num_layers, -1, *array.shape[1:]
                    experts = linear.key.stacked == 2
                    array = array.reshape(stacked) if experts else array
                    adapters[f"layers/{path}/{leaf}"] = _float32(array)
    nested = traverse_util.unflatten_dict(adapters, sep="/")
    adapted = tuple(paths(nested))
    modules = ("*",) if set(adapted) == set(sizes) else adapted
    return LoRA(rank=rank, alpha=float(alpha), modules=modules), nested


def _rank_and_alpha(config: Mapping[str, Any], tensor: str) -> tuple[int, float]:
    """Returns a module's rank and alpha, matching patterns as PEFT does."""
    name = tensor.removeprefix(fused_adapters.PREFIX).removesuffix(".lora_A.weight")

    def of(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return default

    return (
        of(config.get("rank_pattern"), config["r"]),
        of(config.get("alpha_pattern"), config["lora_alpha"]),
    )


def _supported(config: Mapping[str, Any]) -> None:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type = {config.get('peft_type')!r}")
    for option in ("r", "lora_alpha"):
        if not isinstance(config.get(option), int | float):
            problems.append(f"{option} = {config.get(option)!r}")
    for option, value in config.items():
        plain = _PLAIN.get(option, ())
        if option not in _READ and value and value not in plain:
            problems.append(f"{option} = {value!r}")
    trained_modules = set(config.get("modules_to_save") or ())
    heads = {"classifier", "score"} if config.get("task_type") == "SEQ_CLS" else set()
    if trained_modules - heads:
        problems.append(f"modules_to_save = {sorted(trained_modules)!r}")
    if problems:
        raise InputError(
            f"{_CONFIG}: expected adapters W + (alpha / rank) · A B of linear layers "
            f"and nothing else, got {', '.join(problems)}, which is not implemented; "
            f"merge them into the base with PEFT and load that"
        )


def _check_base(recorded: str | None, base: Frozen) -> None:
    fingerprint = frozen.source_fingerprint_of(base, fetch=processes.whole).root
    if recorded not in (None, fingerprint):
        raise InputError(
            f"expected the base that they were trained over, fingerprint {recorded}, "
            f"got one with {fingerprint}; load that checkpoint, in the same dtype"
        )


def _float32(array: np.ndarray) -> jax.Array:
    return jnp.array(array, jnp.float32)


def _number(x: float) -> float:
    """Returns an int for an integral number, as PEFT writes alphas."""
    return int(x) if float(x).is_integer() else x
