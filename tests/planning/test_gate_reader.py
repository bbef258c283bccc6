"""Findings of the gate in programs written by hand."""

import gate

PROGRAM = """
HloModule tokens

%cast (p: f32[512,512]) -> bf16[512,512] {{
  %p = f32[512,512]{{1,0}} parameter(0)
  ROOT %c = bf16[512,512]{{1,0}} convert(%p)
}}

%body (s: (f32[512,512], f32[8,512])) -> (f32[512,512], f32[8,512]) {{
  %s = (f32[512,512]{{1,0}}, f32[8,512]{{1,0}}) parameter(0)
  %w = f32[512,512]{{1,0}} get-tuple-element(%s), index=0
  %x = f32[8,512]{{1,0}} get-tuple-element(%s), index=1
  {line}
  %y = f32[8,512]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}
  ROOT %t = (f32[512,512]{{1,0}}, f32[8,512]{{1,0}}) tuple(%w, %y)
}}

%more (q: (f32[512,512], f32[8,512])) -> pred[] {{
  %q = (f32[512,512]{{1,0}}, f32[8,512]{{1,0}}) parameter(0)
  ROOT %always = pred[] constant(true)
}}

ENTRY %main (a: f32[512,512], b: f32[8,512]) -> (f32[512,512], f32[8,512]) {{
  %a = f32[512,512]{{1,0}} parameter(0)
  %b = f32[8,512]{{1,0}} parameter(1)
  %i = (f32[512,512]{{1,0}}, f32[8,512]{{1,0}}) tuple(%a, %b)
  ROOT %loop = (f32[512,512]{{1,0}}, f32[8,512]{{1,0}}) while(%i), condition=%more, body=%body
}}
"""  # noqa: E501


def read(line):
    reader = gate.Reader(PROGRAM.format(line=line))
    [body] = reader.token_loops()
    return reader, body


def moved(line):
    return list(gate.moved_weights(*read(line)))


def test_weights_are_what_a_loop_carries_unchanged():
    reader, body = read("")
    assert reader.constants(body) == {"w": 4 * 512 * 512}


def test_what_a_loop_keeps_on_the_chip():
    reader, body = read("")
    assert reader.kept(body) == 0
    on_chip = PROGRAM.replace("512,512]{{1,0}}", "512,512]{{1,0:T(8,128)S(1)}}")
    assert gate.Reader(on_chip.format(line="")).kept(body) == 4 * 512 * 512


def test_a_product_of_weights_is_no_waste():
    assert moved("") == []


def test_weights_that_are_converted_copied_or_gathered_are_named():
    cast = "%m = bf16[512,512]{1,0} fusion(%w), kind=kLoop, calls=%cast"
    name = ', metadata={op_name="jit(sample)/query"}'
    assert moved(cast + name) == ["fusion %m [512, 512], jit(sample)/query"]
    assert moved("%m = f32[512,512]{1,0} copy(%w)") == [
        "copy %m [512, 512], no op_name"
    ]
    both = "%m = f32[512,1024]{1,0} concatenate(%w, %w), dimensions={1}"
    assert len(moved(both)) == 1
    gathered = "%m = f32[4096,512]{1,0} all-gather(%w), replica_groups={{0,1}}"
    assert len(moved(gathered)) == 1


def test_a_row_of_a_table_is_taken_freely():
    row = "%m = f32[8,512]{1,0} gather(%w, %x), offset_dims={1}"
    assert moved(row) == []


def test_whole_logits_that_are_summed_are_named():
    summed = "%m = f32[8,999]{1,0} all-reduce(%x), replica_groups={{0,1}}"
    reader, body = read(summed)
    [named] = gate.summed_logits(reader, body, vocab=999)
    assert named == "all-reduce %m [8, 999], no op_name"
    assert list(gate.summed_logits(reader, body, vocab=1000)) == []


def test_float32_logits_of_whole_rows_are_named():
    rows = gate.NEW
    options = {"vocab": 999, "width": 512, "shares": {1}}
    reader, _ = read(f"%m = f32[{rows},999]{{1,0}} broadcast(%x), dimensions={{}}")
    assert len(list(gate.whole_logits(reader, **options))) == 1
    half, _ = read(f"%m = bf16[{rows},999]{{1,0}} broadcast(%x), dimensions={{}}")
    assert list(gate.whole_logits(half, **options)) == []
    few, _ = read(f"%m = f32[{rows - 1},999]{{1,0}} broadcast(%x), dimensions={{}}")
    assert list(gate.whole_logits(few, **options)) == []


def test_gradients_that_are_summed_whole_are_named():
    line = "%m = f32[512,512]{1,0} all-reduce(%w), replica_groups={{0,1,2,3}}"
    reader, _ = read(line)
    count = 512 * 512
    assert len(list(gate.summed_gradients(reader, smallest=count, devices=4))) == 1
    # Activations are summed over the fewer devices of `tensor`.
    assert not list(gate.summed_gradients(reader, smallest=count, devices=8))
