"""`--auto`: its choices for eight devices of an invented chip."""

import dataclasses
import json
import shutil
import signal

import jax
import kill_kinds
import planned
import pytest
import tiny
import toy_files

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import AUTO
from rlhf_jax.models.families import registry
from rlhf_jax.planning import chips, measured, workload
from rlhf_jax.runs import metrics
from rlhf_jax.train import main
from rlhf_jax.train.plan import auto, job, supervised
from rlhf_jax.train.rollouts import fastest

WIDE = {"vocab": 32_768, "width": 2048, "layers": 2, "heads": 8}
PARAMETERS = 32_768 * 2048 + 1024 * 2048 + 2 * (12 * 2048**2 + 13 * 2048) + 2 * 2048
STATE = 4 * 4 * PARAMETERS  # float32: a policy, two moments of Adam and gradients
REFERENCE = 4 * PARAMETERS
GIB = 2**30


def run(*words, heads=8):
    """(config, start) of a run of 16 rows of 6 + 4 tokens."""
    path = planned.model(**WIDE | {"heads": heads})
    config, options = planned.parsed("grpo", *words, path=path, chip="h100")
    target = measured.target(None, chip="h100", mesh=MeshShape(data=8))
    return config, job.Job(options, target).start_of(config)


def choose(*words, memory, heads=8, prompt=6, **others):
    config, start = run("--auto", *words, heads=heads)
    among = fastest.Devices(jax.devices()[:8], chips.CHIPS["h100"], memory, **others)
    return auto.chosen(config, start, among, prompt=prompt)


def made(config):
    return (
        config.placement.policy,
        config.start.remat,
        config.method.micro_batch_size,
    )


def room_for(held, *, remat, rows, columns=10):
    """Memory of a device that exactly fits `held` and the activations, bytes."""
    _, start = run()
    model = dataclasses.replace(start.model, remat=remat, attention="xla")
    activations = workload.activation_bytes(model, rows=rows, columns=columns)
    return int((held + activations) / fastest.ROOM) + 2


def test_copies_of_the_state_go_where_they_fit():
    config, lines = choose(memory=100 * GIB)
    assert made(config) == (MeshShape(data=8), "none", None)
    assert lines[0] == "--auto, for 8 x NVIDIA H100 80GB HBM3 and rows of 10 columns:"
    held = (STATE + REFERENCE) / GIB
    assert "--placement.policy data=8: models, optimizers and gradi" in lines[1]
    assert f"take {held:.2f} GiB of 90.00 per device" in lines[1]
    assert "--remat none --micro-batch-size 16: activations take about " in lines[2]


def test_what_does_not_fit_as_copies_is_shared():
    """Memory just enough for a copy keeps copies; a few bytes less leads to fsdp."""
    enough = room_for(STATE + REFERENCE, remat="full", rows=1)
    config, _ = choose(memory=enough + 64)  # bytes of counters
    assert made(config) == (MeshShape(data=8), "full", 8)
    config, _ = choose(memory=enough - 64)
    assert made(config) == (MeshShape(fsdp=8), "none", None)


@pytest.mark.slow
def test_remat_and_micro_batches_give_way_to_what_has_room():
    shared = (STATE + REFERENCE) // 8
    given, eight = "--placement.policy=fsdp=8", "--micro-batch-size=8"
    for words, remat, rows, micro in (
        (("micro-batch", given), "none", 2, None),
        (("micro-batch", given), "none", 1, 8),
        ((given, eight), "none", 1, 8),
        ((given, eight), "dots", 1, 8),
        ((given, eight), "full", 1, 8),
    ):
        # Vectors are not shared by the devices: a MiB, beside activations of hundreds.
        memory = room_for(shared, remat=remat, rows=rows, columns=510) + 2**21
        config, _ = choose(*words, memory=memory, prompt=506)
        assert made(config) == (MeshShape(fsdp=8), remat, micro), (words, remat)
    config, lines = choose(given, memory=int(shared / fastest.ROOM))
    assert made(config) == (MeshShape(fsdp=8), "none", None)
    assert "no mesh and remat have room for an update" in lines[1]


def test_what_is_given_or_not_asked_for_stays():
    words = ("--placement.policy=data=2,fsdp=4", "--remat=dots")
    config, _ = choose(*words, "--micro-batch-size=8", memory=100 * GIB)
    assert made(config) == (MeshShape(data=2, fsdp=4), "dots", 8)
    enough = room_for(STATE + REFERENCE, remat="full", rows=1) + 64
    config, start = run()
    among = fastest.Devices(jax.devices()[:8], chips.CHIPS["h100"], enough)
    for names, mesh, remat, micro in (
        (("mesh",), MeshShape(fsdp=8), "none", None),
        (("mesh", "remat"), MeshShape(fsdp=8), "none", None),
        (("remat",), MeshShape(), "none", None),  # on one device, where nothing fits
        (None, MeshShape(), "none", None),
    ):
        asked = dataclasses.replace(config, auto=names)
        result, lines = auto.chosen(asked, start, among, prompt=6)
        assert made(result) == (mesh, remat, micro), names
        assert bool(lines) == (names is not None)


def test_devices_that_rows_do_not_divide_share_heads_or_are_idle():
    twelve = ("--batch-size=12", "--group-size=4")
    config, _ = choose(*twelve, memory=100 * GIB)
    assert config.placement.policy == MeshShape(data=4, tensor=2)
    config, lines = choose(*twelve, memory=100 * GIB, heads=1)
    assert config.placement.policy == MeshShape(data=4)
    idle = "4 of 8 devices are idle: at most 4 can share the 12 rows of an update and"
    assert any(idle in line for line in lines)


def test_gpus_of_several_nodes_share_weights_inside_of_them():
    shared = (STATE + REFERENCE) // 4
    enough = room_for(shared, remat="none", rows=2) + 2**20
    config, _ = choose(memory=enough, per_node=4)
    assert config.placement.policy == MeshShape(data=2, fsdp=4)


def test_of_a_device_without_figures_nothing_is_chosen():
    config, start = run("--auto")
    among = fastest.Devices(jax.devices()[:8], None)
    same, lines = auto.chosen(config, start, among, prompt=6)
    assert same == config
    assert lines == [
        "--auto: no figures of cpu are known, so every option is kept; the policy is "
        "on 1 of 8 devices"
    ]


def test_rows_of_a_cache_that_has_no_room_are_decoded_in_turns(monkeypatch):
    """As if every layout had room for eight rows."""
    tried = []

    def placed(config, models, among, **known):
        rows = models.recipe.continuous_batching or config.batch.batch_size
        tried.append(rows)
        assert known["prompt"] == 6
        return config, "Sampling on data=8" if rows <= 8 else None

    monkeypatch.setattr(fastest, "placed", placed)
    config, lines = choose(memory=100 * GIB)
    assert tried == [16, 8]
    assert config.method.continuous_batching == 8
    assert (
        "  --continuous-batching 8: as no layout has room for 16 rows of" in lines[-1]
    )
    assert config.placement.sampler == AUTO  # chosen when the run begins
    config, _ = choose("--continuous-batching=16", memory=100 * GIB)
    assert config.method.continuous_batching == 16
    config, _ = choose("--placement.sampler=policy", memory=100 * GIB)
    assert config.method.continuous_batching is None
    assert tried == [16, 8]


def test_a_plan_has_the_choices_of_its_run():
    path = planned.model(**WIDE)
    config, options = planned.parsed("grpo", "--auto", path=path, chip="h100")
    config, lines = job.chosen(config, options)
    assert made(config) == (MeshShape(data=8), "none", None)
    assert lines[0] == "--auto, for 8 x NVIDIA H100 80GB HBM3 and rows of 10 columns:"
    config, options = planned.parsed("grpo", path=path, chip="h100")
    assert job.chosen(config, options) == (config, [])


def test_activations_by_hand_are_near_the_compiler_s():
    """Compares with planning/README.md's v5e: GPT-2 small on 4 x 512 tokens."""
    model = dataclasses.replace(registry.KNOWN["gpt2"], attention="xla")
    for remat, mib in (("none", 3056), ("dots", 892), ("full", 316)):
        ran = dataclasses.replace(model, remat=remat)
        by_hand = workload.activation_bytes(ran, rows=4, columns=512)
        assert by_hand / 2**20 == pytest.approx(mib, rel=0.1), remat
        # Heads and MLP are shared, the width of the model is not.
        halved = workload.activation_bytes(ran, rows=4, columns=512, tensor=2)
        assert 0.5 < halved / by_hand < 0.75


def test_layers_that_read_other_keys_keep_none_of_their_own():
    """The last two of six: a local one, and a global one whose values are its keys."""
    model = dataclasses.replace(
        tiny.SHARED, dtype="bfloat16", remat="dots", wide_shared_mlp=False
    )
    own = dataclasses.replace(model, shared_layers=0)
    of_shared, of_own = (
        workload.activation_bytes(one, rows=4, columns=8) for one in (model, own)
    )
    keys = 2 * model.num_kv_heads * model.head_dim + 8
    assert of_own - of_shared == 4 * 8 * 2 * keys


SUPERVISED = ("sft", "dpo", "reward-model")


def choose_of(name, *words, memory, heads=8):
    path = planned.model(**WIDE | {"heads": heads})
    config, options = planned.parsed(name, "--auto", *words, path=path, chip="h100")
    target = measured.target(None, chip="h100", mesh=MeshShape(data=8))
    start = job.Job(options, target).start_of(config)
    among = fastest.Devices(jax.devices()[:8], chips.CHIPS["h100"], memory)
    task, lines = auto.chosen_of_task(supervised.TASKS[name](config), start, among)
    return task.config, lines


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_commands_choose_too(name):
    """Rows have 10 tokens; a pair's two texts share a row in DPO, else have two."""
    columns = 20 if name == "dpo" else 10
    texts = 2 if name == "reward-model" else 1
    frozen = REFERENCE if name == "dpo" else 0
    config, lines = choose_of(name, memory=100 * GIB)
    assert made(config) == (MeshShape(data=8), "none", None)
    assert f"rows of {columns} columns:" in lines[0]
    held = (STATE + frozen) / GIB
    assert f"take {held:.2f} GiB of 90.00 per device" in lines[1]
    # A row of each device, of all texts, at just so much memory; then a bit less.
    enough = room_for(STATE + frozen, remat="full", rows=texts, columns=columns)
    config, _ = choose_of(name, memory=enough + 2**16)  # counters, a head of scores
    assert made(config) == (MeshShape(data=8), "full", 8)
    config, _ = choose_of(name, memory=enough - 64)
    assert made(config) == (MeshShape(fsdp=8), "none", None)
    words = ("--placement.policy=data=2,fsdp=4", "--remat=dots", "--micro-batch-size=8")
    config, _ = choose_of(name, *words, memory=100 * GIB)
    assert made(config) == (MeshShape(data=2, fsdp=4), "dots", 8)


@pytest.mark.parametrize(
    ("name", "columns"), [("sft", 14), ("dpo", 14), ("reward-model", 10)]
)
def test_packed_rows_are_as_wide_as_they_are_asked_for(name, columns):
    words = () if name == "reward-model" else ("--row-width=14",)
    _, lines = choose_of(name, *words, memory=100 * GIB)
    assert f"rows of {columns} columns:" in lines[0]


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_plan_of_a_supervised_command_has_its_choices(name):
    path = planned.model(**WIDE)
    config, options = planned.parsed(name, "--auto", path=path, chip="h100")
    config, lines = job.chosen(config, options)
    assert made(config) == (MeshShape(data=8), "none", None)
    assert lines[0].startswith("--auto, for 8 x NVIDIA H100 80GB HBM3 and rows of ")
    config, options = planned.parsed(name, path=path, chip="h100")
    assert job.chosen(config, options) == (config, [])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_supervised_run_takes_what_is_chosen(tmp_path, monkeypatch, capsys):
    toy_files.checkpoint(tmp_path / "model")
    row = {"prompt": "the cat", "response": "sat very good ."}
    toy_files.jsonl(tmp_path / "rows.jsonl", *[row, row | {"prompt": "a dog"}] * 20)
    monkeypatch.chdir(tmp_path)
    options = ("--data=rows.jsonl", "--model=model", "--num-steps=2", "--no-progress")

    def sft(folder, *words):
        main.main(["sft", *options, f"--out={folder}", *words])
        return capsys.readouterr().out

    with monkeypatch.context() as patch:
        patch.setattr(chips, "of_device", lambda _: chips.CHIPS["h100"])
        text = sft("run", "--auto")
    assert "--auto, for 8 x NVIDIA H100 80GB HBM3 and rows of 16 columns:" in text
    assert "  --placement.policy data=8: models, optimizers and gradients take" in text
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["auto"] == []
    assert config["placement"]["policy"] == vars(MeshShape())
    sft("given", "--placement.policy=data=8")
    for name in ("metrics.jsonl", "model/model.safetensors"):
        chosen, given = (tmp_path / folder / name for folder in ("run", "given"))
        assert chosen.read_bytes() == given.read_bytes()
    assert "no figures of cpu are known" in sft("on_a_cpu", "--auto")


STOPPING = """
import signal
calls = 0

def score(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 2:  # in step 1: the rehearsal's call is step 0's
        signal.raise_signal(signal.SIGTERM)
    return [float(len(set(response.split()))) for response in responses]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_run_goes_on_with_what_was_asked_for_not_with_what_was_chosen(
    tmp_path, monkeypatch, capsys
):
    """Chosen for eight chips; a resume on a CPU uses the original options."""
    kill_kinds.write_files(tmp_path)
    (tmp_path / "stopping_at_one.py").write_text(STOPPING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--prompts=many.jsonl", "--model=model", "--num-steps=3")
    options += ("--batch-size=16", "--group-size=4", "--max-new-tokens=4")
    options += ("--reward=stopping_at_one:score", "--no-progress")

    def grpo(folder, *words):
        main.main(["grpo", *options, f"--out={folder}", *words])

    with monkeypatch.context() as patch:
        patch.setattr(chips, "of_device", lambda _: chips.CHIPS["h100"])
        with pytest.raises(SystemExit) as stopped:
            grpo("run", "--auto")
    assert stopped.value.code == 128 + signal.SIGTERM
    text = capsys.readouterr().out
    assert "--auto, for 8 x NVIDIA H100 80GB HBM3 and rows of 8 columns:" in text
    assert "  --placement.policy data=8: models, optimizers and gradients take" in text
    assert "Sampling on data=8" in text
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["auto"] == []
    assert config["placement"]["policy"] == vars(MeshShape())
    assert config["placement"]["sampler"]["devices"] == "auto"
    assert config["start"]["remat"] == "none"
    assert config["method"]["micro_batch_size"] is None
    shutil.copytree("run", "other")
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    for folder, words in (("run", ("--auto",)), ("other", ())):
        grpo(folder, *words, "--resume")
        after = metrics.read(tmp_path / folder / "metrics.jsonl")
        assert after[: len(rows)] == rows
        assert len(after) == 3
        told = "no figures of cpu are known" in capsys.readouterr().out
        assert told == bool(words)
