"""Adapters in PEFT's layout: recorded outputs of PEFT, round trips, bad input."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toys
from places import FIXTURES
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiers import one_in

from rlhf_jax import frozen, hf, lora, rewards
from rlhf_jax.checkpoints import peft
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA

BASE_OF = {
    "gpt2_lora": "gpt2",
    "llama_lora": "llama_sharded",
    "gpt2_lora_reward": "gpt2",
}
CAUSAL = ("gpt2_lora", "llama_lora")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases():
    """(model, frozen base) of each fixture."""
    loaded = {name: hf.load(FIXTURES / name) for name in set(BASE_OF.values())}
    frozen_of = {name: (model, toys.freeze(p)) for name, (model, p) in loaded.items()}
    return {name: frozen_of[base] for name, base in BASE_OF.items()}


def texts(name):
    """The texts of the recorded adapters, without the longest."""
    recorded = np.load(FIXTURES / BASE_OF[name] / "recorded.npz")
    return recorded["left_tokens"][1:], recorded["left_mask"][1:]


def logits(params, *, model, name):
    tokens, mask = texts(name)
    return np.asarray(toys.logits(params, model=model, tokens=tokens, mask=mask))[mask]


def recorded(name, what):
    return np.load(FIXTURES / name / "recorded.npz")[what]


def edited(tmp_path, name, *, options=None, tensors=None):
    """Copies a fixture with options of its config or all tensors replaced."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "edited")
    if options is not None:
        content = json.loads((folder / CONFIG).read_text()) | options
        (folder / CONFIG).write_text(json.dumps(content))
    if tensors is not None:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def save(path, adapters, *, model, options, base):
    root = frozen.source_fingerprint_of(base).root
    peft.save(path, model=model, adapters=adapters, lora=options, base_fingerprint=root)


def assert_same(output, expected):
    assert jax.tree.structure(output) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(output, expected)


# What PEFT wrote.


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, CAUSAL[::-1]))
def test_logits_are_those_of_peft(bases, name):
    model, base = bases[name]
    options, adapters = peft.load(FIXTURES / name, model=model, base=base)
    expected = recorded(name, "logits")
    plain = logits(base.stored, model=model, name=name)
    assert abs(plain - expected).max() > 1
    attached = lora.attach(base.stored, adapters, lora=options)
    merged = lora.merge(base.stored, adapters, lora=options)
    for params in (attached, merged):
        output = logits(params, model=model, name=name)
        np.testing.assert_allclose(output, expected, atol=1e-4)


def test_scores_are_those_of_peft(bases):
    name = "gpt2_lora_reward"
    model, base = bases[name]
    options, adapters = peft.load(FIXTURES / name, model=model, base=base)
    full = lora.attach(base.stored, adapters, lora=options)
    tokens, mask = texts(name)
    scores = rewards.sequence_scores(full, model=model, tokens=tokens, mask=mask)
    np.testing.assert_allclose(scores, recorded(name, "scores"), atol=1e-4)


def test_how_they_were_made_is_read(bases):
    def options_of(name):
        model, base = bases[name]
        return peft.load(FIXTURES / name, model=model, base=base)[0]

    qkv = ("attention/query", "attention/key", "attention/value")
    assert options_of("gpt2_lora") == LoRA(rank=4, alpha=6.0, modules=("*",))
    assert options_of("llama_lora") == LoRA(rank=3, alpha=12.0, modules=("*",))
    options = options_of("gpt2_lora_reward")
    assert (options.rank, options.alpha, set(options.modules)) == (2, 2.0, set(qkv))


@pytest.mark.parametrize("name", BASE_OF)
def test_what_was_read_is_written_as_it_was(tmp_path, bases, name):
    """Tensors are equal: a shared A of c_attn is again written once."""
    model, base = bases[name]
    options, adapters = peft.load(FIXTURES / name, model=model, base=base)
    save(tmp_path / "out", adapters, model=model, options=options, base=base)
    written, read = load_file(tmp_path / "out" / WEIGHTS), FIXTURES / name / WEIGHTS
    assert_same(written, load_file(read))
    ours = json.loads((tmp_path / "out" / CONFIG).read_text())
    theirs = json.loads((FIXTURES / name / CONFIG).read_text())
    # Patterns are longer than theirs, and there is no dropout to go on with.
    apart = ("target_modules", "lora_dropout", "base_model_name_or_path")
    apart += ("modules_to_save",)  # ours names the head that there is
    same = {option: value for option, value in ours.items() if option not in apart}
    assert same == {option: theirs[option] for option in same}


# What we write.


WRITTEN = {
    "all": LoRA(rank=3, alpha=5.5),
    "query-value": LoRA(
        rank=2, alpha=2.0, modules=("attention/query", "attention/value")
    ),
    "key-mlp": LoRA(rank=1, alpha=7.0, modules=("attention/key", "mlp/*")),
    "output": LoRA(rank=2, modules=("attention/output",)),
}
SOON = {("query-value", "llama"), ("key-mlp", "llama")}


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("options", "model"),
    [
        pytest.param(
            options,
            model,
            id=f"{name}-{family}",
            marks=[pytest.mark.slow] * ((name, family) not in SOON),
        )
        for name, options in WRITTEN.items()
        for family, model in zip(tiny.NAMES, tiny.BOTH, strict=True)
    ],
)
def test_what_is_written_is_read_back_to_the_bit(tmp_path, model, options):
    base = toys.freeze(tiny.params(model))
    start = lora.init(jax.random.key(0), model=model, lora=options)
    for adapters in (start, toys.perturbed(start, seed=0, scale=0.2)):
        path = tmp_path / str(id(adapters))
        save(path, adapters, model=model, options=options, base=base)
        read_back, same = peft.load(path, model=model, base=base)
        assert_same(same, adapters)
        assert (read_back.rank, read_back.alpha) == (options.rank, options.alpha)
        every = lora.targets(model=model, lora=options)
        assert lora.targets(model=model, lora=read_back) == every


@pytest.mark.slow
def test_layers_of_several_kinds_have_one_name_and_come_back(tmp_path):
    """Gemma 4 E2B: local, global and shared layers are all "self_attn.q_proj"."""
    model, params = hf.load(FIXTURES / "gemma4_e2b", dtype="float32")
    options, base = LoRA(rank=2, alpha=3.0), toys.freeze(params)
    start = lora.init(jax.random.key(0), model=model, lora=options)
    adapters = toys.perturbed(start, seed=0, scale=0.2)
    save(tmp_path / "out", adapters, model=model, options=options, base=base)
    names = json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"]
    assert names.count("self_attn.q_proj") == 1
    again, loaded = peft.load(tmp_path / "out", model=model, base=base)
    assert again == options
    chex.assert_trees_all_equal(loaded, adapters)


def test_three_adapters_of_gpt2_become_one_of_three_times_the_rank(tmp_path):
    """lora_B · lora_A is the three changes side by side, with their scales."""
    model, options = tiny.GPT2, LoRA(rank=2, alpha=3.0)
    base = toys.freeze(tiny.params(model))
    start = lora.init(jax.random.key(0), model=model, lora=options)
    adapters = toys.perturbed(start, seed=0, scale=0.2)
    save(tmp_path / "out", adapters, model=model, options=options, base=base)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["rank_pattern"] == {"attn.c_attn": 6}
    assert config["alpha_pattern"] == {"attn.c_attn": 9}
    assert config["fan_in_fan_out"]
    assert set(config["target_modules"]) == {
        *("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    attention = adapters["layers"]["attention"]
    for layer in range(model.num_layers):
        at = f"base_model.model.transformer.h.{layer}.attn.c_attn"
        theirs = tensors[f"{at}.lora_B.weight"] @ tensors[f"{at}.lora_A.weight"]
        ours = [
            attention[name]["lora_a"][layer] @ attention[name]["lora_b"][layer]
            for name in ("query", "key", "value")
        ]
        np.testing.assert_allclose(theirs.T, np.concatenate(ours, axis=1), atol=1e-6)


def test_a_reward_model_s_score_is_written_beside_its_adapters(tmp_path, bases):
    model, base = bases["gpt2_lora_reward"]
    options = LoRA(rank=2, modules=("mlp/up",))
    params = rewards.from_base(jax.random.key(0), model=model, lora=options)
    params["score"]["bias"] = jnp.float32(-0.7)
    save(tmp_path / "out", params, model=model, options=options, base=base)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    _, same = peft.load(tmp_path / "out", model=model, base=base)
    assert_same(same, params)


@pytest.mark.slow
def test_the_base_is_known_by_its_fingerprint(tmp_path, bases):
    """In any storage; the file for PEFT has only PEFT's own fields."""
    model, base = bases["llama_lora"]
    options, adapters = peft.load(FIXTURES / "llama_lora", model=model, base=base)
    save(tmp_path / "out", adapters, model=model, options=options, base=base)
    with safe_open(tmp_path / "out" / WEIGHTS, framework="numpy") as file:
        root = file.metadata()["base_fingerprint"]
    assert root == frozen.source_fingerprint_of(base).root
    assert "fingerprint" not in (tmp_path / "out" / CONFIG).read_text()

    small = frozen.freeze(base.stored, dtype="int8")
    assert_same(peft.load(tmp_path / "out", model=model, base=small)[1], adapters)
    moved = jax.tree.map(jnp.copy, base.stored)
    moved["final_norm"]["scale"] = moved["final_norm"]["scale"].at[3].add(1e-6)
    other = toys.freeze(moved)
    with pytest.raises(InputError, match=f"{root}, got one with") as error:
        peft.load(tmp_path / "out", model=model, base=other)
    assert frozen.source_fingerprint_of(other).root in str(error.value)
    peft.load(FIXTURES / "llama_lora", model=model, base=other)  # PEFT's own says none


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3', which is not implemented"),
        ({"use_dora": True}, "got use_dora = True, which is not implemented; merge"),
        ({"use_rslora": True, "bias": "all"}, "bias = 'all', use_rslora = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"an_option_of_tomorrow": {"x": 1}}, "an_option_of_tomorrow = {'x': 1}"),
        ({"r": None}, "got r = None"),
        ({"alpha_pattern": {"c_fc": 7}}, "mlp.c_fc: expected rank 4 and alpha 6; got "),
        (
            {"rank_pattern": {"h.1.attn.c_proj|h.0.attn.c_proj": 2}},
            "attn.c_proj: expected rank 4 and alpha 6; got 2 and 6",
        ),
        (
            {"rank_pattern": {"c_attn": 8}, "alpha_pattern": {"c_attn": 12}},
            "attn.c_attn: expected rank 4 and alpha 6, or 3 times both; got 8 and 12",
        ),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path, bases, options, message):
    model, base = bases["gpt2_lora"]
    folder = edited(tmp_path, "gpt2_lora", options=options)
    with pytest.raises(InputError, match=message) as error:
        peft.load(folder, model=model, base=base)
    assert str(folder) in str(error.value)


def test_every_missing_unknown_and_misshapen_tensor_is_named(tmp_path, bases):
    model, base = bases["gpt2_lora"]
    tensors = load_file(FIXTURES / "gpt2_lora" / WEIGHTS)
    at = "base_model.model.transformer.h"
    del tensors[f"{at}.1.mlp.c_fc.lora_B.weight"]
    tensors[f"{at}.2.mlp.c_fc.lora_B.weight"] = np.zeros((48, 4), np.float32)
    tensors[f"{at}.0.mlp.c_proj.lora_A.weight"] = np.zeros((48, 4), np.float32)
    tensors["base_model.model.score.weight"] = np.zeros((1, 32), np.float32)
    with pytest.raises(InputError) as error:
        peft.load(
            edited(tmp_path, "gpt2_lora", tensors=tensors), model=model, base=base
        )
    assert set(str(error.value).split("\n  ")[1:]) == {
        f"missing: {at}.1.mlp.c_fc.lora_B.weight",
        f"unknown: {at}.2.mlp.c_fc.lora_B.weight [48, 4]",
        f"misshapen: {at}.0.mlp.c_proj.lora_A.weight, expected [4, 48], got [48, 4]",
        "unknown: base_model.model.score.weight [1, 32]",
    }


def test_adapters_that_are_not_finite_are_named(tmp_path, bases):
    model, base = bases["gpt2_lora_reward"]
    tensors = load_file(FIXTURES / "gpt2_lora_reward" / WEIGHTS)
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"
    tensors[name][[0, 1], [3, 31]] = [np.nan, np.inf]
    tensors["base_model.model.score.weight"][0, 0] = np.nan
    folder = edited(tmp_path, "gpt2_lora_reward", tensors=tensors)
    with pytest.raises(InputError, match=r"adapters .*: expected finite") as error:
        peft.load(folder, model=model, base=base)
    assert str(error.value).splitlines()[1:-1] == [
        f"  base_model.model.score.weight in {WEIGHTS}: 1 NaN and 0 infinite of 32 "
        "entries",
        f"  {name} in {WEIGHTS}: 1 NaN and 1 infinite of 64 entries",
    ]
    tensors = load_file(FIXTURES / "gpt2_lora_reward" / WEIGHTS)
    metadata = {"format": "pt", "score_bias": "nan"}
    save_file(tensors, folder / WEIGHTS, metadata=metadata)
    with pytest.raises(
        InputError, match=r"score_bias in .*: 1 NaN and 0 infinite of 1 "
    ):
        peft.load(folder, model=model, base=base)


def test_an_adapter_of_another_family(bases):
    model, base = bases["llama_lora"]
    with pytest.raises(InputError, match="of this llama with 2 layers, got 16 tensors"):
        peft.load(FIXTURES / "gpt2_lora", model=model, base=base)


def test_one_a_of_a_higher_rank_is_no_three_blocks(tmp_path, bases):
    model, base = bases["gpt2_lora"]
    tensors = load_file(FIXTURES / "gpt2_lora" / WEIGHTS)
    rng = np.random.default_rng(0)
    for name in tensors:
        if "c_attn.lora_A" in name:
            tensors[name] = rng.normal(size=(12, 32)).astype(np.float32)
        if "c_attn.lora_B" in name:
            tensors[name] = rng.normal(size=(96, 12)).astype(np.float32)
    options = {"rank_pattern": {"c_attn": 12}, "alpha_pattern": {"c_attn": 18}}
    folder = edited(tmp_path, "gpt2_lora", tensors=tensors, options=options)
    with pytest.raises(InputError, match="expected lora_B of 3 blocks of rank 4"):
        peft.load(folder, model=model, base=base)


def test_files_that_are_not_there(tmp_path, bases):
    model, base = bases["gpt2_lora"]
    with pytest.raises(
        InputError, match=r"expected a folder with adapter_config\.json"
    ):
        peft.load(tmp_path / "missing", model=model, base=base)
    with pytest.raises(InputError, match=r"expected adapter_config\.json, got a fold"):
        peft.load(FIXTURES / "gpt2", model=model, base=base)
    folder = edited(tmp_path, "gpt2_lora")
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(
        InputError, match=r"expected safetensors in adapter_model\.safe"
    ):
        peft.load(folder, model=model, base=base)
    (folder / WEIGHTS).unlink()
    with pytest.raises(
        InputError, match=r"expected adapter_model\.safetensors to be r"
    ):
        peft.load(folder, model=model, base=base)


def test_only_the_model_s_own_adapters_are_saved(tmp_path, bases):
    model, base = bases["gpt2_lora"]
    options = LoRA(rank=2)
    adapters = lora.init(jax.random.key(0), model=model, lora=options)
    with pytest.raises(InputError, match="expected adapters of rank 3 for the layers"):
        save(tmp_path / "out", adapters, model=model, options=LoRA(rank=3), base=base)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"new or empty folder .* is in use"):
        save(tmp_path / "out", adapters, model=model, options=options, base=base)


# Live, where PEFT is installed (extra `parity`); it warns of itself.
quiet = pytest.mark.filterwarnings("ignore::FutureWarning")


def their_logits(model, name):
    torch = pytest.importorskip("torch")
    tokens, mask = texts(name)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(np.cumsum(mask, axis=1) - mask),
        ).logits.numpy()


@quiet
@pytest.mark.parametrize(
    "modules", [("*",), ("attention/query", "attention/value", "mlp/down")]
)
@pytest.mark.parametrize("name", CAUSAL)
def test_peft_computes_the_same_from_what_we_save(tmp_path, bases, name, modules):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("peft")
    import transformers

    model, base = bases[name]
    options = LoRA(rank=3, alpha=4.5, modules=modules)
    start = lora.init(jax.random.key(0), model=model, lora=options)
    adapters = toys.perturbed(start, seed=0, scale=0.2)
    save(tmp_path / "adapters", adapters, model=model, options=options, base=base)
    merged = lora.merge(base.stored, adapters, lora=options)
    hf.save(tmp_path / "merged", model, merged, pad_id=96)
    expected = logits(
        lora.attach(base.stored, adapters, lora=options), model=model, name=name
    )
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(FIXTURES / BASE_OF[name], dtype=torch.float32)
    adapted = theirs.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    whole = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    _, mask = texts(name)
    for folder in (adapted, whole):
        np.testing.assert_allclose(
            their_logits(folder, name)[mask], expected, atol=1e-4
        )


@quiet
def test_peft_gives_the_scores_of_a_reward_model_that_we_save(tmp_path, bases):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("peft")
    import transformers

    name = "gpt2_lora_reward"
    model, base = bases[name]
    options = LoRA(rank=2)
    params = rewards.from_base(jax.random.key(0), model=model, lora=options)
    params = toys.perturbed(params, seed=0, scale=0.2)
    save(tmp_path / "out", params, model=model, options=options, base=base)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        FIXTURES / BASE_OF[name], dtype=torch.float32, num_labels=1, pad_token_id=96
    )
    adapted = theirs.PeftModel.from_pretrained(plain, tmp_path / "out")
    tokens, mask = texts(name)
    full = lora.attach(base.stored, params, lora=options)
    expected = rewards.sequence_scores(full, model=model, tokens=tokens, mask=mask)
    scores = their_logits(adapted, name)[:, 0] + float(params["score"]["bias"])
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.mark.slow
def test_equal_adapters_are_equal_files(tmp_path, bases):
    """Equal to the byte, although safetensors orders metadata randomly."""
    model, base = bases["gpt2_lora"]
    options = LoRA(rank=2, alpha=4.0)
    adapters = lora.init(jax.random.key(0), model=model, lora=options)
    written = set()
    for number in range(12):
        folder = tmp_path / str(number)
        save(folder, adapters, model=model, options=options, base=base)
        written.add((folder / WEIGHTS).read_bytes())
    assert len(written) == 1
    with safe_open(folder / WEIGHTS, "np") as file:
        assert file.metadata() == {
            "format": "pt",
            "base_fingerprint": frozen.source_fingerprint_of(base).root,
        }
