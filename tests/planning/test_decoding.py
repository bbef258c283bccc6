"""The cost of a decoded token by hand, from a model's published sizes."""

import dataclasses
from typing import Any

import jax
import planned
import pytest

from rlhf_jax import decoder
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import AUTO, WITH_POLICY, Place
from rlhf_jax.models import config as model_config
from rlhf_jax.models.families import registry
from rlhf_jax.planning import chips, decoding, model_flops
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.plan import job
from rlhf_jax.train.rollouts import fastest

LLAMA = registry.KNOWN["llama-3.1-8b"]
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
NUMBERS = 32 * LAYER + 128_256 * 4096


def token(data, tensor):
    model = dataclasses.replace(LLAMA, dtype="bfloat16")
    mesh = MeshShape(data=data, tensor=tensor)
    return decoding.token(model, mesh=mesh, rows=64, columns=2048, weight_bytes=2)


def test_weights_and_cache_are_read_once():
    assert decoding.matrix_numbers(LLAMA, rows=8) == NUMBERS
    apart, together = token(8, 1), token(1, 8)
    cache = 32 * 2 * 8 * 128 * 2 * 64 * 2048 // 8
    assert (apart.weights, apart.cache) == (2 * NUMBERS, cache)
    assert (together.weights, together.cache) == (2 * NUMBERS // 8, cache)


def read_of(params, *, model):
    """Elements of a tree that a token multiplies with, by the tree itself."""
    tables = {"tokens", "positions", "per_layer"}  # of which a token reads a row
    matrices = {
        "layers": [x for x in jax.tree.leaves(params["layers"]) if len(x.shape) > 2],
        "embed": [
            x
            for name, tree in params["embed"].items()
            for x in jax.tree.leaves(tree)
            if name not in tables and len(x.shape) > 1
        ],
        "head": jax.tree.leaves(params.get("head", params["embed"]["tokens"])),
    }
    return {name: sum(x.size for x in own) for name, own in matrices.items()}


# One of each family: layers of several kinds take seconds to trace.
QUICK = {
    *("gemma-2-2b", "gemma-3-1b", "gemma-4-e2b", "gpt-oss-20b", "gpt2"),
    *("granite-4.0-350m", "llama-3.2-1b", "mistral-7b", "mixtral-8x7b", "olmo-2-1b"),
    *("phi-3-mini-4k", "pythia-160m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-30b-a3b"),
    *("qwen3.5-4b", "smollm3-3b"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(registry.KNOWN)
    ],
)
def test_every_matrix_of_the_tree_is_read_once(name):
    """With enough rows each expert is read, too."""
    model = registry.KNOWN[name]
    read = read_of(decoder.shapes(model), model=model)
    assert decoding.matrix_numbers(model, rows=10**6) == sum(read.values())
    assert (read["embed"] > 0) == (model.per_layer_width is not None)


def test_only_devices_that_decode_together_exchange_anything():
    apart, together = token(8, 1), token(1, 8)
    assert (apart.sent, apart.collectives) == (0, 0)
    sums, activations = 2 * 32 + 1, 64 * 4096 * 2
    logits = 64 * 128_256 * 4 / 8
    assert together.sent == (2 * sums * activations + logits) * 7 / 8
    assert together.collectives == sums + 1


def test_seconds_are_those_of_memory_and_of_every_collective():
    h100 = chips.named("h100")
    apart, together = token(8, 1), token(1, 8)
    assert apart.seconds(h100) == (apart.weights + apart.cache) / 3.35e12
    memory = (together.weights + together.cache) / 3.35e12
    expected = memory + 66 * 6.6e-6
    assert together.seconds(h100) == pytest.approx(expected)


def test_by_hand_a_column_is_read_from_when_it_is_filled():
    """Of 3 + 5 columns, 4 to 7 are read after the first token: 5.5 on average."""
    model = dataclasses.replace(LLAMA, dtype="bfloat16")
    column = 32 * 2 * 8 * 128 * 2

    def least(mesh, *, cached=True, model=model):
        return decoding.least_bytes(
            model,
            mesh=mesh,
            rows=64,
            prompt=3,
            turns=4,
            weight_bytes=2,
            cached=cached,
        )

    cache = column * 64 * 5.5
    assert least(MeshShape()) == 2 * NUMBERS + cache
    assert least(MeshShape(), cached=False) == 2 * NUMBERS
    # Copies are read whole; all other axes share the weights, and all share the rows.
    shared = least(MeshShape(data=2, fsdp=2, context=2, tensor=4))
    assert shared == 2 * NUMBERS / 16 + cache / 32
    # Eight heads of keys and values: sixteen devices have each of them twice.
    assert least(MeshShape(tensor=16)) == 2 * NUMBERS / 16 + cache / 8
    # A window of 5 is full after two of the turns: below their mean, 4.75.
    all_layers = (True,) * model.num_layers
    windowed = dataclasses.replace(model, sliding_window=5, local_layers=all_layers)
    at_least = 2 * NUMBERS + column * 64 * 4.5
    assert least(MeshShape(), model=windowed) == at_least


def test_shared_layers_read_a_cache_again():
    """Gemma 4 E2B: 28 of 35 layers see 512 columns, by a head of 256; 7 see 2048."""
    model = dataclasses.replace(registry.KNOWN["gemma-4-e2b"], dtype="bfloat16")
    read = decoding.token(
        model, mesh=MeshShape(), rows=64, columns=2048, weight_bytes=2
    )
    assert read.cache == 2 * 2 * 64 * (28 * 256 * 512 + 7 * 512 * 2048)


def test_experts_that_rows_meet_are_read_once():
    """Qwen3-30B-A3B: in each of 48 layers a row uses 8 of 128 experts."""
    model = registry.KNOWN["qwen3-30b-a3b"]
    expert = 48 * 3 * 2048 * 768
    others = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128) + 151_936 * 2048
    for rows, met in {1: 8, 16: 128 * (1 - (15 / 16) ** 16), 4096: 128}.items():
        assert decoding.expert_numbers(model, rows=rows) == pytest.approx(met * expert)
        numbers = decoding.matrix_numbers(model, rows=rows)
        assert numbers == pytest.approx(met * expert + others, abs=1)
    assert decoding.expert_numbers(model) == 128 * expert
    assert decoding.expert_numbers(LLAMA, rows=2) == 0
    # 64 rows on four copies of four chips: a copy's 16 rows are decoded together.
    mesh = MeshShape(data=4, expert=2, tensor=2)
    read = decoding.least_bytes(
        model, mesh=mesh, rows=64, prompt=3, turns=1, weight_bytes=2, cached=False
    )
    numbers = decoding.matrix_numbers(model, rows=16)
    assert read == 2 * numbers / 4


@pytest.mark.slow
def test_experts_are_read_beside_the_mlp():
    """Gemma 4 26B-A4B: 25 local layers, and 5 whose values are their keys."""
    model = registry.KNOWN["gemma-4-26b-a4b"]
    expert = 30 * 3 * 2816 * 704
    mlp = 30 * (3 * 2816 * 2112 + 2816 * 128)
    local, everything = 2816 * 256 * (2 * 16 + 2 * 8), 2816 * 512 * (2 * 16 + 2)
    attention = 25 * local + 5 * everything
    head = 262_144 * 2816
    for rows, met in {1: 8, 4096: 128}.items():
        numbers = decoding.matrix_numbers(model, rows=rows)
        assert numbers == met * expert + mlp + attention + head
    texts = [Text(prompt=0, response=1)]
    pairs = 4.0 * 16 * (25 * 256 + 5 * 512)
    flops = model_flops.forward(model, texts, head=True)
    assert flops == 2 * (8 * expert + mlp + attention + head) + pairs
    # The sums of attention, MLP and experts are apart: each is normed.
    model = dataclasses.replace(model, dtype="bfloat16")
    read = decoding.token(
        *(model,), mesh=MeshShape(tensor=2), rows=1, columns=8, weight_bytes=2
    )
    assert read.collectives == 3 * 30 + 2


@pytest.mark.slow
def test_a_plan_tells_experts_that_are_read_and_the_record_of_them(monkeypatch):
    """16 rows of 6 + 4 columns; two layers of 8 experts, of which a token uses 2."""
    shape = dataclasses.replace(
        LLAMA,
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=16,
        head_dim=8,
        experts=model_config.Experts(8, 2),
    )
    monkeypatch.setitem(registry.KNOWN, "mixture", shape)
    words = "--placement.policy=data=4,expert=2", "--placement.sampler=policy"
    plain = planned.work_of("grpo", *words, path="mixture")
    assert "routing record" not in plain.within
    work = planned.work_of("grpo", *words, "--routing-replay=sampler", path="mixture")
    assert work.within["routing record"] == 16 * 10 * 2 * 2 * 4
    work_of_centred = planned.work_of("grpo", "--surrogate=centred,top_k=9")
    # An id and a log-prob each.
    assert work_of_centred.within["likeliest tokens"] == 16 * 10 * 9 * (4 + 4)
    sampling, *others = work.programs
    assert {one.expert_bytes for one in others} == {0}
    # Four copies of two devices: 4 rows of a copy meet some of 8 experts of a layer,
    # in each of three turns.
    met = 8 * (1 - (3 / 4) ** 4)
    assert sampling.expert_bytes == pytest.approx(
        3 * 4 * 2 * met * 3 * 32 * 16 / 2, rel=1e-6
    )
    assert sampling.expert_bytes < sampling.least_bytes


WIDE = {"vocab": 32_768, "width": 2048, "layers": 2, "heads": 8}


def run(*words, **shape):
    """(config, options, target) of a run on eight chips."""
    path = planned.model(**WIDE | shape)
    own = () if any("policy" in w for w in words) else ("--placement.policy=fsdp=8",)
    config, options = planned.parsed("grpo", *own, *words, path=path, chip="h100")
    return config, options, planned.target_of(config, options)


def place(config: Any):
    return config.placement.sampler


def placed(*words, **shape):
    config, options, target = run(*words, **shape)
    return job.Job(options, target).placed(config)


def layouts(config, options, target):
    """Every mesh on which the run could sample."""
    mesh = target.mesh
    models = shapes.of_run(
        config,
        meshes=Meshes(mesh, mesh, mesh),
        start=job.Job(options, target).start_of(config),
    )
    return [
        fastest.layout(config, models, one, mesh=mesh, chip=target.chip, prompt=6)
        for one in fastest.candidates(config, models.recipe.model)
    ]


def test_a_sampler_goes_where_a_token_takes_the_least():
    config, options, target = run()
    seconds = {one.mesh: one.seconds for one in layouts(config, options, target)}
    assert [*seconds] == [MeshShape(data=8 // n, tensor=n) for n in (1, 2, 4, 8)]
    placed, line = job.Job(options, target).placed(config)
    best = min(seconds, key=lambda one: seconds[one])
    assert place(placed) == Place(mesh=best)
    assert line is not None
    assert "ms per token at the least" in line


def test_chips_that_are_far_apart_do_not_decode_together():
    config, options, target = run()
    start = job.Job(options, target).start_of(config)
    near = list(fastest.candidates(config, start.model, per_node=2))
    assert near == [MeshShape(data=8), MeshShape(data=4, tensor=2)]


def test_what_a_mesh_does_not_divide_is_not_sampled_on_it():
    config, _ = placed(positions=1022)  # learned ones, which tensor shards
    assert config.placement.sampler == Place(mesh=MeshShape(data=4, tensor=2))


def test_each_batch_that_is_ahead_has_a_policy_of_its_own():
    one, three = (layouts(*run(f"--max-staleness={ahead}")) for ahead in (1, 3))
    matrices = 2 * 12 * 2048**2 + (32_768 + 1024) * 2048
    for least, most in zip(one, three, strict=True):
        policy = 4 * matrices / least.mesh.tensor
        assert most.bytes - least.bytes == pytest.approx(2 * policy, rel=5e-3)
        assert most.seconds == least.seconds


def test_a_place_that_is_named_stays():
    config, line = placed("--placement.sampler=policy")
    assert (place(config), line) == (WITH_POLICY, None)
    config, line = placed("--placement.sampler=data=2,tensor=4")
    assert place(config) == Place(mesh=MeshShape(data=2, tensor=4))
    assert line is None


def test_samplers_that_need_it_stay_with_the_policy():
    config, line = placed("--environment=calculator", "--verifier=None")
    assert (place(config), line) == (WITH_POLICY, None)


def test_where_no_chip_is_known_or_none_has_room_it_stays_with_the_policy():
    config, options, target = run()
    assert place(config) == AUTO
    small = dataclasses.replace(target.chip, memory=2**20)
    for chip in (None, small):
        changed = target._replace(chip=chip)
        config_of, line = job.Job(options, changed).placed(config)
        assert (place(config_of), line) == (WITH_POLICY, None)


def test_what_a_device_gives_to_programs_counts_before_the_chip_s_table():
    config, options, target = run()
    mesh = target.mesh
    start = job.Job(options, target).start_of(config)
    models = shapes.of_run(config, meshes=Meshes(mesh, mesh, mesh), start=start)
    known = {"mesh": mesh, "prompt": 6}
    least = min(one.bytes for one in layouts(config, options, target))
    for memory, moves in ((None, True), (int(least / 0.9) + 1, True), (least, False)):
        among = fastest.Devices([*mesh.devices.flat], target.chip, memory)
        config_of, line = fastest.placed(config, models, among, **known)
        assert (place(config_of) != WITH_POLICY, line is not None) == (moves, moves)


def test_the_mesh_of_the_policy_itself_brings_nothing():
    # So small that any exchange takes longer than its weights.
    config, line = placed("--placement.policy=data=8", vocab=256, width=64)
    assert line is not None
    assert line.startswith("Sampling on data=8: ")
    assert place(config) == WITH_POLICY
