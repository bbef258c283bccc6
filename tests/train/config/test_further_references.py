"""--references: each argument becomes a frozen model beside the first reference."""

import dataclasses

import pytest
import toy_files

from rlhf_jax import fingerprint, frozen, hf
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.devices.placement import WITH_POLICY, Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.config.models import FurtherReference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b=runs/b/model", FurtherReference("b", "runs/b/model")),
        ("b=org/name,weight=0.5", FurtherReference("b", "org/name", 0.5)),
        (
            "b=/a,b/c=d,dtype=int8,embeddings=bfloat16",
            FurtherReference("b", "/a,b/c=d", 1.0, "int8", "bfloat16"),
        ),
        (
            "b=x,place=last:data=2,tensor=2@pinned_host,weight=0",
            FurtherReference(
                "b",
                "x",
                0.0,
                place=Place.parse("last:data=2,tensor=2@pinned_host"),
            ),
        ),
    ],
)
def test_a_reference_of_each_form(text, expected):
    reference = FurtherReference.parse(text)
    assert reference == expected
    assert (reference.option, reference.place == WITH_POLICY) == (
        "--references b",
        "place" not in text,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs/b/model", "--references: expected NAME=CHECKPOINT[,weight=W]"),
        ("=runs/b", "--references: expected NAME=CHECKPOINT[,weight=W]"),
        ("b=x,weight=1,weight=2", "got weight twice; give each once"),
        (
            "b=x,wait=1",
            "dtype, embeddings, place, weight before an equals sign, got wa",
        ),
        (
            "b=x,weight=much",
            "'b=x,weight=much': expected weight to be a number, got 'm",
        ),
        ("b=x,weight=-1", "weight of reference b: expected a number o"),
        ("k3=x", "expected a name of letters"),
        (
            "b=x,dtype=int4",
            "expected dtype to be one of float32, bfloat16, float16, int8",
        ),
        (
            "b=x,embeddings=int8",
            "expected embeddings to be one of float32, bfloat16, f",
        ),
        ("b=x,embeddings=float16", "embeddings: expected None where dtype is float32"),
        (
            "b=x,place=moon",
            "'b=x,place=moon': place: place: expected policy, AXIS=SIZE",
        ),
        ("b=x,place=auto", "got auto, which is for a sampler; name a place"),
    ],
)
def test_a_word_that_is_no_reference_is_told_what_one_is(text, message):
    with pytest.raises(InputError) as error:
        FurtherReference.parse(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_they_are_loaded_as_they_are_asked_for(tmp_path):
    policy = pretrained.load(str(toy_files.checkpoint(tmp_path / "policy")))
    deeper = dataclasses.replace(toy_files.MODEL, num_layers=2)
    toy_files.checkpoint(tmp_path / "same", seed=1)
    toy_files.checkpoint(tmp_path / "deeper", model=deeper)
    words = (f"a={tmp_path}/same,dtype=float16", f"b={tmp_path}/deeper,place=cpu")
    references = {
        one.name: Loader(policy).reference(
            one.path, storage=one.storage, place=one.place, option=one.option
        )
        for one in map(FurtherReference.parse, words)
    }
    assert list(references) == ["a", "b"]
    source = frozen.source_fingerprint_of(references["a"])
    assert source == fingerprint.fingerprint(hf.load(tmp_path / "same")[1])
    assert references["a"].stored["embed"]["tokens"].dtype == "float16"
    assert references["a"].model is None
    assert references["b"].model.num_layers == 2
