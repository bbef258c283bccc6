"""Fields of a row that no template reads are refused, or are not the template's."""

import pytest
import tokenizer_zoo

from rlhf_jax.data import encoding, tokenization
from rlhf_jax.data.encoding import encode_episodes
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError

TRAIT = tokenizer_zoo.zoo()["chat"]
QUESTION = {"role": "user", "content": "2+2?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
RESULT = {"role": "tool", "content": "4"}
LIMITS = Limits(999)
CONTRACT = TextContract(TRAIT.tokenizer, stop_ids=TRAIT.stop_ids)
OTHERS = {"tools": "hammer", "documents": ["a"], "chat_template_kwargs": 1}


def reader(template):
    tokenizer = tokenizer_zoo.zoo()["chat"].tokenizer
    tokenizer.chat_template = template
    return tokenizer


def calling(condition):
    """ChatML that writes tool calls if the condition holds for a message m."""
    return TRAIT.tokenizer.chat_template.replace(
        "m.content +",
        f"(m.tool_calls | map(attribute='name') | join if {condition} else m.content)"
        " +",
    )


def demonstrated(row, *, tokenizer=TRAIT.tokenizer):
    [example] = encoding.encode_demonstrations(
        TextContract(tokenizer, stop_ids=TRAIT.stop_ids), [row], limits=LIMITS
    )
    return tokenization.decode(tokenizer, [*example.prompt, *example.response])


def test_a_text_s_fields_of_the_template_s_names_are_its_own():
    """Rewards read them, and the receipt names them."""
    row = {"prompt": "a", "response": "b"}
    assert demonstrated(row | OTHERS) == demonstrated(row)
    _, [ids] = encoding.encode_prompts(CONTRACT, [row | OTHERS], limits=LIMITS)
    assert tokenization.decode(TRAIT.tokenizer, ids) == "a"


@pytest.mark.parametrize(
    "call", [{"name": "add"}, {"type": "function", "function": {"name": "add"}}]
)
@pytest.mark.parametrize("condition", ["false", "m.content is none"])
def test_calls_that_the_template_leaves_out(call, condition):
    """The template never writes calls, or not in a message with a text."""
    tokenizer = reader(calling(condition))
    call = CALL | {"tool_calls": [call]}
    for row in (
        {"prompt": [QUESTION, call, RESULT], "response": "4"},
        {"prompt": [QUESTION], "response": [call], "tools": [{"name": "add"}]},
    ):
        with pytest.raises(InputError, match="template that writes the 'tool_calls' o"):
            demonstrated(row, tokenizer=tokenizer)
    row = {"prompt": [QUESTION, CALL, RESULT], "response": [CALL]}
    written = demonstrated(row, tokenizer=reader(calling("m.tool_calls")))
    assert written.count("<|im_start|>assistant\nadd<|im_end|>") == 2


def test_messages_in_response_to_a_text():
    turn = [{"role": "assistant", "content": "b"}]
    with pytest.raises(InputError, match=r"row 0 .*expected text in 'response', as it"):
        demonstrated({"prompt": "a", "response": turn})
    row = {"prompt": "a", "chosen": turn, "rejected": "c"}
    with pytest.raises(InputError, match=r"row 0 .*expected text in 'response', as it"):
        encoding.encode_preferences(CONTRACT, [row], limits=LIMITS)


def test_a_prompt_that_ends_with_a_response():
    prompt = [QUESTION, {"role": "assistant", "content": "4"}]
    with pytest.raises(InputError, match=r"row 0 .*messages that wait for the assist"):
        encoding.encode_prompts(CONTRACT, [{"prompt": prompt}], limits=LIMITS)


def test_marks_in_the_prompt_of_an_episode():
    answer = {"role": "assistant", "content": "a", "train": True}
    row = {"prompt": [QUESTION, answer, QUESTION], "turns": ["b", "c", "d"]}
    with pytest.raises(InputError, match=r"row 0 .*got an earlier turn that is mark"):
        encode_episodes(CONTRACT, [row], limits=LIMITS)
    answer["train"] = False
    assert encode_episodes(CONTRACT, [row], limits=LIMITS)
