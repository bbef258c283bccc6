"""The least memory of a run by hand, against limits just above and below."""

import gc

import jax
import jax.numpy as jnp
import planned
import pytest
import toy_files

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import compiled, memory_check
from rlhf_jax.planning.memory_check import Part, Passing
from rlhf_jax.runs import command_line
from rlhf_jax.train import shapes, trainer
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.methods import ppo
from rlhf_jax.train.plan import job

# GPT-2 of width 16, one layer, 16 positions; 23 words are padded to 128.
MATRICES = 16 * 48 + 16 * 16 + 2 * 16 * 64
BIASES = 48 + 16 + 64 + 16
NUMBERS = 128 * 16 + 16 * 16 + MATRICES + BIASES + 2 * 32 + 32
# What both devices along `tensor` have: biases of outputs, and norms.
NOT_SPLIT = 16 + 16 + 2 * 32 + 32
HEAD = 16 + 1
# Of rank 2 at query, key, value, output, up and down.
ADAPTERS = 2 * (4 * (16 + 16) + 2 * (16 + 64))
# Adam counts once, its schedule once more.
COUNTS = 2 * 4
# Keys and values, 4 rows, 4 columns, 16 numbers; less than any of the gradients.
CACHE = 2 * 4 * 4 * 16 * 4


def floats(count):
    return 4 * count


def trained(count):
    return floats(3 * count) + COUNTS


BOTH = trained(NUMBERS) + trained(NUMBERS + HEAD)
LORA = trained(ADAPTERS) + trained(ADAPTERS + HEAD)
GRADIENTS = floats(NUMBERS + HEAD)
PYTHON = "--reward=operator:setitem"
INT8 = MATRICES + 4 * (48 + 16 + 64 + 16)  # a scale for every output
INT8 += 128 * 16 + 16 * 16 + 4 * (128 + 16)  # and for every row of a table
INT8 += 4 * (BIASES + 2 * 32 + 32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.reward_model(folder / "scorer")
    rows = [{"prompt": "the cat"}] * 4
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    return folder


def command(files, out, *options):
    return [
        *("--model", str(files / "model"), "--out", str(out), "--no-progress"),
        *("--prompts", str(files / "prompts.jsonl"), "--num-minibatches=1"),
        *("--batch-size=4", "--max-new-tokens=4", "--num-steps=1"),
        *(option.replace("SCORER", str(files / "scorer")) for option in options),
    ]


def check_run(files, out, *options):
    config = command_line.parse(
        ppo.Config, description="", argv=command(files, out, *options)
    )
    start, meshes = pretrained.described(config.start.model), Meshes.of(config)
    models = shapes.of_run(config, meshes=meshes, start=start)
    shapes.check(config, models, meshes=meshes)


def has(monkeypatch, size):
    monkeypatch.setattr(memory_check, "limit", lambda place: size)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        pytest.param(
            (PYTHON,), BOTH + floats(NUMBERS) + GRADIENTS, marks=pytest.mark.slow
        ),
        pytest.param(
            (PYTHON, "--reference=none"),
            BOTH + GRADIENTS,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--reward-model=SCORER",),
            BOTH + floats(2 * NUMBERS + HEAD) + GRADIENTS,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--reward-model=SCORER", "--critic.start=reward_model"),
            BOTH + floats(2 * NUMBERS + HEAD) + GRADIENTS,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (PYTHON, "--reference-storage.dtype=bfloat16"),
            BOTH + 2 * NUMBERS + GRADIENTS,
            marks=pytest.mark.slow,
        ),
        ((PYTHON, "--reference-storage.dtype=int8"), BOTH + INT8 + GRADIENTS),
        (
            (
                *(PYTHON, "--references", "b=SCORER,weight=0", "c=SCORER,dtype=int8"),
                "--critic.start=SCORER",
            ),
            BOTH + floats(2 * NUMBERS) + INT8 + GRADIENTS,
        ),
        pytest.param(
            (PYTHON, "--placement.reference=cpu"),
            BOTH + floats(NUMBERS) + GRADIENTS,
            marks=pytest.mark.slow,
        ),
        (
            (
                PYTHON,
                *("--optimizer=adam,mu_dtype=bfloat16",),
                *("--critic.optimizer=adam,mu_dtype=bfloat16",),
            ),
            BOTH - 2 * (2 * NUMBERS + HEAD) + floats(NUMBERS) + GRADIENTS,
        ),
        (
            (PYTHON, "--dtype=bfloat16"),
            BOTH + floats(NUMBERS) + GRADIENTS // 2,
        ),
        (
            (PYTHON, "--shared-trunk"),
            trained(NUMBERS) + trained(HEAD) + floats(2 * NUMBERS),
        ),
        pytest.param(
            (PYTHON, "--lora=2"),
            floats(NUMBERS) + LORA + floats(ADAPTERS + HEAD),
            marks=pytest.mark.slow,
        ),
        (
            (PYTHON, "--lora=2", "--lifecycle.move=reset,every=1"),
            floats(NUMBERS) + LORA + floats(2 * ADAPTERS + HEAD),
        ),
        pytest.param(
            (PYTHON, "--lora=2", "--batch-size=64", "--max-new-tokens=12"),
            floats(NUMBERS) + LORA + CACHE * 16 * 3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                *(PYTHON, "--lora=2", "--batch-size=64", "--max-new-tokens=12"),
                "--sampler=here,cache=int8,prefill_chunk=2",
            ),
            # Keys and values of 2 heads, each of 8 bytes and a scale.
            floats(NUMBERS) + LORA + 2 * 64 * 12 * 2 * (8 + 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                *(PYTHON, "--lora=2", "--batch-size=64", "--max-new-tokens=12"),
                "--continuous-batching=64",
                "--sampler=here,cache_pages=96,page_size=2",
            ),
            # 192 columns of pages, not 64 times 12 of rows.
            floats(NUMBERS) + LORA + CACHE * 192 // 16,
            marks=pytest.mark.slow,
        ),
        (
            (PYTHON, "--lora=2", "--batch-size=64", "--continuous-batching=4"),
            floats(NUMBERS) + LORA + floats(ADAPTERS + HEAD),
        ),
    ],
)
def test_every_part_by_hand(files, tmp_path, monkeypatch, options, least):
    has(monkeypatch, least)
    check_run(files, tmp_path / "run", *options)
    has(monkeypatch, least - 1)
    with pytest.raises(InputError, match="a run that fits into") as raised:
        check_run(files, tmp_path / "run", *options)
    assert "--no-check-memory" in str(raised.value)
    assert "\n  policy: 0.0 MiB\n" in str(raised.value)


@pytest.mark.slow
def test_nothing_is_read_or_left_and_the_option_goes_on(
    files, tmp_path, monkeypatch, capsys
):
    gc.collect()  # arrays of other tests, which may go at any moment
    before = len(jax.live_arrays())
    has(monkeypatch, BOTH)

    def read(*args, **kwargs):
        raise InputError("weights are read")

    monkeypatch.setattr(trainer.pretrained, "load", read)

    def refusal_of(*options):
        with pytest.raises(SystemExit) as stopped:
            command_line.main(
                trainer.main,
                ppo.Config,
                description="",
                argv=command(files, tmp_path / "run", PYTHON, *options),
            )
        assert stopped.value.code == 2
        assert not any(tmp_path.iterdir())
        return capsys.readouterr().err

    refusal = refusal_of()
    assert len(jax.live_arrays()) <= before
    assert "error: memory of the host: expected a run that fits into 0.1 MiB" in refusal
    assert "at least 0.2 MiB" in refusal
    assert "\n  reference: 0.0 MiB" in refusal
    assert "Traceback" not in refusal
    assert "weights are read" in refusal_of("--no-check-memory")


TREE = {
    "embed": {"tokens": jax.ShapeDtypeStruct((128, 16), jnp.float32)},
    "count": jax.ShapeDtypeStruct((3,), jnp.int32),
}


def refused(parts, passing=()):
    try:
        memory_check.check(parts, lambda: passing, change="ask for less")
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mesh", "num_bytes"),
    [
        (MeshShape(data=8), 128 * 16 * 4 + 12),
        (MeshShape(fsdp=8), 128 * 2 * 4 + 12),
        (MeshShape(data=2, fsdp=2, tensor=2), 64 * 8 * 4 + 12),
    ],
)
def test_a_device_holds_its_shards_and_a_copy_of_the_rest(monkeypatch, mesh, num_bytes):
    parts = [Part("policy", TREE, mesh.make())]
    passing = [Passing("KV cache", 800, mesh.make())]
    # Devices of the CPU share its memory.
    has(monkeypatch, 8 * num_bytes + 800)
    assert refused(parts, passing) == ""
    has(monkeypatch, 8 * num_bytes + 799)
    assert "memory of the host" in refused(parts, passing)
    # Others have their own.
    monkeypatch.setattr(memory_check, "_place", lambda device: device)
    has(monkeypatch, num_bytes + 100)
    assert refused(parts, passing) == ""
    has(monkeypatch, num_bytes + 99)
    assert "KV cache" in refused(parts, passing)


def test_what_exists_beside_it_is_added_by_name(monkeypatch):
    record = ("routing record", 80)
    passing = [Passing("gradients", 400, ONE_DEVICE.make(), others=(record,))]
    has(monkeypatch, 480)
    assert refused([], passing) == ""
    has(monkeypatch, 479)
    assert "routing record: 0.0 MiB" in refused([], passing)


@pytest.mark.parametrize("apart", [False, True])
def test_records_of_a_batch_are_not_where_a_critic_is_apart(
    files, tmp_path, monkeypatch, apart
):
    programs = []
    monkeypatch.setattr(
        memory_check, "check", lambda _, passing, **__: programs.extend(passing())
    )
    of_critic = ["--placement.critic=last:data=1"] * apart
    check_run(files, tmp_path, PYTHON, "--surrogate=centred,top_k=3", *of_critic)
    # An id and a log-prob of each.
    record = ("likeliest tokens", 4 * 4 * 3 * (4 + 4))
    *others, critic = [one.others for one in programs]
    assert others == [(record,)] * 2  # of sampling and of the policy
    assert critic == (() if apart else (record,))


def test_a_model_on_its_own_devices_takes_nothing_of_the_others(monkeypatch):
    monkeypatch.setattr(memory_check, "_place", lambda device: device)
    here, theirs = jax.devices()[:4], jax.devices()[4:]
    four = MeshShape(data=4)
    size = 128 * 16 * 4 + 12
    parts = [Part("policy", TREE, four.make(here)), Part("critic", TREE, None)]
    # Programs of different devices are not added up.
    passing = [
        Passing("gradients", 400, four.make(devices)) for devices in (here, theirs)
    ]
    limits = dict.fromkeys(here, size + 100) | dict.fromkeys(theirs, 100)
    monkeypatch.setattr(
        memory_check, "limit", {**limits, memory_check.HOST: size}.__getitem__
    )
    assert refused(parts, passing) == ""
    limits[here[0]] -= 1
    monkeypatch.setattr(
        memory_check, "limit", {**limits, memory_check.HOST: size}.__getitem__
    )
    assert "gradients" in refused(parts, passing)


@pytest.mark.parametrize(
    ("sampler", "copies"), [((), 8), (("--placement.sampler=data=4,tensor=2",), 4)]
)
def test_episodes_have_all_weights_in_every_replica(
    files, tmp_path, monkeypatch, sampler, copies
):
    checks = []
    monkeypatch.setattr(memory_check, "check", lambda *a, **k: checks.append(a))
    options = ("--placement.policy=fsdp=8", *sampler, "--batch-size=8")
    check_run(files, tmp_path / "run", "--environment=calculator", *options)
    [(_, passing)] = checks
    (copy,) = passing()[0].beside
    monkeypatch.undo()
    # The biases of outputs and the norms are on both devices of a replica.
    size = floats(copies * NUMBERS + (8 - copies) * NOT_SPLIT)
    has(monkeypatch, size)
    memory_check.check([copy], list, change="")
    has(monkeypatch, size - 1)
    with pytest.raises(InputError, match="policy that plays episodes"):
        memory_check.check([copy], list, change="")


def test_what_the_host_has(tmp_path, monkeypatch):
    info, group = tmp_path / "meminfo", tmp_path / "memory.max"
    info.write_text("MemTotal: 90 kB\nMemAvailable:    50 kB\nSwapFree: 7 kB\n")
    monkeypatch.setattr(memory_check, "MEMINFO", info)
    monkeypatch.setattr(memory_check, "CGROUP_LIMITS", (group,))
    assert memory_check.limit(memory_check.HOST) == 57 * 1024
    group.write_text("max\n")
    assert memory_check.limit(memory_check.HOST) == 57 * 1024
    group.write_text("1024\n")
    assert memory_check.limit(memory_check.HOST) == 8 * 1024
    info.unlink()
    assert memory_check.limit(memory_check.HOST) is None


class Accelerator:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_what_a_device_has():
    assert memory_check.limit(Accelerator({"bytes_limit": 12})) == 12
    assert memory_check.limit(Accelerator({})) is None
    assert memory_check.limit(Accelerator(None)) is None


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiler_asks_for_no_less(dtype):
    """Compares with the programs that make the KV cache and the gradients."""
    config, options = planned.parsed(
        *("ppo", "--batch-size=2", "--prompt-length=1", "--max-new-tokens=40"),
        f"--dtype={dtype}",
        path=planned.model(vocab=13, width=32, heads=4, positions=64),
    )
    target = planned.target_of(config, options)
    work = job.Job(options, target).workload_of(config)
    takes = {
        program.name: compiled.memory(
            program.function,
            *program.args,
            device=compiled.target(None),
            donate=program.donate,
        ).temp_size_in_bytes
        for program in work.programs
        if program.name in ("sampling", "scoring and learning")
    }
    mesh = ONE_DEVICE.make()
    cache = memory_check.cache(work.model, rows=2, max_new_tokens=40, mesh=mesh)
    width = jnp.dtype(dtype).itemsize
    assert cache.size == 2 * 2 * 2 * 40 * 32 * width
    assert cache.size < takes["sampling"]
    learned = memory_check.gradients(
        "gradients", work.parts["critic"], model=work.model, mesh=mesh
    )
    assert learned.size < takes["scoring and learning"]
