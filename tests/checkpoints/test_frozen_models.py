"""A reference from a checkpoint can score the policy's tokens, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_files
import toys
from jax.sharding import SingleDeviceSharding
from tiers import one_in

from rlhf_jax import config, fingerprint, frozen, hf
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.devices.placement import Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout

WORDS = toy_files.WORDS


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = toy_files.checkpoint(tmp_path_factory.mktemp("policy"))
    return pretrained.load(str(folder), dtype="bfloat16")


def load(folder, policy):
    return Loader(policy).reference(str(folder), storage=frozen_models.COPY)


@pytest.mark.slow
def test_another_checkpoint_of_the_policy_s_shape_is_taken(tmp_path, policy, capsys):
    """For any runtime options of the policy; a missing tokenizer is reported."""
    folder = toy_files.checkpoint(tmp_path, seed=1)
    how = {"dtype": "bfloat16", "remat": "full", "unroll": False, "transposed_rows": 4}
    model = dataclasses.replace(policy.model, **how)
    policy = policy._replace(model=model)
    expected = fingerprint.fingerprint(hf.load(folder)[1])
    assert expected != fingerprint.fingerprint(policy.params)
    assert frozen.fingerprint_of(load(folder, policy)) == expected
    assert capsys.readouterr().err == ""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert frozen.fingerprint_of(load(folder, policy)) == expected
    note = f"note: reference {folder} has no tokenizer to compare with that of "
    assert capsys.readouterr().err.startswith(note + policy.tokenizer.name_or_path)
    own = Loader(policy).reference(None, storage=frozen_models.COPY)
    assert frozen.fingerprint_of(own) == fingerprint.fingerprint(policy.params)


LLAMA = config.llama(
    vocab_size=len(WORDS) + 2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    intermediate_size=64,
    max_positions=16,
)


def gpt2(**changes):
    return dataclasses.replace(toy_files.MODEL, **changes)


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        *(
            pytest.param(gpt2(**changes), marks=pytest.mark.slow)
            for changes in (
                {"vocab_size": 25, "max_positions": 32},
                {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4},
            )
        ),
    ],
)
def test_a_reference_of_another_shape_is_run_with_its_own(tmp_path, policy, model):
    words = [*WORDS, "bird"][: model.vocab_size - 2]
    folder = toy_files.checkpoint(tmp_path, model=model, words=words)
    reference = load(folder, policy)
    assert reference.model is not None
    assert reference.model.vocab_size == policy.model.vocab_size
    assert reference.model.dtype == policy.model.dtype
    fields = {"vocab_size": model.vocab_size, "dtype": model.dtype}
    read, params = hf.load(folder)
    assert dataclasses.replace(reference.model, **fields) == layout.fastest(read)
    assert frozen.fingerprint_of(reference) == fingerprint.fingerprint(params)


@pytest.mark.parametrize(
    ("model", "words", "message"),
    one_in(
        4,
        [
            (
                gpt2(vocab_size=23),
                WORDS[1:],
                "got vocab_size 23 for 24; take one with",
            ),
            (gpt2(max_positions=8), WORDS, "got max_positions 8 for 16; take one"),
            (
                gpt2(),
                WORDS[::-1],
                "expected the policy's tokenizer, got one that gives",
            ),
            (gpt2(), [*WORDS[:-1], "bird"], "expected the policy's tokenizer, got one"),
        ],
    ),
)
def test_a_reference_that_cannot_score_the_policy_s_tokens(
    tmp_path, policy, model, words, message
):
    folder = toy_files.checkpoint(tmp_path, model=model, words=words)
    with pytest.raises(InputError) as error:
        load(folder, policy)
    assert str(error.value).startswith(f"reference {folder}: expected")
    assert message in str(error.value)
    if "tokenizer" in message:  # both are named
        assert f"for which {policy.tokenizer.name_or_path} gives" in str(error.value)


@pytest.mark.slow
def test_a_critic_is_on_a_trunk_of_any_shape(tmp_path, policy):
    folder = toy_files.checkpoint(tmp_path / "llama", model=LLAMA)
    model, params = Loader(policy).critic(str(folder))
    read, source = hf.load(folder)
    how = {"dtype": read.dtype, "attention": read.attention}
    assert dataclasses.replace(model, **how) == layout.fastest(read)
    assert model.dtype == policy.model.dtype == "bfloat16"
    assert toys.leaves_equal(
        params["trunk"], {name: source[name] for name in toys.TRUNK}
    )
    assert not np.asarray(params["score"]["kernel"]).any()
    short = toy_files.checkpoint(tmp_path / "short", model=gpt2(max_positions=8))
    with pytest.raises(InputError, match=r"^critic .*: expected a model that reads"):
        Loader(policy).critic(str(short))
    words = toy_files.checkpoint(tmp_path / "words", words=WORDS[::-1])
    with pytest.raises(InputError, match=r"^critic .*: expected the policy's"):
        Loader(policy).critic(str(words))


def test_a_tokenizer_that_cannot_be_read_is_not_taken_for_none(tmp_path, policy):
    folder = toy_files.checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"expected a folder with tokenizer\.json"):
        load(folder, policy)


@pytest.mark.slow
def test_a_model_is_held_as_its_options_say(policy):
    far = jax.devices()[3]
    params = jax.device_put(policy.params, far)
    copy = frozen_models.COPY.freeze(params).stored
    for leaf in jax.tree.leaves(copy):
        assert (leaf.dtype, leaf.sharding.device_set) == (jnp.float32, {far})
        assert leaf.sharding.memory_kind == "device"
    half = frozen_models.Storage(dtype="float16")
    beside = half.freeze(params, place=Place.parse("cpu")).stored
    for leaf in jax.tree.leaves(beside):
        assert leaf.dtype == jnp.float16
        assert leaf.sharding.device_set == {jax.devices("cpu")[0]}
    storage = frozen_models.Storage(dtype="int8", embeddings="bfloat16")
    small = storage.freeze(params, place=Place.parse("pinned_host")).stored
    for leaf in jax.tree.leaves(small):
        assert leaf.sharding.memory_kind == "pinned_host"
    assert small["embed"]["tokens"].held.dtype == jnp.bfloat16
    assert small["layers"]["mlp"]["up"]["kernel"].held.values.dtype == jnp.int8


@pytest.mark.slow
def test_a_program_runs_where_its_model_is_and_its_result_comes_back(policy):
    near, far = jax.devices()[:2]
    reference = frozen.freeze(policy.params, sharding=SingleDeviceSharding(far))
    rollout = jax.device_put(toys.sampled(toys.params()), near)
    devices = []

    def program(moved):
        devices.append(moved.tokens.sharding.device_set)
        return moved.old_logprobs * 2

    output = frozen_models.run_beside(program, reference, rollout)
    assert devices == [{far}]
    assert output.sharding.device_set == {near}
    np.testing.assert_array_equal(output, np.asarray(rollout.old_logprobs) * 2)


def test_a_machine_without_the_cpu_s_platform_is_told(policy, monkeypatch):
    def none(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(InputError, match="expected cpu among the platforms of JAX, go"):
        frozen_models.COPY.freeze(policy.params, place=Place.parse("cpu"))


@pytest.mark.slow
def test_frozen_models_predict_the_ids_that_the_policy_predicts(tmp_path):
    """The policy's tokenizer decides, even if theirs has more tokens."""
    padded = gpt2(vocab_size=30)
    start = pretrained.load(str(toy_files.checkpoint(tmp_path / "p", model=padded)))
    assert start.model.unused_ids == ((24, 30),)
    same = toy_files.checkpoint(tmp_path / "same", model=padded, seed=1)
    assert load(same, start).model is None  # it runs in the policy's shape
    words = [*WORDS, "bird"]
    larger = dataclasses.replace(LLAMA, vocab_size=33)
    reference = load(
        toy_files.checkpoint(tmp_path / "larger", model=larger, words=words), start
    )
    assert reference.model is not None
    assert reference.model.vocab_size == 30
    assert reference.model.unused_ids == start.model.unused_ids
    model, _ = Loader(start).critic(str(same))
    assert model == start.model
    with pytest.raises(InputError, match="vocab_size 24 for 30"):
        load(toy_files.checkpoint(tmp_path / "fewer"), start)


def test_a_frozen_model_runs_on_the_backend_of_the_policy(policy):
    """A plan for GPUs builds cudnn models, which this process cannot compute."""
    model = dataclasses.replace(policy.model, attention="cudnn", head_dim=8)
    here = policy._replace(model=model)
    with pytest.raises(InputError, match="expected a GPU for attention cudnn"):
        frozen_models.run_beside_policy(policy.model, policy=here)
    planned = frozen_models.run_beside_policy(
        dataclasses.replace(policy.model, head_dim=8),
        policy=here._replace(backend="gpu"),
    )
    assert (planned.attention, planned.unroll) == ("cudnn", False)
    assert frozen_models.run_beside_policy(policy.model, policy=policy).unroll


def chat_template(end):
    return "{% for m in messages %}{{ m.content }} " + end + " {% endfor %}"


@pytest.mark.parametrize(
    ("template", "noted"),
    [
        (chat_template("."), False),
        (chat_template("{{ '.' }}"), False),  # written in another way
        (None, False),
        ("{{ raise_exception('no') }}", False),
        (chat_template("?"), True),
    ],
)
def test_a_reward_model_with_another_chat_template_is_noted(
    template, noted, tmp_path, policy, capsys
):
    """It learned conversations in another form than the policy's tokens have."""
    folder = toy_files.reward_model(tmp_path / "scorer")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    reader = toy_files.tokenizer()
    reader.chat_template = chat_template(".")
    loader = Loader(policy._replace(tokenizer=reader))
    loader.reward_model(str(folder), storage=frozen_models.COPY)
    note = f"note: reward model {folder} has a chat template that writes conversations"
    assert (note in capsys.readouterr().err) == noted
