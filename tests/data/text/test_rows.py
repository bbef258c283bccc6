"""A row's own reading options: tools, template options, control tokens by name."""

import pytest
import tokenizer_zoo

from rlhf_jax.data import encoding, tokenization
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train import rows
from rlhf_jax.train.config.prompts import AskedPrompts

ZOO = tokenizer_zoo.zoo()
CHAT = ZOO["chat"]
QUESTION = [{"role": "user", "content": "2+2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é < 3"}}]
FIELDS = {
    "tools": TOOLS,
    "documents": [{"title": "one", "text": "Two."}],
    "chat_template_kwargs": {"enable_thinking": False},
}


def prompt_of(row, *, trait=CHAT):
    [ids] = encoding.encode_prompts(
        TextContract(trait.tokenizer, stop_ids=trait.stop_ids),
        [row],
        limits=Limits(999),
    )[1]
    return ids


def written(messages, **variables):
    options = variables.pop("chat_template_kwargs", {})
    return CHAT.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, **variables, **options
    )


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_row_gives_the_template_reaches_it(name):
    row = {"prompt": QUESTION, name: FIELDS[name]}
    expected = written(QUESTION, add_generation_prompt=True, **{name: FIELDS[name]})
    assert prompt_of(row) == expected
    assert expected != prompt_of({"prompt": QUESTION})


def test_it_does_so_for_demonstrations_and_pairs_too():
    row = {"prompt": QUESTION, "response": "4", "chosen": "4", "rejected": "5"}
    row |= {name: FIELDS[name] for name in ("tools", "documents")}
    prompt = prompt_of(row)
    contract = TextContract(CHAT.tokenizer, stop_ids=CHAT.stop_ids)
    [example] = encoding.encode_demonstrations(contract, [row], limits=Limits(999))
    [pair] = encoding.encode_preferences(contract, [row], limits=Limits(999))
    assert prompt == example.prompt == pair.prompt
    assert tokenization.decode(CHAT.tokenizer, example.response) == "4<|im_end|>"


def test_a_table_has_null_where_other_rows_have_tools():
    absent = {"tools": None, "documents": [], "chat_template_kwargs": {"x": None}}
    assert prompt_of({"prompt": QUESTION} | absent) == prompt_of({"prompt": QUESTION})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "add"}, r"a list of objects in 'tools', .* got 'add'; correct"),
        ({"documents": ["a"]}, r"a list of objects in 'documents', .* got \['a'\]"),
        ({"chat_template_kwargs": [1]}, r"an object in 'chat_template_kwargs', .* \[1"),
        ({"chat_template_kwargs": {"messages": []}}, r"got 'messages', which it is g"),
        ({"chat_template_kwargs": {"mood": 1}}, r"that reads 'mood', which the row gi"),
        (
            {"chat_template_kwargs": {"enable_thinkin": 0}},
            r"that reads 'enable_thinkin'",
        ),
        ({"chat_template_kwargs": {"system": 0}}, r"that reads 'system'"),
        ({"chat_template_kwargs": {"content": 0}}, r"that reads 'content'"),
        ({"control_tokens": "<|eos|>"}, r"a list of tokens in 'control_tokens', such"),
        ({"control_tokens": ["<|x|>"]}, r"tokens of the tokenizer .* got '<\|x\|>', w"),
    ],
)
def test_fields_that_cannot_be_meant(fields, message):
    with pytest.raises(InputError, match=rf"row 0 \(from 0\): expected .*{message}"):
        prompt_of({"prompt": QUESTION} | fields)


def test_tool_calls_of_the_assistant_reach_the_template():
    """The message may have no other text."""
    template = CHAT.tokenizer.chat_template.replace(
        "m.content +",
        "m.content + (m.tool_calls | map(attribute='name') | join if m.tool_calls"
        " else '') +",
    )
    reader = tokenizer_zoo.zoo()["chat"].tokenizer
    reader.chat_template = template
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "content": "4"}
    row = {"prompt": [*QUESTION, call, result]}
    [ids] = encoding.encode_prompts(TextContract(reader), [row], limits=Limits(999))[1]
    assert "assistant\nadd<|im_end|>" in reader.decode(ids)
    row["prompt"][1] = call | {"content": None}
    assert encoding.encode_prompts(TextContract(reader), [row], limits=Limits(999))[
        1
    ] == [ids]


BY_HAND = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_row_may_ask_for_control_tokens_by_name():
    """For example a row that a template has already written."""
    reader = CHAT.tokenizer
    named = {"control_tokens": ["<|im_start|>", "<|im_end|>"]}
    ids = prompt_of({"prompt": BY_HAND} | named)
    assert ids == reader(BY_HAND, add_special_tokens=False)["input_ids"]
    as_text = prompt_of({"prompt": BY_HAND})
    assert tokenization.decode(reader, as_text) == BY_HAND
    assert set(reader.convert_tokens_to_ids([*tokenizer_zoo.CHAT])).isdisjoint(as_text)
    [start] = reader.convert_tokens_to_ids(["<|im_start|>"])
    partly = prompt_of({"prompt": BY_HAND, "control_tokens": ["<|im_start|>"]})
    assert partly.count(start) == 2
    assert tokenization.decode(reader, partly) == BY_HAND
    # In a response, and in messages.
    row = {"prompt": "a", "response": "b<|im_start|>c"} | named
    [example] = encoding.encode_demonstrations(
        TextContract(reader, stop_ids=CHAT.stop_ids), [row], limits=Limits(999)
    )
    assert example.response[1] == start
    chat = prompt_of({"prompt": [{"role": "user", "content": "<|im_start|>"}]} | named)
    assert chat.count(start) == 3


def test_the_run_s_own_template_holds_control_tokens_and_the_question_none():
    """For --template; the same string in a question stays text."""
    reader = CHAT.tokenizer
    options = AskedPrompts(
        prompts="prompts.jsonl",
        prompt_field="q",
        template="<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    )

    def put(text):
        question = rows.question_of({"q": text}, options=options, where="a.jsonl:1")
        _, [ids] = encoding.encode_prompts(
            TextContract(reader, stop_ids=CHAT.stop_ids),
            [{"asked": options.template.replace("{prompt}", text)}],
            limits=Limits(99),
            field="asked",
            questions=[question],
        )
        return ids

    assert put("Hi") == reader(BY_HAND, add_special_tokens=False)["input_ids"]
    ids = put("Hi<|im_end|><|im_start|>")
    control = set(reader.convert_tokens_to_ids([*tokenizer_zoo.CHAT]))
    assert sum(token in control for token in ids) == 3
    assert reader.decode(ids) == BY_HAND.replace("Hi", "Hi<|im_end|><|im_start|>")


def test_tags_are_tokens_of_a_response_and_text_of_a_prompt():
    trait = ZOO["tags"]
    think, done = trait.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    row = {"prompt": "<think>?", "response": "<think>2+2</think>4"}
    [example] = encoding.encode_demonstrations(
        TextContract(trait.tokenizer), [row], limits=Limits(99)
    )
    assert not {think, done} & {*example.prompt}
    assert example.response[0] == think
    assert example.response[4] == done
    text = tokenization.spoken(
        trait.tokenizer, example.response, stop_ids=trait.stop_ids
    )
    assert text == row["response"]


def test_a_stop_token_of_ordinary_text_may_stand_in_a_prompt_alone():
    """Such as a line end, which no other tokens spell."""
    trait = ZOO["byte level"]
    [end] = trait.tokenizer("\n", add_special_tokens=False)["input_ids"]
    contract = TextContract(trait.tokenizer, stop_ids=[end])
    row = {"prompt": "Q\nA:", "response": "4\n"}
    [example] = encoding.encode_demonstrations(contract, [row], limits=Limits(99))
    assert [*example.prompt].count(end) == 1
    assert [*example.response].count(end) == 1
    with pytest.raises(InputError, match=r"row 0 .*, got '\\n' \(\d+\) inside '4\\n5'"):
        encoding.encode_demonstrations(
            contract, [row | {"response": "4\n5"}], limits=Limits(99)
        )


def test_where_a_tokenizer_merges_across_the_border():
    """The prompt keeps its tokens, as in sampling; GPT-2's are unchanged."""
    tokenizer = ZOO["byte level"].tokenizer
    [example] = encoding.encode_demonstrations(
        TextContract(tokenizer), [{"prompt": "A: ", "response": "4"}], limits=Limits(9)
    )
    assert tokenizer.convert_ids_to_tokens([*example.prompt]) == ["A", ":", "Ġ"]
    assert tokenizer.convert_ids_to_tokens([*example.response]) == ["4", "<|eos|>"]
    assert tokenizer.tokenize("A: 4") == ["A", ":", "Ġ4"]
    llama = ZOO["prefix space"].tokenizer
    [example] = encoding.encode_demonstrations(
        TextContract(llama), [{"prompt": "A: ", "response": "4"}], limits=Limits(9)
    )
    assert llama.convert_ids_to_tokens([*example.prompt]) == ["▁A", ":", "▁"]
    assert llama.convert_ids_to_tokens([*example.response]) == ["4", "</s>"]
