"""Readers given any bytes and any JSON return rows or raise InputError."""

import contextlib
import json

import hypothesis
import pytest
import toy_files
from hypothesis import strategies as st

from rlhf_jax import hf
from rlhf_jax.data import files, json_lines
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.folder import read_config
from rlhf_jax.runs.run_config import arguments, to_json
from rlhf_jax.train.supervised import sft
from rlhf_jax.train.supervised.demonstrations import Demonstrations

pytestmark = pytest.mark.slow

FIELDS = ("prompt", "response", "chosen", "rejected", "messages", "role", "content")
READERS = (
    json_lines.read_jsonl,
    files.read_prompts,
    files.read_demonstrations,
    files.read_preferences,
)
texts = st.text(st.characters(codec=None), max_size=8)  # halves of surrogates too
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
encoded = texts.map(lambda text: text.encode(errors="replace"))
keys = st.sampled_from(FIELDS) | texts
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
rows = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, values))
quickly = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


@quickly
@hypothesis.given(
    st.binary(max_size=60) | texts.map(lambda t: t.encode(errors="replace"))
)
def test_any_bytes(folder, content):
    for name in ("any.jsonl", "any.txt"):
        (folder / name).write_bytes(content)
    for read in READERS:
        with contextlib.suppress(InputError):
            assert all(isinstance(row, dict) for row in read(folder / "any.jsonl"))
    with contextlib.suppress(InputError):
        read_back = [row["prompt"] for row in files.read_prompts(folder / "any.txt")]
        whole = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        assert read_back == [line for line in whole.split("\n") if line.strip()]


@quickly
@hypothesis.given(st.lists(rows, min_size=1, max_size=3))
def test_any_rows(folder, rows):
    toy_files.jsonl(folder / "any.jsonl", *rows)
    # Every row with its values; NaN is no number that equals itself.
    assert list(map(repr, json_lines.read_jsonl(folder / "any.jsonl"))) == list(
        map(repr, rows)
    )
    for read in READERS[1:]:
        with contextlib.suppress(InputError):
            assert 1 <= len(read(folder / "any.jsonl")) <= len(rows)


@quickly
@hypothesis.given(st.data())
def test_any_recorded_config(folder, data):
    """A run's config.json with replaced values or arbitrary bytes."""
    path = folder / "config.json"
    fields = to_json(
        sft.Config(
            out=folder,
            data=Demonstrations(data="x"),
            start=sft.Start(model="y"),
        )
    )
    names = st.sampled_from([*fields, "mesh", *fields["placement"]]) | texts
    changed = data.draw(st.dictionaries(names, values, max_size=3))
    recorded = {"config": {**fields, **changed}, "versions": {}}
    either = st.just(json.dumps(recorded).encode()) | st.binary(max_size=40)
    path.write_bytes(data.draw(either | values.map(lambda v: json.dumps(v).encode())))
    with contextlib.suppress(InputError):
        read = read_config(path)
        words = arguments(sft.Config, read, source=path)
        assert all(isinstance(word, str) for word in words)


OPTIONS = {
    "model_type": "gpt2",
    "vocab_size": 24,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
}
OTHERS = (
    *("rope_scaling", "rope_parameters", "hidden_size", "architectures", "id2label"),
    *("num_hidden_layers", "num_attention_heads", "intermediate_size", "n_inner"),
    *("max_position_embeddings", "layer_types", "sliding_window", "eos_token_id"),
)


@quickly
@hypothesis.given(st.data())
def test_any_config_of_a_checkpoint(folder, data):
    """config.json of every family with replaced values or arbitrary bytes."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    names = st.sampled_from([*OPTIONS, *OTHERS])
    families = st.sampled_from([*hf.FAMILIES, "other"])
    options = OPTIONS | {"model_type": data.draw(families)}
    options |= data.draw(st.dictionaries(names, values, max_size=4))
    any_bytes = st.just(json.dumps(options).encode()) | st.binary(max_size=40)
    (model / "config.json").write_bytes(data.draw(any_bytes))
    with contextlib.suppress(InputError):
        assert hf.model_config(model).vocab_size >= 1
    with contextlib.suppress(InputError):
        assert isinstance(hf.stop_ids(model), tuple)
