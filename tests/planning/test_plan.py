"""Plans: known shapes, live memory, wrong input, and recorded plans."""

import dataclasses
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import types

import jax
import places
import planned
import pytest
import tiny
from tiers import one_in

from rlhf_jax import batch, decoder
from rlhf_jax.devices import processes
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import AUTO
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import caches
from rlhf_jax.models.families import registry
from rlhf_jax.planning import chips, compiled, gpu_targets, measured, workload
from rlhf_jax.planning.cost import Cost
from rlhf_jax.planning.hlo.exchanges import Collective
from rlhf_jax.planning.measured import Alive, Measured
from rlhf_jax.train import shapes
from rlhf_jax.train.plan import advice, command, job, plan, policy_gradient
from rlhf_jax.train.plan.job import Options

RECORDED = places.RECORDED / "plans"
GIB = 2**30


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


PUBLISHED = [
    # The published counts: Radford et al. 2019 as released, and the model cards.
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-13b", 13_015_864_320),
    ("llama-2-70b", 68_976_648_192),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-8b", 8_190_735_360),
    # As counted in transformers' own models, without vision.
    ("qwen3.5-4b", 4_205_751_296),
    ("qwen3.5-9b", 8_953_803_264),
    ("qwen3.5-27b", 26_895_998_464),
    ("mistral-7b", 7_241_732_096),
    ("pythia-160m", 162_322_944),
    ("pythia-410m", 405_334_016),
    ("pythia-1b", 1_011_781_632),
    ("pythia-1.4b", 1_414_647_808),
    ("pythia-2.8b", 2_775_208_960),
    ("pythia-6.9b", 6_857_302_016),
    ("pythia-12b", 11_846_072_320),
    ("gemma-2-2b", 2_614_341_888),
    ("gemma-2-9b", 9_241_705_984),
    ("gemma-2-27b", 27_227_128_320),
    ("gemma-3-1b", 999_885_952),
    ("gemma-3-4b", 3_880_263_168),
    ("gemma-3-12b", 11_766_034_176),
    ("gemma-3-27b", 27_009_346_304),
    # With `layer_scalar`, which transformers has as a buffer.
    ("gemma-4-e2b", 4_628_569_379),
    ("gemma-4-e4b", 7_463_013_418),
    ("gemma-4-31b", 30_697_345_340),
    ("gemma-4-26b-a4b", 25_233_141_790),
    ("phi-3-mini-4k", 3_821_079_552),
    ("olmo-2-1b", 1_484_916_736),
    ("olmo-2-7b", 7_298_617_344),
    ("olmo-2-13b", 13_716_198_400),
    ("olmo-2-32b", 32_234_279_936),
    ("olmo-3-7b", 7_298_011_136),
    ("olmo-3-32b", 32_233_522_176),
    ("smollm3-3b", 3_075_098_624),
    ("granite-3.3-2b", 2_533_539_840),
    ("granite-3.3-8b", 8_170_864_640),
    ("granite-4.0-350m", 352_379_904),
    ("granite-4.0-1b", 1_631_750_144),
    ("granite-4.0-micro", 3_402_836_480),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("mixtral-8x7b", 46_702_792_704),
    ("gpt-oss-20b", 20_914_757_184),
    ("gpt-oss-120b", 116_829_156_672),
]


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(("name", "parameters"), one_in(4, PUBLISHED))
def test_known_shapes_have_the_published_number_of_parameters(name, parameters):
    assert decoder.num_parameters(registry.KNOWN[name]) == parameters


def test_every_known_shape_is_counted():
    assert [name for name, _ in PUBLISHED] == list(registry.KNOWN)


def test_a_name_that_is_not_known_is_refused_with_the_nearest(monkeypatch):
    def refuse(path):
        raise InputError(f"no checkpoint {path}")

    monkeypatch.setattr(shapes.hf, "model_config", refuse)
    nearest = "^no checkpoint olmo-3-8b; the nearest known name is olmo-3-7b$"
    with pytest.raises(InputError, match=nearest):
        shapes.model_of("olmo-3-8b")
    with pytest.raises(InputError, match=r"known name is gemma-4-26b-a4b$"):
        shapes.model_of("gemma-4-26b")  # closer by its letters: gemma-4-e2b
    for other in ("runs/olmo-3-8b", "x"):
        with pytest.raises(InputError, match=f"^no checkpoint {other}$"):
            shapes.model_of(other)


@pytest.mark.parametrize(
    ("machines", "nodes"),
    [
        ([5, 5, 5, 5], None),  # a process for each GPU of one machine
        ([5, 5, 6, 6], 2),
        ([5, 6, 6, 6], 1),
    ],
)
def test_the_gpus_of_a_node_are_those_of_a_machine(machines, nodes, monkeypatch):
    gpus = [types.SimpleNamespace(process_index=number) for number in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(processes, "machines", lambda: machines)
    assert chips.per_node(chips.CHIPS["h100"]) == nodes


def test_a_gpu_is_not_known_by_the_name_of_another_module():
    assert chips.of_kind("NVIDIA H100 80GB HBM3") == chips.CHIPS["h100"]
    assert chips.of_kind("NVIDIA H200") == chips.CHIPS["h200"]
    assert chips.of_kind("NVIDIA H200 NVL") is None
    rates = {"PCIe": (756e12, 2000e9), "NVL": (835e12, 3900e9)}
    for name, (flops, bandwidth) in rates.items():
        chip = chips.of_kind(f"NVIDIA H100 {name}")
        assert chip is not None
        assert (chip.flops, chip.bandwidth) == (flops, bandwidth)


def test_every_chip_of_the_table_has_a_kind_and_a_source_of_its_own():
    assert len({chip.kind for chip in chips.CHIPS.values()}) == len(chips.CHIPS)
    for name, chip in chips.CHIPS.items():
        assert chips.of_kind(chip.kind) == chip, name
        assert chip.source
        assert chip.is_gpu == gpu_targets.is_gpu(f"{name}:1x8"), name
        assert chip.latency == (6.6e-6 if chip.is_gpu else 1e-6)
    # A device is a core of TPU7x: twice its rates are a chip's.
    core = chips.CHIPS["tpu7x"]
    assert (2 * core.flops, 2 * core.bandwidth) == (2307e12, 7380e9)


@pytest.mark.parametrize("words", [{"topology": "mi300x:1x8"}, {"chip": "mi300x"}])
def test_a_chip_that_nothing_compiles_for_is_refused_with_the_reason(words):
    wanted = {"topology": None, "chip": None} | words
    with pytest.raises(InputError, match=r"'mi300x': neither libtpu nor NVIDIA's plu"):
        measured.target(**wanted, mesh=MeshShape())


def test_nodes_whose_network_has_no_figure_are_planned_one_by_one(monkeypatch):
    monkeypatch.setattr(gpu_targets, "compiler", lambda: "jax-cuda13-pjrt 1")
    devices = jax.devices()[:8]
    monkeypatch.setattr(compiled, "slice_of", lambda *_, **__: devices)
    mesh = MeshShape(fsdp=8)
    assert measured.target("l40s:1x8", chip=None, mesh=mesh).per_node == 8
    with pytest.raises(InputError, match="one node of l40s, for whose network no data"):
        measured.target("l40s:2x4", chip=None, mesh=mesh)


def test_a_v4_is_one_device_of_two_cores(monkeypatch):
    asked = []

    class Description:
        devices: tuple[str, ...] = ()

    def described(**words):
        asked.append(words.get("chip_config_name"))
        return Description()

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", described)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: name)
    for topology in ("v4:2x2x1", "v5p:2x2x1"):
        compiled.slice_of(topology)
    assert asked == ["megacore", None]


def test_a_chip_is_known_by_its_device_kind():
    class Device:
        device_kind = "TPU v5 lite"

    assert chips.of_device(Device()) == chips.CHIPS["v5e"]
    Device.device_kind = "TPU v5"
    assert chips.of_device(Device()) == chips.CHIPS["v5p"]
    assert chips.of_device(jax.devices()[0]) is None


def program(name, reads):
    return workload.Program(name, lambda: None, (), reads, (), "rollout", 0.0)


def test_what_is_alive_is_more_than_a_program():
    resident = {"policy": 10, "critic": 20, "reference": 30}
    sizes = {"argument": 12, "temporary": 5, "output": 11, "alias": 10}
    one = Measured(program("learning", ("policy",)), sizes, None, Cost())
    alive = measured.alive(one, resident)
    assert alive == Alive("learning", 50, 12, 5, 11, 10, total=50 + 12 + 5 + 11 - 10)
    refused = Measured(
        program("sampling", ("policy",)), {"temporary": 99}, "no", Cost()
    )
    assert measured.alive(refused, resident).total == 60 + 99


def test_the_roofline_is_the_slowest_of_three():
    chip = dataclasses.replace(
        chips.CHIPS["v5e"], flops=10.0, bandwidth=5.0, links=2.0, latency=0.5
    )
    cost = Cost(flops=20.0, bytes=15.0)
    cost.collectives[Collective("all-gather", 8, 4)] = 2
    one = Measured(program("learning", ()), {}, None, cost)
    described = measured.described(one, chip)
    seconds = {"products": 2.0, "memory": 3.0, "links": 2 * 6 / 2.0, "network": 0.0}
    seconds["latency"] = 2 * 0.5
    # A token waits for each exchange; an update goes on with other layers.
    assert described["seconds"] == {**seconds, "bound": 7.0}
    update = one._replace(program=one.program._replace(stage="update"))
    assert measured.described(update, chip)["seconds"] == {**seconds, "bound": 6.0}
    slow = dataclasses.replace(chip, latency=4.0)
    assert measured.described(update, slow)["seconds"]["bound"] == 8.0
    gathered = {"kind": "all-gather", "size": 8, "devices": 4, "nodes": 1}
    assert described["collectives"] == [{**gathered, "times": 2, "sent": 12.0}]


def test_gpus_of_several_nodes_have_two_links():
    """4 GPUs of 2 nodes gather 8 bytes: each sends 6, of which 2 leave its node."""
    chip = dataclasses.replace(
        chips.CHIPS["h100"], flops=10.0, bandwidth=5.0, links=2.0, network=0.5
    )
    cost = Cost()
    cost.collectives[Collective("all-gather", 8, 4, 2)] = 3
    described = measured.described(Measured(program("x", ()), {}, None, cost), chip)
    assert (described["sent_bytes"], described["network_bytes"]) == (18.0, 6.0)
    assert described["seconds"] == {
        "products": 0.0,
        "memory": 0.0,
        "links": 12 / 2.0,
        "network": 6 / 0.5,
        "latency": 3 * 6.6e-6,
        "bound": 12.0 + 3 * 6.6e-6,
    }


def test_beside_the_compiler_s_figures_stand_those_by_hand():
    """Twelve unavoidable bytes in four turns; eight FLOPs on two chips."""
    chip = dataclasses.replace(chips.CHIPS["v5e"], flops=1.0, bandwidth=2.0)
    part = program("sampling", ())._replace(
        trips=(4,), least_bytes=12.0, model_flops=8.0
    )
    cost, once = Cost(bytes=40.0, unknown_loops=1), Cost(bytes=8.0)
    cost.collectives[Collective("all-reduce", 2, 2)] = 9
    once.collectives[Collective("all-reduce", 2, 2)] = 1
    one = Measured(part, {}, None, cost, once)
    described = measured.described(one, chip, num_chips=2)
    assert described["by_hand"] == 12 / 2.0
    turn = described["seconds_of_turn"]
    assert (turn["memory"], turn["by_hand"]) == ((40 - 8) / 4 / 2, 12 / 4 / 2)
    assert turn["exchanges"] == (9 - 1) / 4
    assert turn["latency"] == pytest.approx(2 * 1e-6)
    assert measured.described(one, chip)["by_hand"] == 8.0  # FLOPs of one chip


@pytest.mark.parametrize("start", [1, 3, 40])
@pytest.mark.parametrize("limit", [107, 100, 9])
def test_the_largest_batch_is_found_with_few_compiles(start, limit):
    """Bytes 7 + 5 n: 20 fit into 107, 18 into 100, none into 9."""
    calls = []

    def alive(n):
        calls.append(n)
        return 7 + 5 * n if n < 60 else None

    size = alive(start)
    known = {start: size} if size <= limit else {}
    rows = advice.largest(alive, limit=limit, known=known)
    assert rows == ({107: 20, 100: 18, 9: 0}[limit], True)
    assert len(calls) <= 6


def test_the_largest_batch_says_when_it_was_not_found():
    assert advice.largest(lambda n: 1, limit=10, known={}, calls=3) == (8, False)


@pytest.mark.slow
def test_the_largest_batch_goes_up_by_what_everything_divides(monkeypatch):
    """10,000 bytes less 1000, at 100 per row: 90 rows, of which 88 divide by eight."""

    def measure(programs, devices, *, rows, waiting, visits=None):
        sizes = {"argument": 1000, "temporary": 100 * rows}
        return [Measured(program("sampling", ("policy",)), sizes, None, Cost())]

    monkeypatch.setattr(measured, "measure", measure)
    none = dict.fromkeys(("critic", "policy's optimizer", "critic's optimizer"), 0)
    monkeypatch.setattr(measured, "resident", lambda *_: {"policy": 1000, **none})
    small = dataclasses.replace(chips.CHIPS["v5e"], memory=10_000)
    monkeypatch.setitem(chips.CHIPS, "v5e", small)
    words = ("--placement.policy=fsdp=8", "--find-batch")
    result = plan.plan(*planned.parsed("ppo", *words))
    assert result["largest_batch"] == {"rows": 88, "multiple_of": 8, "exact": True}
    assert result["fits"]
    assert not result["advice"]
    words += ("--num-minibatches=2", "--micro-batch-size=24", "--batch-size=48")
    most = plan.plan(*planned.parsed("ppo", *words))["largest_batch"]
    assert most == {"rows": 48, "multiple_of": 2 * 24, "exact": True}
    over = plan.plan(
        *planned.parsed("ppo", "--placement.policy=fsdp=8", "--batch-size=160")
    )
    assert not over["fits"]
    assert any("--batch-size 80" in line for line in over["advice"])


def test_advice_names_what_saves_most():
    config, _ = planned.parsed("ppo", "--placement.policy=fsdp=2")
    resident = {
        "policy": 4 * GIB,
        "policy's optimizer": 8 * GIB,
        "critic": 4 * GIB,
        "critic's optimizer": 8 * GIB,
        "reference": 4 * GIB,
        "reward model": 2 * GIB,
    }
    learning = Alive(
        "scoring and learning", 6 * GIB, 24 * GIB, 40 * GIB, 0, 0, 70 * GIB
    )
    sampling = Alive("sampling", 26 * GIB, 4 * GIB, 1 * GIB, 0, 0, 31 * GIB)
    lines = advice.advice(config, resident=resident, alive=[sampling, learning])
    assert lines[:2] == [
        "--lora 16: about 24.00 GiB per chip less",
        "--remat full: about 20.00 GiB per chip less",
    ]
    assert "--reference-storage.dtype int8: about 3.00 GiB per chip less" in lines
    assert "--micro-batch-size 8: about 20.00 GiB per chip less" in lines
    lighter, _ = planned.parsed("ppo", "--remat=full", "--reference-storage.dtype=int8")
    again = advice.advice(lighter, resident=resident, alive=[sampling, learning])
    assert not any("remat" in line or "--reference" in line for line in again)


@pytest.mark.slow
def test_what_is_known_of_the_temporaries():
    """The cache has 2 layers of 64 numbers, float32; Experience has the real arrays."""
    within = planned.work_of("ppo", "--placement.policy=fsdp=8").within
    rows, columns = 16, 6 + 4
    assert within["KV cache"] == 2 * 2 * rows * columns * 64 * 4
    fields = {field.name for field in dataclasses.fields(batch.Experience)}
    of_options = {
        "prompt_scale",
        "sampler_logprobs",
        "further",
        "sampled",
        "ref_hidden",
        *("chosen", "entropy_coef", "experts", "top_k"),
    }  # none by default
    assert fields - of_options == {
        *("tokens", "mask", "response_mask", "old_logprobs", "ref_logprobs"),
        *("advantages", "value_mask", "old_values", "returns", "token_rewards"),
    }
    assert within["experience"] == rows * columns * (4 + 3 * 1 + 6 * 4)
    within = planned.work_of("grpo", "--placement.policy=fsdp=8").within
    fields = {field.name for field in dataclasses.fields(batch.PolicyExperience)}
    assert fields - of_options == {
        *("tokens", "mask", "response_mask", "old_logprobs", "ref_logprobs"),
        *("advantages", "token_rewards"),
    }
    assert within["experience"] == rows * columns * (4 + 2 * 1 + 4 * 4)


def test_a_plan_takes_the_command_of_its_run(tmp_path):
    """Options of run and plan come in any order; prompts and folder are not needed."""
    line = "ppo --topology v5e:8x8 --model llama-2-7b --placement.policy fsdp=64"
    line += " --find-batch --reward-model gpt2 --reference-storage.dtype bfloat16"
    config, options = command.parse(line.split())
    assert (config.name, config.start.model) == ("ppo", "llama-2-7b")
    assert config.placement.policy == MeshShape(fsdp=64)
    assert config.reference.reference_storage.dtype == "bfloat16"
    assert (options.topology, options.find_batch) == ("v5e:8x8", True)
    file = tmp_path / "run.toml"
    file.write_text('[start]\nmodel = "gpt2"\n[rewards]\nverifier = "gsm8k"\n')
    config, options = command.parse(["grpo", "--config", str(file), "--chip", "v5e"])
    assert (config.start.model, options.chip) == ("gpt2", "v5e")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"expected a command to plan, one of sft, .*, got none; write it first"),
        (["forget"], r"expected a command to plan, .* got forget"),
    ],
)
def test_commands_that_cannot_be_planned(words, message):
    with pytest.raises(InputError, match=message):
        command.parse(words)


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip=abacus"], "chip: expected one of 'v4', .*, got 'abacus'"),
        (["--placement.policy=fsdp=3"], r"multiply to the 8 devices, got .* = 3"),
        (["--num-minibatches=3"], r"num_minibatches to divide the 16 rows"),
        (["--placement.critic=last"], r"--placement.critic: expected a plan of one"),
        (
            ["--placement.reference=hosts:data=2"],
            r"--placement.reference: expected a plan of one set of chips, got hosts",
        ),
        (["--sampler=process"], r"--sampler: expected the library.s decoder"),
        (
            ["--placement.policy=context=4,fsdp=2", "--attention=cudnn"],
            "expected attention xla, blockwise, splash or ring",
        ),
        pytest.param(
            ["--placement.policy=data=8", "--batch-size=12"],
            "expected a batch size that the 8 devices .* divide, got 12",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_user_gets_wrong(words, message):
    with pytest.raises(InputError, match=message):
        plan.plan(*planned.parsed("ppo", *words))


def test_no_chip():
    message = r"expected --topology, as v5e:8x8 or .* got neither on cpu"
    with pytest.raises(InputError, match=message):
        plan.plan(*planned.parsed("ppo", chip=None))


def test_a_topology_names_its_chip():
    with pytest.raises(InputError, match=r"--topology or --chip, got v5e:2x2 and v5p"):
        Options(topology="v5e:2x2", chip="v5p")


def test_a_topology_takes_the_chip_that_is_named_beside_it():
    assert Options(chip="h100", topology="8x8").slice == "h100:8x8"
    assert Options(topology="v5e:2x2").slice == "v5e:2x2"
    assert Options(chip="v5e").slice is None


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("8x8", r"a chip and its shape, as v5e:8x8 or h100:8x8, got '8x8'; name the"),
        ("h100:8", r"expected nodes x GPUs of a node, as h100:8x8 .* got 'h100:8'"),
        ("h100:0x8", r"expected nodes x GPUs of a node, as h100:8x8 .* got 'h100:0x8'"),
        ("h100:8x8x8", r"expected nodes x GPUs of a node.* got 'h100:8x8x8'"),
    ],
)
def test_a_topology_of_another_form(topology, message):
    with pytest.raises(InputError, match=message):
        measured.target(topology, chip=None, mesh=MeshShape(fsdp=64))


def test_no_plug_in_for_gpus_is_one_error_with_its_install_line(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu_targets.importlib.metadata, "version", missing)
    message = (
        r"JAX's plug-in for GPUs, which compiles for 'h100:1x8', got no such package; "
        r"install the extra 'plan-cuda' \(pip install .*\[plan-cuda\]'\)"
    )
    with pytest.raises(InputError, match=message):
        measured.target("h100:1x8", chip=None, mesh=MeshShape(fsdp=8))


def test_a_plug_in_that_has_failed_says_how_to_start(monkeypatch):
    """Outside `rlhf-jax plan`, JAX may have looked for a GPU already."""

    def gone(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(gpu_targets, "compiler", lambda: "jax-cuda13-pjrt 1")
    monkeypatch.setattr(gpu_targets.topologies, "get_topology_desc", gone)
    with pytest.raises(InputError, match=r"failed for want .* JAX_PLATFORMS=cpu"):
        compiled.target("h200:1x8")


def test_every_gpu_of_the_roofline_has_a_target():
    assert gpu_targets.per_node("h100:4x8") == gpu_targets.per_node("h100-nvl:1x8") == 8


@pytest.mark.parametrize(
    ("prompt", "response"), [(64, 64), (512, 512), (5, 1), (1, 700)]
)
def test_the_turns_of_the_sampler_s_loops(prompt, response):
    """Counted token by token, as the sampler widens its cache."""
    size = prompt + response
    widths = caches.growing_widths(size, first=prompt)
    turns, written = [], prompt + 1
    for width in widths:
        turns.append(0)
        while written < size and written <= width:
            turns[-1] += 1
            written += 1
    assert sum(turns) == response - 1
    assert list(workload.decoding_turns(prompt, response)) == turns


def test_the_turns_of_continuous_batching():
    """Six responses share three places and arrive one at a time.

    They take 18, 0, 12, 6, 24 and 6 turns, the first token coming with the prompt. Six
    turns end the fourth, six more the third and make room for the last, and eighteen
    the others: 30 in 6 arrivals.
    """
    lengths = (19, 1, 13, 7, 25, 7)
    assert workload.batching_turns(lengths, places=3, arriving=1) == (5,)
    assert workload.batching_turns((4,) * 16, places=8, arriving=4) == (2, 0)


CONTINUOUS = ("--group-size=4", "--continuous-batching=8")


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_of_continuous_batching_in_pages():
    words = (*CONTINUOUS, "--sampler=here,cache_pages=12,page_size=4")
    paged = plan.plan(*planned.parsed("grpo", *words))["programs"][0]
    # 16 of 4 tokens, four at a time in eight places: 3 turns twice, in 4 arrivals.
    assert paged["turns"] == 4 * 2
    assert paged["seconds_of_turn"]["bound"] > 0
    work = [planned.work_of("grpo", *one) for one in (CONTINUOUS, words)]
    columns = 2 * 2 * 64 * 4  # bytes of a column
    assert [one.within["KV cache"] for one in work] == [80 * columns, 48 * columns]


@pytest.mark.slow
def test_shares_of_the_rows_have_turns_of_their_own():
    """Of 16 responses of 4 tokens, each of two shares has 8, in all its places at once.

    With pages in one pool, the 16 arrive four at a time.
    """
    words = (*CONTINUOUS, "--sampler=here,cache_pages=24,page_size=4")
    for mesh, expected in (("fsdp=8", ((2, 0), 4)), ("data=2,fsdp=4", ((3, 0), 2))):
        sampling, *_ = planned.work_of(
            "grpo", *words, f"--placement.policy={mesh}"
        ).programs
        assert (sampling.trips, sampling.repeats) == expected
    with pytest.raises(InputError, match=r"expected at least 8 places, as a prompt ha"):
        planned.work_of(
            *("grpo", *words, "--continuous-batching=6"),
            "--placement.policy=data=2,fsdp=4",
        )


def test_the_cache_by_hand():
    """Keys and values of L layers, B rows, S columns, K heads of head_dim numbers."""
    num_bytes = workload.cache_bytes(tiny.LLAMA, rows=3, columns=10)
    assert num_bytes == 2 * 2 * 3 * 10 * 2 * 8 * 4
    model = dataclasses.replace(tiny.LLAMA, cache_pages=6, page_size=4)
    assert workload.cache_bytes(model, rows=3, columns=10) == 2 * 2 * 24 * 2 * 8 * 4
    assert workload.cache_bytes(model, rows=2, columns=10) == 2 * 2 * 20 * 2 * 8 * 4
    # Of MIXED two layers keep a window of 4 for each row, one has pages.
    mixed = dataclasses.replace(tiny.MIXED, cache_pages=6, page_size=4)
    num_bytes = workload.cache_bytes(mixed, rows=3, columns=10)
    assert num_bytes == 2 * (2 * 3 * 4 + 24) * 12 * 4
    half = workload.cache_bytes(tiny.bfloat16(tiny.GPT2), rows=3, columns=10)
    assert half == 2 * 2 * 3 * 10 * 16 * 2


def test_no_libtpu_and_no_such_topology(monkeypatch):
    def unknown(**_):
        raise RuntimeError("no such slice")

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", unknown)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: name)
    message = r"got 'v5e:2x2' \(no such slice\); choose another, or leave it out"
    with pytest.raises(InputError, match=message):
        compiled.slice_of("v5e:2x2")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    message = r"'v5e:2x2', got no such package; install the extra 'plan'"
    with pytest.raises(InputError, match=message):
        compiled.slice_of("v5e:2x2")


@pytest.mark.long
@pytest.mark.slow
def test_two_plans_at_once():
    """Each process locks libtpu while the other loads it."""
    pytest.importorskip("libtpu")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    for name in ("XLA_FLAGS", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        environment.pop(name, None)
    code = (
        "from rlhf_jax.planning import compiled\n"
        "print(len(compiled.slice_of('v5e:2x2')), flush=True)\n"
        "input()\n"
    )
    running = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line == "4", process.communicate("\n")[1][-2000:]
    for process in running:
        process.communicate("\n")


@pytest.mark.long
def test_per_device_bytes_fall_as_devices_rise(monkeypatch):
    """Parameters, optimizer states and activations: no device has all rows."""
    every = policy_gradient.programs
    monkeypatch.setattr(
        policy_gradient, "programs", lambda *a, **k: every(*a, **k)[-1:]
    )
    words = ("--batch-size=64", "--num-epochs=1", "--micro-batch-size=32")
    shares = {}
    for devices in (2, 8):
        config, options = planned.parsed(
            *("ppo", *words, f"--placement.policy=fsdp={devices}"),
            path=planned.model(layers=1),
        )
        mesh = config.placement.policy
        where = measured.Target(
            mesh.make(jax.devices()[:devices]), "v5e", chips.CHIPS["v5e"], "this"
        )
        work = job.Job(options, where).workload_of(config)
        resident = measured.resident(work.parts, where)
        (learn,) = measured.measure(work.programs, where, rows=64, waiting=plan.silent)
        shares[devices] = sum(resident.values()), learn.sizes["temporary"]
    assert shares[8][0] == pytest.approx(shares[2][0] / 4, rel=0.15)
    assert shares[8][1] < shares[2][1] / 2


@pytest.mark.slow
def test_a_plan_by_this_machine_s_compiler(capsys, tmp_path, monkeypatch):
    every = policy_gradient.programs
    monkeypatch.setattr(policy_gradient, "programs", lambda *a, **k: every(*a, **k)[:2])
    file = tmp_path / "plan.json"
    words = ("--placement.policy=fsdp=8", "--placement.sampler=policy")
    words += (f"--json={file}",)
    plan.run(*planned.parsed("ppo", *words), command="this one")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"] == "this one"
    assert result["fits"]
    assert result["compiler"].endswith("whose layouts and fusions are not the chip's")
    names = [one["name"] for one in result["programs"]]
    assert names == [row["during"] for row in result["alive"]]
    assert names == ["sampling", "the reward model"]
    # 3 tokens after the first: the sampler's loop does not say how many.
    assert result["programs"][0]["turns"] == 3
    assert result["peak"]["total"] == max(row["total"] for row in result["alive"])
    text = capsys.readouterr().out
    assert "8 x v5e, never run; the compiler is this machine's, for cpu, whose" in text
    seconds = text.partition("(roofline)")[2].partition("Speed")[0]
    assert "latency" in seconds  # of exchanges between the eight chips
    assert "network" not in seconds  # which TPUs have none of: it would be 0 throughout
    assert f"Fits: {result['peak']['total'] / GIB:.2f} GiB per chip" in text
    asked = []
    monkeypatch.setattr(plan, "plan", lambda *a, **k: asked.append(a) or result)
    plan.run(*planned.parsed("ppo", *words), command="again")  # a plan of its own
    for mine in ("", "{}", '{"command": 3}', "[1]"):
        file.write_text(mine)
        with pytest.raises(InputError, match="an earlier plan, got another file, whi"):
            plan.run(*planned.parsed("ppo", *words), command="this one")
        assert file.read_text() == mine
    assert len(asked) == 1


def check(result):
    """Checks that the verdict follows from the figures beside it."""
    resident = result["held"]
    programs = [one for one in result["programs"] if one["bytes"]]  # that are compiled
    for row, one in zip(result["alive"], programs, strict=True):
        sizes = one["bytes"]
        assert one["refused"] is None
        assert row["argument"] == sizes["argument"]
        assert (
            row["others"] <= sum(resident.values()) <= row["others"] + sizes["argument"]
        )
        assert row["total"] == (
            row["others"]
            + sizes["argument"]
            + sizes["temporary"]
            + sizes["output"]
            - sizes["alias"]
        )
        assert one["flops"] > 0
    most = max(row["total"] for row in result["alive"])
    assert result["peak"]["total"] == most
    assert result["fits"] == (most <= result["chip"]["memory"])
    assert result["chips"] == MeshShape(**result["mesh"]).size


def config_of(result):
    """The run of a recorded plan."""
    line = result.get("command_today", result["command"])
    return command.parse(shlex.split(line)[2:])


def of_issue(result):
    """512 prompts x (512 + 512) tokens, as the command says."""
    config, options = config_of(result)
    assert (config.batch.batch_size, options.prompt_length) == (512, 512)
    assert config.batch.max_new_tokens == 512
    return config, options


def test_llama_2_7b_fits_64_chips_of_16_gb():
    result = recorded("llama-2-7b-v5e-8x8")
    check(result)
    config, options = of_issue(result)
    assert (config.start.model, options.topology) == ("llama-2-7b", "v5e:8x8")
    assert config.start.lora is None
    assert config.reference.reference_storage.dtype == "bfloat16"
    assert result["fits"]
    assert result["compiler"].startswith("that of libtpu")
    most = result["largest_batch"]
    assert most["rows"] >= 512
    assert most["rows"] % most["multiple_of"] == 0
    # AdamW's two moments beside the parameters, all float32, on 64 chips.
    parameters = 6_738_415_616
    assert result["held"]["policy"] == pytest.approx(4 * parameters / 64, rel=0.01)
    assert result["held"]["policy's optimizer"] == pytest.approx(
        8 * parameters / 64, rel=0.01
    )
    assert result["held"]["reference"] == pytest.approx(2 * parameters / 64, rel=0.01)


LLAMA_8B = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096


@pytest.mark.parametrize(
    ("name", "data", "prompt", "new"),
    [
        ("llama-3.1-8b-lora-h100-1x8", 1, 896, 640),
        ("llama-3.1-8b-grpo-2k-h100-8x8", 8, 1024, 1024),
    ],
)
def test_a_token_of_8b_on_eight_h100_by_hand(name, data, prompt, new):
    """64 rows: eight key and value heads are shared by eight GPUs and no more.

    Sixteen GPUs would share the weights over the network, and pairs of them would
    read the same heads.
    """
    result = recorded(name)
    check(result)
    assert result["sampler"].split()[2].endswith("tensor=8:")
    sampling = next(one for one in result["programs"] if one["turns"])
    turn = sampling["seconds_of_turn"]
    column = 32 * 2 * 8 * 128 * 2
    cache = column * (64 / data) * ((prompt + 1) + (prompt + new - 1)) / 2
    by_hand = (2 * LLAMA_8B + cache) / 8 / 3350e9
    assert turn["by_hand"] == pytest.approx(by_hand)
    assert 0.9 < turn["by_hand"] / turn["memory"] < 1
    assert max(turn["memory"], turn["links"]) < 1.7e-3
    assert turn["latency"] == pytest.approx(6.6e-6 * turn["exchanges"])
    assert turn["bound"] == pytest.approx(turn["memory"] + turn["latency"])
    # Two sums per layer, one of the embedding, the logits; and the tokens drawn.
    assert 66 <= turn["exchanges"] <= 66 + 4
    assert turn["bound"] < 1.7e-3


def test_on_64_v5e_a_rollout_is_not_bound_by_links_where_its_layout_is_chosen():
    before, after = (recorded(f"llama-2-7b-v5e-8x8{name}") for name in ("", "-auto"))
    check(after)
    config, _ = of_issue(after)
    assert config.placement.sampler == AUTO
    seconds = {
        name: next(
            one["seconds"] for one in plan["programs"] if one["name"] == "sampling"
        )
        for name, plan in (("before", before), ("after", after))
    }
    assert seconds["before"]["links"] == seconds["before"]["bound"] > 13
    assert after["shares"]["rollout"] * after["seconds"] < 6
    assert seconds["after"]["memory"] > 2 * seconds["after"]["links"]
    turn = next(one["seconds_of_turn"] for one in after["programs"] if one["turns"])
    assert 0.8 < turn["by_hand"] / turn["memory"] < 1


def test_llama_2_70b_with_adapters_fits_the_smallest_slice_of_v5p():
    """One bfloat16 base serves policy, critic, reward model and reference."""
    result = recorded("llama-2-70b-lora-v5p-2x2x1")
    check(result)
    assert (result["chips"], result["topology"]) == (4, "v5p:2x2x1")
    assert result["fits"]
    assert "reference" not in result["held"]
    base = 2 * 68_976_648_192 / 4
    assert result["held"]["base of the adapters"] == pytest.approx(base, rel=0.01)


def test_the_flops_of_llama_2_7b_by_hand():
    """A forward pass: 2 N per token and attention; with remat and backward, 4 times."""
    result = recorded("llama-2-7b-v5e-8x8")
    flops = {one["name"]: 64 * one["flops"] for one in result["programs"]}
    layers, width, mlp, vocab = 32, 4096, 11008, 32000
    kernels = layers * (4 * width**2 + 3 * width * mlp)
    tokens = 512 * 1024
    forward = 2 * tokens * kernels + 4 * tokens * layers * 1024 * width
    head = 2 * 512 * 512 * vocab * width
    assert flops["the reward model"] == pytest.approx(forward, rel=0.01)
    assert flops["the reference"] == pytest.approx(forward + head, rel=0.01)
    epochs = 4 * (2 * 4 * forward + 4 * head)
    assert flops["scoring and learning"] == pytest.approx(epochs + forward, rel=0.1)


def test_llama_3_1_8b_on_64_h100_by_hand():
    """GRPO with 64 responses of 1,024 + 7,168 tokens: one row per GPU, by cuDNN."""
    result = recorded("llama-3.1-8b-grpo-h100-8x8")
    check(result)
    assert (result["topology"], result["attention"]) == ("h100:8x8", "cudnn")
    programs = {one["name"]: one for one in result["programs"]}
    brought, *others = programs
    assert brought == "resharding for sampling"
    assert others == ["sampling", "the reference", "learning"]
    columns, layers, width, vocab = 8192, 32, 4096, 128256
    kernels = layers * (2 * width**2 + 2 * width * 1024 + 3 * width * 14336)
    pairs = columns * (columns + 1) / 2
    head = 2 * 7168 * vocab * width
    forward = 2 * columns * kernels + 4 * layers * pairs * width + head
    reference, learning = (programs[name] for name in ("the reference", "learning"))
    assert reference["model_flops"] == pytest.approx(64 * forward)
    assert learning["model_flops"] == pytest.approx(3 * 64 * forward)
    # cuDNN's kernel leaves out what the causal mask does.
    assert reference["flops"] == pytest.approx(forward, rel=0.01)
    # Remat is a fourth pass of the layers, and the backward pass of attention has five
    # products for two.
    assert learning["flops"] == pytest.approx(4 * forward, rel=0.05)
    for one in result["programs"]:
        peak = 989e12 * one["seconds"]["bound"]
        assert one["mfu"] == pytest.approx(one["model_flops"] / 64 / peak)
    # Of what 64 GPUs gather, each receives 63/64, and its share of the 7/8 that its
    # node lacks, 7/64, by the network. A few all-to-alls send more there.
    for one in (reference, learning):
        share = one["network_bytes"] / one["sent_bytes"]
        assert share == pytest.approx(7 / 63, rel=0.05)
    assert learning["bytes"]["temporary"] < 4.6 * GIB


@pytest.mark.parametrize("chips_", [32, 64])
def test_bytes_a_chip_fall_as_one_over_chips(chips_):
    """The same batch on 16, 32 and 64 chips: bytes of the models and the peak."""
    names = {16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    few, many = (recorded(f"llama-2-7b-v5p-{names[n]}") for n in (16, chips_))
    for result, count in ((few, 16), (many, chips_)):
        check(result)
        of_issue(result)
        assert result["fits"]
        assert result["chips"] == count
    share = 16 / chips_
    for name, size in few["held"].items():
        assert many["held"][name] == pytest.approx(share * size, rel=0.01), name
    assert many["peak"]["total"] == pytest.approx(
        share * few["peak"]["total"], rel=0.15
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_every_recorded_plan_fits_and_adds_up(name):
    result = recorded(name)
    check(result)
    assert result["fits"]


@pytest.mark.long
def test_a_recorded_plan_is_made_again(tmp_path):
    pytest.importorskip("libtpu")
    before = recorded("gpt2-v5e-2x2")
    environment = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment.pop("XLA_FLAGS", None)
    words = shlex.split(before["command_today"])[1:]
    code = "from rlhf_jax.train.main import main; main()"
    out = tmp_path / "plan.json"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--json", str(out)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = json.loads(out.read_text(encoding="utf-8"))
    check(after)
    # Compilers differ: products hardly, what they keep where more.
    for old, new in zip(before["programs"], after["programs"], strict=True):
        assert new["flops"] == pytest.approx(old["flops"], rel=0.05)
    assert after["peak"]["total"] == pytest.approx(before["peak"]["total"], rel=0.25)
    assert after["fits"] == before["fits"]


@pytest.mark.long
@pytest.mark.slow
def test_sampling_has_a_mesh_and_a_storage_of_its_own():
    """On eight CPU devices: an int8 copy whose heads and cache four pairs share."""
    words = ("--placement.policy=fsdp=8",)
    apart = (
        "--placement.sampler=data=4,tensor=2",
        "--sampler=here,dtype=int8,cache=int8",
    )
    result = plan.plan(*planned.parsed("grpo", *words, *apart))
    words = (*words, "--placement.sampler=policy")
    plain = plan.plan(*planned.parsed("grpo", *words))
    resharding, one, *_ = result["programs"]
    assert resharding["name"] == "resharding for sampling"
    assert resharding["sent_bytes"] > 0
    before, *_ = plain["programs"]
    assert one["turns"] == before["turns"] == 3
    kinds = {collective["kind"] for collective in one["collectives"]}
    assert "all-to-all" in kinds
    # The copy is beside the policy, which this program does not read.
    assert result["alive"][0]["others"] == sum(result["held"].values())
    assert plain["alive"][0]["others"] == (
        sum(plain["held"].values()) - plain["held"]["policy"]
    )
    assert 0 < one["seconds_of_turn"]["bound"] < before["seconds_of_turn"]["bound"]
    for program in (one, before):
        once = program["seconds"]["memory"] - 3 * program["seconds_of_turn"]["memory"]
        assert 0 < once < program["seconds"]["memory"]
    # 16 rows of 10 columns, 2 layers and 8 heads of 8 numbers and a scale.
    assert result["within"]["KV cache"] == 2 * 2 * 16 * 10 * 8 * (8 + 4) // 8
