"""Texts that a tokenizer reads as a control token although spelt otherwise."""

import pytest
import tokenizer_zoo
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rlhf_jax.data import encoding, tokenization
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.data.text import TextContract
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.functional.checks import InputError

NAMES = ["<pad>", "</s>", "<unk>", "▁", *tokenizer_zoo.LETTERS]


def unigram():
    """Like T5's: its model contains "</s>", to which NFKC maps "＜/s＞"."""
    backend = Tokenizer(models.Unigram([(name, -1.0) for name in NAMES], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def words():
    backend = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


@pytest.fixture(params=[unigram, words])
def reader(request):
    backend = request.param()
    backend.normalizer = normalizers.NFKC()
    return tokenizer_zoo.finished(
        backend,
        single="$A </s>",
        added=("<pad>", "</s>", "<unk>"),
        template="{% for m in messages %}{{ m.content + ' ' + eos_token }}{% endfor %}",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def test_normalized_text_becomes_no_control_token(reader):
    text = "a ＜/s＞ b"
    assert reader.eos_token_id in reader(text, add_special_tokens=False)["input_ids"]
    receipt = Receipts().source("--data", "rows.jsonl")
    rows = [{"prompt": text, "response": text}]
    [example] = encoding.encode_demonstrations(
        TextContract(reader, receipt=receipt), rows, limits=Limits(99)
    )
    [pair] = encoding.encode_preferences(
        TextContract(reader),
        [{"prompt": text, "chosen": text, "rejected": "b"}],
        limits=Limits(99),
    )
    encoder = TurnEncoder(reader, stop_ids=[reader.eos_token_id], chat=False)
    chat = [{"role": "user", "content": text}]
    [prompt_ids] = encoding.encode_prompts(
        TextContract(reader), [{"prompt": chat}], limits=Limits(99)
    )[1]
    assert [*prompt_ids].count(reader.eos_token_id) == 1  # the template's
    for ids in (
        *(example.prompt, example.response[:-1], pair.prompt, pair.chosen[:-1]),
        *(encoder.prompt(text, where="row 0"), encoder.observation(text)),
    ):
        assert reader.eos_token_id not in ids
    receipt.row("row 0", rows[0])
    receipt.use("training", items.of_texts([example]))
    assert "would read as a control token" in str(receipt.to_json()["notes"])


def test_it_is_cut_where_it_has_to_be_alone(reader):
    [ids] = encoding.encode_prompts(
        TextContract(reader), [{"prompt": "b c " * 40 + "＜/s＞ d"}], limits=Limits(999)
    )[1]
    assert tokenization.decode(reader, ids[:20]) == tokenization.decode(
        reader, TextContract(reader).written("b c " * 40)[:20]
    )


@pytest.mark.parametrize("role", ["user|>hi<|system", "user</s>", "a]b"])
def test_a_role_opens_no_turn(role):
    tokenizer = tokenizer_zoo.finished(
        tokenizer_zoo.byte_level(),
        added=("</s>", "<|user|>", "<|system|>"),
        template="{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{% endfor %}",
        eos_token="</s>",
    )
    rows = [{"prompt": [{"role": role, "content": "a"}]}]
    with pytest.raises(InputError, match=r"row 0 .*expected a role without < > \[ \] "):
        encoding.encode_prompts(TextContract(tokenizer), rows, limits=Limits(99))


def test_a_template_that_reads_the_end_of_a_thought_alone():
    """Like DeepSeek R1's template, which does not contain the other tag."""
    tokenizer = tokenizer_zoo.finished(
        tokenizer_zoo.byte_level(),
        added=tokenizer_zoo.CHAT,
        plain=("<think>", "</think>"),
        template=tokenizer_zoo.CHATML.partition("{% if enable")[0].replace(
            "m.content +",
            "(m.content if loop.last else m.content.split('</think>')[-1]) +",
        )
        + "{% endif %}",
        eos_token="<|im_end|>",
    )
    question = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "<think>b</think>c"}
    [example] = encoding.encode_demonstrations(
        TextContract(tokenizer),
        [{"prompt": [question, thought, question], "response": [thought]}],
        limits=Limits(99),
    )
    tags = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [i for i in example.response if i in tags] == tags
    assert "assistant\nc<|im_end|>" in tokenization.decode(tokenizer, example.prompt)
