"""A tokenizer's files, as read by two versions of transformers.

The other version is in tests/programs/load_saved_folders.py.
"""

import json

import pytest
import toy_files
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from rlhf_jax import hf
from rlhf_jax.checkpoints.hf import tokenizer_files
from rlhf_jax.data import tokenization

SPECIAL = ("<s>", "</s>", "<tool>", "<img>")
TEXTS = ("the cat", " A:  4", "<s>a</s>", "a<tool>b <img>", "naïve 🙂")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def backend(*, prefix=False, eos=False):
    """A byte tokenizer with four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    if eos:
        ids = [(token, made.token_to_id(token)) for token in SPECIAL[:2]]
        made.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=ids
        )
    return made


def fast(*, prefix=False, eos=False, **options):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend(prefix=prefix, eos=eos), eos_token="</s>", **options
    )


def llama(**options):
    """A class whose namesake in transformers 4 always adds a BOS."""
    vocab = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyzA:4"]
    return transformers.LlamaTokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], **options
    )


def qwen(**options):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}
    return transformers.Qwen2Tokenizer(vocab=vocab, merges=[], **options)


ZOO = {
    "fast": lambda: fast(chat_template=TEMPLATE),
    "list": lambda: fast(extra_special_tokens=["<tool>"], bos_token="<s>"),
    "names": lambda: fast(image_token="<img>"),
    "both": lambda: fast(image_token="<img>", extra_special_tokens=["<tool>"]),
    "closing": lambda: fast(eos=True),
    "prefix": lambda: fast(prefix=True),
    "left": lambda: fast(padding_side="left", truncation_side="left"),
    "templates": lambda: fast(
        chat_template={"default": TEMPLATE, "tool_use": f"T{TEMPLATE}"}
    ),
    "llama": llama,
    "llama, closing": lambda: llama(add_eos_token=True),
    "qwen": lambda: qwen(extra_special_tokens=["<tool>"]),
}


def config_of(folder):
    return json.loads((folder / "tokenizer_config.json").read_text())


def what_it_makes(reader):
    made = {
        "ids": [reader(text)["input_ids"] for text in TEXTS],
        "text": [reader.decode(reader(text)["input_ids"]) for text in TEXTS],
        "special": [reader.bos_token_id, reader.eos_token_id, reader.pad_token_id],
        "hidden": sorted(reader.all_special_tokens),
        "sides": [reader.padding_side, reader.truncation_side],
        "inputs": reader.model_input_names,
    }
    if reader.chat_template is not None:
        says = [{"role": "user", "content": "the cat"}]
        made["chat"] = reader.apply_chat_template(says, tokenize=False)
    if isinstance(reader.chat_template, dict):
        made["tools"] = reader.apply_chat_template(
            says, tokenize=False, chat_template="tool_use"
        )
    return made


@pytest.mark.parametrize("name", ZOO)
def test_the_installed_version_reads_what_was_written(tmp_path, name):
    reader = ZOO[name]()
    tokenizer_files.write(reader, tmp_path, max_positions=64)
    again = tokenization.load_tokenizer(tmp_path)
    assert what_it_makes(again) == what_it_makes(reader)
    assert getattr(again, "image_token", None) == getattr(reader, "image_token", None)


@pytest.mark.parametrize("name", ZOO)
def test_no_option_is_of_one_version_alone(tmp_path, name):
    tokenizer_files.write(ZOO[name](), tmp_path, max_positions=64)
    config = config_of(tmp_path)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["add_prefix_space"] == (name == "prefix")
    assert config["model_max_length"] == 64
    assert not {"backend", "is_local", "local_files_only"} & config.keys()
    assert "model_specific_special_tokens" not in config
    assert isinstance(config.get("extra_special_tokens", {}), dict)
    assert isinstance(config.get("additional_special_tokens", []), list)


def test_written_again_it_is_the_same(tmp_path):
    tokenizer_files.write(ZOO["both"](), tmp_path / "a", max_positions=64)
    again = tokenization.load_tokenizer(tmp_path / "a")
    tokenizer_files.write(again, tmp_path / "b", max_positions=64)
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PythonBackend", "PreTrainedTokenizer"),
        ("MistralCommonBackend", "MistralCommonTokenizer"),
        ("CTRLTokenizer", "CTRLTokenizer"),
    ],
)
def test_a_tokenizer_without_the_one_file_keeps_its_class(tmp_path, name, expected):
    class Slow:
        def save_pretrained(self, folder):
            content = {"tokenizer_class": name, "is_local": True}
            (folder / "tokenizer_config.json").write_text(json.dumps(content))

    tokenizer_files.write(Slow(), tmp_path, max_positions=8)
    assert config_of(tmp_path) == {"tokenizer_class": expected, "model_max_length": 8}


@pytest.mark.parametrize("length", [10**30, 4, 16])
def test_the_longest_text_is_the_context_of_the_model(tmp_path, length):
    reader = toy_files.tokenizer()
    reader.model_max_length = length
    hf.save(tmp_path / "m", toy_files.MODEL, toy_files.params(), tokenizer=reader)
    again = tokenization.load_tokenizer(tmp_path / "m")
    assert again.model_max_length == toy_files.MODEL.max_positions == 16
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["n_positions"] == 16
