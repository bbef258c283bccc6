"""Memory that is told before anything is allocated, against figures by hand."""

import dataclasses
import json
import re
import typing

import jax
import pytest
import tiny
from tiers import one_in

from rlhf_jax import hf, rewards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import memory, run_shape, workload
from rlhf_jax.planning.run_shape import Options
from rlhf_jax.roles.reference import storage

MIB = 2**20
TINY = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 24,
    "prompt_length": 6,
    "max_new_tokens": 4,
    "batch_size": 8,
}
WAYS = [*run_shape.WAYS, "none"]


def lines(options, of=memory.models):
    return {line.what: line for line in of(options)}


def gpt2_small(vocab):
    """Parameters, layer by layer (Radford et al. 2019, table 2)."""
    width = 768
    norms = 2 * 2 * width
    attention = width * 3 * width + 3 * width + width * width + width
    mlp = width * 4 * width + 4 * width + 4 * width * width + width
    return vocab * width + 1024 * width + 12 * (norms + attention + mlp) + 2 * width


def test_gpt2_small_by_hand_and_nothing_is_allocated():
    before = {id(array) for array in jax.live_arrays()}
    kept = jax.live_arrays()  # so that none of other tests goes, and no id is new again
    found = lines(Options())
    assert {id(array) for array in jax.live_arrays()} <= before
    del kept
    assert gpt2_small(50257) == 124_439_808
    params = 4 * gpt2_small(50304)  # the vocabulary is padded to a multiple of 128
    score = 4 * (768 + 1)
    count = 4  # of updates, i32
    assert found == {
        "policy": ("policy", params, 0),
        "policy's optimizer": ("policy's optimizer", 2 * params + count, 0),
        "critic": ("critic", params + score, 0),
        "critic's optimizer": (
            "critic's optimizer",
            2 * (params + score) + count,
            0,
        ),
        "reference": ("reference", params, 0),
        "reward model": ("reward model", params + score, 0),
    }


def test_lora_by_hand():
    """Adapters of rank r at query, key, value, output, up and down of each layer."""
    rank, width = 8, 768
    found = lines(
        Options(policy="lora", lora_rank=rank, reference="base", reward="base")
    )
    adapters = 4 * 12 * rank * (4 * (width + width) + 2 * (width + 4 * width))
    score = 4 * (width + 1)
    assert found["base of the adapters"].device == 4 * gpt2_small(50304)
    assert found["policy"].device == adapters
    assert found["policy's optimizer"].device == 2 * adapters + 4
    assert found["critic"].device == adapters + score
    assert found["reference, the base"].device == 0
    assert found["reward model"].device == adapters + score


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("way", one_in(2, WAYS))
def test_a_storage_takes_what_its_arrays_take(way):
    found = lines(Options(**TINY, reference=way, reward=way))
    params = tiny.params(tiny.GPT2)
    scorer = rewards.init(jax.random.key(0), params, model=tiny.GPT2)
    for line, tree in (("reference", params), ("reward model", scorer)):
        size = 0
        if way != "none":
            held = storage.store(tree, **run_shape.WAYS[way])
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
        on_host = way.startswith("host")
        assert found[line] == (line, 0 if on_host else size, size if on_host else 0)


def test_every_storage_has_a_name_on_the_command_line():
    assert typing.get_args(run_shape.Way) == tuple(run_shape.WAYS)


def test_the_cache_by_hand():
    """Keys and values, L layers, B rows, S columns, K heads of head_dim."""
    found = workload.cache_bytes(tiny.LLAMA, rows=3, columns=10)
    assert found == 2 * 2 * 3 * 10 * 2 * 8 * 4
    model = dataclasses.replace(tiny.LLAMA, cache_pages=6, page_size=4)
    assert workload.cache_bytes(model, rows=3, columns=10) == 2 * 2 * 24 * 2 * 8 * 4
    assert workload.cache_bytes(model, rows=2, columns=10) == 2 * 2 * 20 * 2 * 8 * 4
    # Of MIXED two layers keep a window of 4 for each row, one has pages.
    mixed = dataclasses.replace(tiny.MIXED, cache_pages=6, page_size=4)
    found = workload.cache_bytes(mixed, rows=3, columns=10)
    assert found == 2 * (2 * 3 * 4 + 24) * 12 * 4
    half = workload.cache_bytes(tiny.bfloat16(tiny.GPT2), rows=3, columns=10)
    assert half == 2 * 2 * 3 * 10 * 16 * 2


@pytest.fixture(scope="module")
def whole():
    return lines(Options(**TINY), of=memory.memory)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_held_adds_up(whole):
    models = sum(line.device for line in memory.models(Options(**TINY)))
    assert whole["held throughout"].device == models
    assert whole["KV cache"].device == 2 * 2 * 8 * 10 * 16 * 4
    programs = [
        whole["KV cache"].device + whole["activations of sampling"].device,
        whole["activations of the reward model"].device,
        whole["activations of the reference"].device,
        whole["activations of scoring and learning"].device,
    ]
    assert min(programs) > 0
    assert whole["held at most"].device == models + max(programs)


@pytest.mark.long
def test_activations_grow_with_the_batch_and_shrink_with_micro_batches(whole):
    learning = "activations of scoring and learning"
    twice = lines(Options(**{**TINY, "batch_size": 16}), of=memory.memory)
    assert twice[learning].device > 1.5 * whole[learning].device
    in_parts = Options(**{**TINY, "batch_size": 16}, micro_batch_size=4)
    assert lines(in_parts, of=memory.memory)[learning].device < twice[learning].device


@pytest.mark.long
@pytest.mark.parametrize("base", ["base", "none"])
def test_a_run_of_adapters_is_planned(base):
    options = Options(**TINY, policy="lora", lora_rank=2, reference=base, reward=base)
    found = lines(options, of=memory.memory)
    held = sum(line.device for line in memory.models(options))
    assert found["held at most"].device > held == found["held throughout"].device
    assert ("activations of the reward model" in found) == (base == "base")


def test_a_checkpoint_s_shape_is_read_from_its_config_alone(tmp_path):
    hf.save(tmp_path / "model", tiny.LLAMA, tiny.params(tiny.LLAMA))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    options = Options(model=str(tmp_path / "shape"), dtype="bfloat16")
    assert run_shape.model_of(options) == tiny.bfloat16(tiny.LLAMA)
    expected = storage.nbytes(tiny.params(tiny.LLAMA))
    assert lines(options)["policy"].device == expected


@pytest.mark.long
@pytest.mark.slow
def test_the_table(capsys):
    memory.run(Options(**{**TINY, "batch_size": 2}, reference="none", reward="none"))
    text = capsys.readouterr().out
    assert "Memory of PPO on GPT-2 of 2 layers, on one cpu [MiB]" in text
    assert re.search(r"│ held at most +│ +\d+ │ +0 │", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "base"}, "expected --policy lora with a reference or reward"),
        ({"reward": "base"}, "got --policy full, which has no base"),
        ({"batch_size": 0}, "batch_size: expected a finite number above 0, got 0"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.slow
def test_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="expected a folder with a checkpoint"):
        memory.models(Options(model=str(tmp_path / "none")))
    for topology, message in {
        "abacus": r"expected a chip and its shape, .* got 'abacus'; name the chip",
        # With libtpu or without.
        "abacus:2x2": r"(?s)'abacus:2x2'.*(choose another|extra 'plan')",
    }.items():
        with pytest.raises(InputError, match=message):
            memory.memory(dataclasses.replace(Options(**TINY), topology=topology))
    with pytest.raises(InputError, match="num_minibatches to divide the 8 rows"):
        memory.memory(Options(**TINY, num_minibatches=3))
