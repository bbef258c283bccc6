"""Names of operations in a trace."""

import pytest
import xspaces

from rlhf_jax.runs.profile.op_names import op_names

PROGRAMS = {
    "jit_learn(144)": xspaces.program(
        {"dot.1": "jit(learn)/loss/dot_general", "add": "jit(learn)/optimizer/add"}
    ),
    "jit_sample(12)": xspaces.program({"dot.1": "jit(sample)/rollout/dot_general"}),
    "jit_sample(13)": xspaces.program({"dot.1": "jit(sample)/values/dot_general"}),
    "unnumbered": xspaces.program({"dot.1": "wrong"}),
}


def test_names_are_those_of_the_program_that_ran():
    names = op_names(
        xspaces.serialised(xspaces.plane("/host:metadata", {}, programs=PROGRAMS))
    )
    assert names.of_programs.keys() == {144, 12, 13}

    def name(program, operation, module=None):
        return names.names(
            event="dot.1", program=program, module=module, operation=operation
        )

    assert name(144, "dot.1") == {"jit(learn)/loss/dot_general"}
    assert name(12, "dot.1") == {"jit(sample)/rollout/dot_general"}
    assert name(144, "add") == {"jit(learn)/optimizer/add"}
    assert name(12, "add") == name(7, "dot.1") == name(None, None) == set()


def test_a_program_of_the_cache_runs_under_another_number():
    """Its module has the name; where several modules do, any of them may be meant."""
    names = op_names(
        xspaces.serialised(xspaces.plane("/host:metadata", {}, programs=PROGRAMS))
    )

    def name(program, module):
        return names.names(
            event="dot.1", program=program, module=module, operation="dot.1"
        )

    assert name(99, "jit_learn") == {"jit(learn)/loss/dot_general"}
    assert name(99, "jit_sample") == {
        "jit(sample)/rollout/dot_general",
        "jit(sample)/values/dot_general",
    }
    assert name(13, "jit_sample") == {"jit(sample)/values/dot_general"}
    assert name(99, "jit_other") == set()


def test_a_trace_may_say_it_of_the_event_itself():
    long = "%fusion.3 = f32[8] fusion(p)"
    line = {"XLA Ops": [(long, 0, 1, {})]}
    plane = xspaces.plane("/device:TPU:0", line, tf_ops={long: "jit(f)/values/dot:"})
    names = op_names(xspaces.serialised(plane))
    assert names.names(event=long) == {"jit(f)/values/dot:"}


def test_what_is_cut_off_is_told():
    whole = xspaces.serialised(xspaces.plane("/host:metadata", {}, programs=PROGRAMS))
    for size in (len(whole) - 1, len(whole) // 2, 1):
        with pytest.raises(ValueError, match="expected"):
            op_names(whole[:size])
    assert op_names(b"") == ({}, {}, {})
