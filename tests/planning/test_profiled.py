"""The table of a profiled run: seconds by scope, tokens, model FLOPs and MFU."""

import functools
import json
import types

import numpy as np
import pytest
import xspaces

from rlhf_jax import config
from rlhf_jax.planning import chips, profiled
from rlhf_jax.runs.profile.profiler import Text

MODEL = config.gpt2(
    vocab_size=50, hidden_size=8, num_layers=3, num_heads=2, max_positions=64
)
CRITIC = config.gpt2(
    vocab_size=50, hidden_size=4, num_layers=2, num_heads=2, max_positions=64
)
TEXTS = [Text(5, 3), Text(5, 7), Text(2, 4), Text(2, 1)]
MATRIX = np.zeros((6, 7))


def forward(size, layers, *, head, texts=TEXTS, group_size=1):
    """FLOPs by a loop over tokens: kernels, (query, key) pairs, and predictions."""
    flops = 0
    for row, (prompt, response, observed) in enumerate(texts):
        first = prompt if row % group_size else 0  # which its group has run
        for token in range(first, prompt + response + observed):
            flops += 2 * layers * (4 * size * size + 2 * 4 * size * size)
            flops += layers * 2 * 2 * size * (token + 1)
        flops += 2 * size * 50 * response * head
    return flops


def recipe(**changes):
    """What the count reads of a recipe, of two responses per prompt."""
    fields = {"model": MODEL, "num_epochs": 1, "rows_per_prompt": 2, "critic": None}
    return types.SimpleNamespace(**fields | {"trained_share": 1.0} | changes)


def valued(model, *, shared_trunk=False):
    return types.SimpleNamespace(model=model, shared_trunk=shared_trunk)


def test_an_iteration_of_ppo_counts_every_pass():
    policy, value = (
        functools.partial(forward, 8, 3),
        functools.partial(forward, 4, 2),
    )
    flops = profiled.policy_gradient_flops(
        TEXTS,
        recipe=recipe(num_epochs=4, rows_per_prompt=1, critic=valued(CRITIC)),
        references=[MODEL, CRITIC],
        rewards=[CRITIC],
    )
    assert flops == pytest.approx(
        {
            "rollout": policy(head=True),
            "reference": policy(head=True) + value(head=True),
            "reward": value(head=False),
            "values": value(head=False),
            "loss": 4 * 3 * (policy(head=True) + value(head=False)),
        }
    )


def test_groups_share_their_prompt_and_adapters_save_a_pass():

    def flops(texts=TEXTS, adapters=None, **changes):
        return profiled.policy_gradient_flops(
            texts, recipe=recipe(**changes), adapters=adapters
        )

    whole = forward(8, 3, head=True)
    turns = [Text(5, 3, 2), Text(5, 7, 0), Text(2, 4, 6), Text(2, 1, 1)]
    assert flops(texts=turns)["rollout"] == pytest.approx(
        forward(8, 3, head=True, group_size=2, texts=turns)
    )
    assert flops()["rollout"] == pytest.approx(forward(8, 3, head=True, group_size=2))
    assert flops()["loss"] == pytest.approx(3 * whole)
    assert flops(trained_share=0.5)["loss"] == pytest.approx(1.5 * whole)
    assert flops(critic=valued(MODEL, shared_trunk=True))["loss"] == flops()["loss"]
    adapters = {"a": MATRIX, "b": MATRIX}
    tokens = sum(map(sum, TEXTS))
    own = 3 * 2 * tokens * 2 * MATRIX.size
    assert flops(adapters=adapters)["loss"] == pytest.approx(2 * whole + own)
    # A critic apart has adapters too; one that is a head has its values, and no pass.
    apart = flops(adapters=adapters, critic=valued(MODEL))
    value = forward(8, 3, head=False)
    assert apart["loss"] == pytest.approx(2 * whole + 2 * value + 2 * own)
    assert flops(critic=valued(MODEL, shared_trunk=True))["values"] == pytest.approx(
        value
    )


def test_an_update_of_dpo_counts_its_reference():
    flops = profiled.supervised_flops(TEXTS, model=MODEL, head=True, reference=CRITIC)
    assert flops == pytest.approx(
        {"loss": 3 * forward(8, 3, head=True), "reference": forward(4, 2, head=True)}
    )
    flops = profiled.supervised_flops(TEXTS, model=MODEL, head=False)
    assert flops == pytest.approx({"loss": 3 * forward(8, 3, head=False)})


def run_folder(tmp_path, *, scopes=("rollout", "reference", "loss"), **more):
    """Two steps in 100 µs: 20 µs of rollout, 10 of the reference, 40 of the loss."""
    names = {"a": "rollout", "b": "reference", "c": "loss"}
    program = {
        operation: f"jit(f)/{scope}/dot"
        for operation, scope in names.items()
        if scope in scopes
    }
    ends = {"a": (0, 20), "b": (20, 30), "c": (35, 75), "d": (75, 80)}
    events = [
        (operation, *span, {"hlo_op": operation, "program_id": 7})
        for operation, span in ends.items()
    ]
    file = tmp_path / "profile" / "a.xplane.pb"
    file.parent.mkdir()
    file.write_bytes(
        xspaces.serialised(
            xspaces.plane(
                "/host:metadata", {}, programs={"jit_f(7)": xspaces.program(program)}
            ),
            xspaces.plane("/host:CPU", {"t": events, "p": [("reward", 28, 34, {})]}),
        )
    )
    window = {
        "stage": "ppo",
        "first": 5,
        "end": 7,
        "seconds": 100e-6,
        "trace": "profile/a.xplane.pb",
        "texts": [TEXTS, TEXTS[:2]],
        "compiled": 0,
        "device": "cpu",
        "devices": 8,
        "processes": 1,
        **more,
    }
    (tmp_path / "profile" / "window.json").write_text(json.dumps(window))
    rows = [
        {"stage": stage, "step": step, "seconds": 1.0, "phases": {"sample": 0.25}}
        for stage in ("sft", "ppo")
        for step in range(8)
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "timings.jsonl").write_text(lines)
    return tmp_path


def flops_of(texts):
    return {"rollout": 1e3 * len(texts), "loss": 1e6 * len(texts)}


def test_the_table_of_a_cpu_has_no_mfu(tmp_path, capsys):
    summary = profiled.summary(
        run_folder(tmp_path, compiled=3), profile="4:8", flops=flops_of
    )["profile"]
    assert summary["source"] == "trace"
    assert summary["seconds"] == pytest.approx(
        {
            "rollout": 10e-6,
            "reference": 5e-6,
            "loss": 20e-6,
            "other device work": 2.5e-6,
            "waiting for the reward": 2e-6,
            "devices idle": 10.5e-6,
        }
    )
    # The parts and nothing else make the step, where nothing runs at the same time.
    assert sum(summary["seconds"].values()) == pytest.approx(50e-6)
    assert summary["seconds_per_step"] == pytest.approx(50e-6)
    assert summary["reference_share"] == pytest.approx(0.1)
    assert summary["tokens_per_second"] == pytest.approx((29 + 20) / 100e-6)
    assert summary["model_flops_per_step"] == pytest.approx(3 * 1.001e6)
    assert summary["mfu"] is None
    text = " ".join(capsys.readouterr().out.split())
    assert "Where the time goes: ppo, steps 5 to 6" in text
    assert "MFU = model FLOPs / (seconds · devices · peak FLOPs per second" in text
    assert "unknown: no peak of this device is known" in text
    assert "the reference costs 10.0% of a step" in text
    assert "490,000" in text
    assert "3 programs were compiled in this window" in text


def test_the_mfu_of_a_chip_that_is_known(tmp_path, capsys):
    def work(texts):
        return {"loss": 1e10}

    folder = run_folder(tmp_path, device=chips.named("h100").kind)
    summary = profiled.summary(folder, profile="5:7", flops=work)["profile"]
    assert summary["mfu"] == pytest.approx(2e10 / (100e-6 * 1 * 989e12))
    text = " ".join(capsys.readouterr().out.split())
    assert "20.2% = 1e+10 / (5e-05 · 1 · 9.89e+14), the peak of bfloat16" in text
    assert "50.6%" in text  # of the 40 µs of the loss alone


@pytest.mark.parametrize("scopes", [(), ("rollout",)])
def test_a_trace_that_names_less_than_half_is_not_split(tmp_path, capsys, scopes):
    """A GPU's trace may: the loss would have no time, and an infinite MFU."""
    device = chips.named("h100").kind
    folder = run_folder(tmp_path, device=device, scopes=scopes)
    summary = profiled.summary(folder, profile="5:7", flops=flops_of)["profile"]
    assert summary["source"] == "trace"
    assert summary["seconds"] == pytest.approx(
        {
            "device work": 37.5e-6,
            "waiting for the reward": 2e-6,
            "devices idle": 10.5e-6,
        }
    )
    assert summary["reference_share"] is None
    text = " ".join(capsys.readouterr().out.split())
    assert "whose scopes the trace does not name" in text
    assert "rollout" not in text


@pytest.mark.parametrize("broken", ["is gone", "is cut off"])
def test_without_a_trace_the_table_has_the_host_s_phases(tmp_path, capsys, broken):
    folder = run_folder(tmp_path)
    trace = folder / "profile" / "a.xplane.pb"
    if broken == "is gone":
        trace.unlink()
    if broken == "is cut off":
        trace.write_bytes(trace.read_bytes()[:-3])
    summary = profiled.summary(folder, profile="5:7", flops=None)["profile"]
    assert summary["source"] == "timings.jsonl"
    assert summary["devices"] == 8
    assert summary["seconds"] == {"sample": 0.25}
    assert summary["reference_share"] is None
    assert summary["model_flops_per_step"] is None
    assert summary["tokens_per_second"] == pytest.approx(490_000)
    text = " ".join(capsys.readouterr().out.split())
    assert "phases of timings.jsonl, as the trace is not there or not whole" in text
    assert "unknown: model FLOPs are not counted for this command" in text


def test_every_process_has_the_devices_of_the_first_one_s_trace(tmp_path, capsys):
    """One device runs in each of 4 processes, of 8 devices in all."""
    folder = run_folder(tmp_path, processes=4)
    summary = profiled.summary(folder, profile="5:7", flops=flops_of)["profile"]
    assert summary["devices"] == 4
    out = capsys.readouterr().out
    assert "4 × cpu" in out
    assert "compiled" not in out


def test_a_run_without_a_profile_of_these_steps_has_no_table(tmp_path, capsys):
    assert profiled.summary(tmp_path, profile="5:7", flops=flops_of) == {}
    folder = run_folder(tmp_path)
    for profile in (None, "6:8", "3:6"):
        assert profiled.summary(folder, profile=profile, flops=flops_of) == {}
    assert capsys.readouterr().out == ""
