"""Device time by scope, of hand-written traces and of a program that ran."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
import xspaces

from rlhf_jax.runs.profile import trace


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(learn)/jit(main)/loss/dot_general", "loss"),
        ("jit(learn)/while/body/transpose(jvp(loss))/while/body/add", "loss"),
        ("jit(learn)/loss/reference/dot_general", "reference"),
        ("jit(iteration)/rollout/while", "rollout"),
        ("loss", "loss"),
        ("jit(values)/values/dot_general", "values"),
        # The names of programs and of parts of names are no scopes.
        ("jit(loss)/dot_general", None),
        ("jit(learn)/critic_values/my_loss/dot", None),
        ("jit(learn)/lossy/dot", None),
        ("", None),
    ],
)
def test_the_innermost_scope_counts(name, scope):
    assert trace.scope_of(name) == scope


def written(tmp_path, *planes):
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(xspaces.serialised(*planes))
    return trace.times(path)


def on_cpu(operation, device=0):
    return {"hlo_op": operation, "program_id": 7, "device_ordinal": device}


PROGRAM = {
    "jit_f(7)": xspaces.program(
        {
            "draw": "jit(f)/rollout/dot",
            "dot": "jit(f)/while/body/loss/dot",
            "adam": "jit(f)/while/body/optimizer/mul",
            "while": "jit(f)/while",
        }
    )
}


def test_a_scope_takes_the_time_in_which_it_runs(tmp_path):
    """Threads of one device count once; a loop has the time its operations leave."""
    times = written(
        tmp_path,
        xspaces.plane("/host:metadata", {}, programs=PROGRAM),
        xspaces.plane(
            "/host:CPU",
            {
                "thread 1": [
                    ("draw", 0, 10, on_cpu("draw")),
                    ("while", 20, 60, on_cpu("while")),
                    ("dot", 22, 40, on_cpu("dot")),
                    ("adam", 50, 58, on_cpu("adam")),
                    ("end: dot", 40, 45, {}),
                ],
                "thread 2": [
                    ("dot", 30, 45, on_cpu("dot")),
                    ("strange", 5, 12, on_cpu("strange")),
                ],
                "python": [("reward", 8, 18, {}), ("reward", 56, 64, {})],
            },
        ),
    )
    assert times.scopes == pytest.approx(
        {"rollout": 10e-6, "loss": 23e-6, "optimizer": 8e-6}
    )
    assert list(times.scopes) == ["rollout", "loss", "optimizer"]
    assert times.busy == pytest.approx(12e-6 + 40e-6)
    assert times.unscoped == pytest.approx(52e-6 - 41e-6)
    assert times.waited == pytest.approx(6e-6 + 4e-6)  # 12 to 18 and 60 to 64
    assert times.devices == 1


def test_programs_of_one_name_that_disagree_are_in_no_scope(tmp_path):
    programs = {
        "jit_f(1)": xspaces.program({"a": "f/loss/x", "b": "f/loss/x"}),
        "jit_f(2)": xspaces.program({"a": "f/values/x", "b": "f/loss/y"}),
    }

    def cached(operation):
        return {"hlo_op": operation, "program_id": 9, "hlo_module": "jit_f"}

    events = [("a", 0, 10, cached("a")), ("b", 10, 14, cached("b"))]
    times = written(
        tmp_path,
        xspaces.plane("/host:metadata", {}, programs=programs),
        xspaces.plane("/host:CPU", {"thread": events}),
    )
    assert times.scopes == pytest.approx({"loss": 4e-6})
    assert times.unscoped == pytest.approx(10e-6)


def test_seconds_are_means_over_devices(tmp_path):
    events = [("dot", 0, 10, on_cpu("dot")), ("dot", 0, 30, on_cpu("dot", 1))]
    times = written(
        tmp_path,
        xspaces.plane("/host:metadata", {}, programs=PROGRAM),
        xspaces.plane("/host:CPU", {"thread": events}),
    )
    assert times == ({"loss": pytest.approx(20e-6)}, pytest.approx(20e-6), 0, 0, 2)


def test_an_accelerator_s_own_lines_count_and_not_what_its_host_launches(tmp_path):
    """A GPU's streams and a TPU's operations count; other lines repeat them."""
    host = xspaces.plane("/host:CPU", {"thread": [("dot", 0, 90, on_cpu("dot"))]})
    metadata = xspaces.plane("/host:metadata", {}, programs=PROGRAM)
    gpu = xspaces.plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                ("cutlass_kernel", 0, 4, {"hlo_op": "dot", "program_id": 7})
            ],
            "Stream #14(Memcpy)": [("MemcpyD2H", 2, 5, {})],
            "XLA Modules": [("jit_f", 0, 50, {})],
        },
    )
    times = written(tmp_path, metadata, host, gpu)
    assert times.scopes == pytest.approx({"loss": 4e-6})
    assert times.busy == pytest.approx(5e-6)
    tpu = xspaces.plane(
        "/device:TPU:0",
        {"XLA Ops": [("%dot = dot()", 0, 6, {})], "Steps": [("0", 0, 50, {})]},
        tf_ops={"%dot = dot()": "jit(f)/reference/dot_general:"},
    )
    times = written(tmp_path, metadata, host, tpu)
    assert times.scopes == pytest.approx({"reference": 6e-6})
    assert times.busy == pytest.approx(6e-6)


def test_a_loop_has_what_its_body_leaves_of_it(tmp_path):
    """In a TPU's line the loop's event spans its branch, which spans its operations."""
    names = {
        "%while": "jit(f)/loss/while",
        "%conditional": "jit(f)/loss/while/body/cond",
        "%dot": "jit(f)/loss/while/body/reference/dot",
        "%add": "jit(f)/loss/while/body/optimizer/add",
        "%late": "jit(f)/values/add",
    }
    events = [
        ("%while", 0, 50),
        ("%conditional", 10, 30),
        ("%dot", 12, 20),
        ("%dot", 20, 28),
        ("%add", 40, 50),
        ("%late", 60, 70),
        ("%dot", 65, 80),  # not inside of the one before
    ]
    tpu = xspaces.plane(
        "/device:TPU:0",
        {"XLA Ops": [(*event, {}) for event in events]},
        tf_ops=names,
    )
    times = written(tmp_path, tpu)
    assert times.scopes == pytest.approx(
        {
            "reference": 16e-6 + 15e-6,
            "values": 10e-6,
            "loss": 24e-6,  # 0 to 12, 28 to 40
            "optimizer": 10e-6,
        }
    )
    assert times.busy == pytest.approx(70e-6)


def test_a_trace_without_operations_names_no_scope(tmp_path):
    host = xspaces.plane("/host:CPU", {"python": [("reward", 0, 10, {})]})
    assert written(tmp_path, host) == ({}, 0.0, 0.0, 0.0, 0)


@pytest.mark.slow
def test_the_scopes_of_a_program_that_ran(tmp_path):
    """Gradients and loops keep their scopes; the loop of 40 takes most of the time."""

    def function(x):
        with jax.named_scope("reference"):
            fixed = jax.lax.stop_gradient(jnp.tanh(x @ x))
        with jax.named_scope("loss"):

            def body(carry, _):
                return jnp.tanh(carry @ x), None

            return jax.lax.scan(body, fixed, None, length=40)[0].sum()

    program = jax.jit(jax.grad(function))
    x = jnp.full((200, 200), 0.01)
    program(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        program(x).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    times = trace.times(path)
    assert list(times.scopes) == ["reference", "loss"]
    assert 0 < times.scopes["reference"] < 0.2 * times.scopes["loss"]
    # As the trace viewer's own file has it: the busy time lies within the program's.
    (viewer,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(viewer.read_bytes()))["traceEvents"]
    operations = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if "hlo_op" in event.get("args", {})
    ]
    span = max(end for _, end in operations) - min(start for start, _ in operations)
    assert times.busy * 1e6 <= span * 1.01
    assert times.busy * 1e6 >= 0.5 * span
