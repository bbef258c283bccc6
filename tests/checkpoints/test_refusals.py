"""An adapter in a model's place: the error says how to merge it."""

import json
import re
import shutil

import huggingface_hub
import numpy as np
import pytest
import toy_files
from places import FIXTURES
from safetensors.numpy import save_file

from rlhf_jax import frozen, hf, lora, policy
from rlhf_jax.checkpoints import frozen_models, peft, pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.functional.checks import InputError

MERGE = re.escape(
    "expected a whole model, got an adapter (adapter_config.json) of the base 'BASE'; "
    "no option takes an adapter in place of a model: merge it into its base with PEFT, "
    "`AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
    ".save_pretrained(MERGED)`, and give MERGED"
)


@pytest.fixture
def adapter(tmp_path):
    folder = shutil.copytree(FIXTURES / "gpt2_lora", tmp_path / "run" / "adapter")
    file = folder / "adapter_config.json"
    options = json.loads(file.read_text()) | {"base_model_name_or_path": "BASE"}
    file.write_text(json.dumps(options))
    return folder


def test_every_model_that_is_read(tmp_path, adapter):
    policy = pretrained.load(str(toy_files.checkpoint(tmp_path / "policy")))
    storage, name = frozen_models.COPY, str(adapter)
    for read in (
        lambda: hf.load(adapter),
        lambda: hf.load_reward(adapter),
        lambda: hf.model_config(adapter),
        lambda: hf.stop_ids(adapter),
        lambda: pretrained.load(name),
        lambda: pretrained.described(name),
        lambda: Loader(policy).reference(name, storage=storage),
        lambda: Loader(policy).reward_model(name, storage=storage),
        lambda: Loader(policy).critic(name),
        lambda: frozen_models.check_reference(name, policy=policy),
        lambda: frozen_models.check_teacher(
            name, student=str(tmp_path / "policy"), tokenizer=None
        ),
    ):
        with pytest.raises(InputError, match=f"^checkpoint {adapter}: {MERGE}$"):
            read()


@pytest.mark.slow
def test_an_adapter_is_merged_without_pytorch(tmp_path, adapter):
    """As in checkpoints/README.md."""
    model, base = hf.load(FIXTURES / "gpt2", dtype="float32")
    made, adapters = peft.load(adapter, model=model, base=frozen.freeze(base))
    hf.save(tmp_path / "merged", model, lora.merge(base, adapters, lora=made))
    again, merged = hf.load(tmp_path / "merged")
    assert again == model
    texts = np.load(FIXTURES / "gpt2" / "recorded.npz")
    tokens, mask = texts["left_tokens"][1:], texts["left_mask"][1:]
    logits = np.asarray(policy.logits(merged, model=model, tokens=tokens, mask=mask))
    expected = np.load(FIXTURES / "gpt2_lora" / "recorded.npz")["logits"]
    np.testing.assert_allclose(logits[mask], expected, atol=1e-4)


def test_the_merged_model_of_a_run_is_named(adapter):
    merged = toy_files.checkpoint(adapter.parent / "model")
    with pytest.raises(InputError, match=f"{MERGE}, or give {merged}$"):
        hf.load(adapter)


def test_an_adapter_of_a_reward_model_is_merged_as_one(adapter):
    file = adapter / "adapter_config.json"
    file.write_text(file.read_text().replace("CAUSAL_LM", "SEQ_CLS"))
    with pytest.raises(InputError, match=r"`AutoPeftModelForSequenceClassification.f"):
        hf.load_reward(adapter)
    file.write_text("[")
    with pytest.raises(InputError, match=r"of the base None; no option takes an adap"):
        hf.load_reward(adapter)


def test_an_adapter_beside_a_config_or_a_whole_model(tmp_path, adapter, capsys):
    shutil.copy(FIXTURES / "gpt2" / "config.json", adapter)
    with pytest.raises(InputError, match=MERGE):
        hf.load(adapter)
    shutil.copy(FIXTURES / "gpt2" / "model.safetensors", adapter)
    hf.load(adapter)
    assert "its whole model is read, without the adapter" in capsys.readouterr().err


def test_an_adapter_on_the_hub(adapter, monkeypatch):
    patterns = []

    def download(repo_id, *, allow_patterns):
        patterns.append(allow_patterns)
        return str(adapter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for read in (hf.load, hf.model_config):
        with pytest.raises(InputError, match=f"^checkpoint some/adapter: {MERGE}$"):
            read("some/adapter")
        assert "adapter_config.json" in patterns[-1]


def test_a_folder_without_either(tmp_path):
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(InputError, match=r"expected config.json, got a folder with mo"):
        hf.load(tmp_path / "empty")
