"""Demonstrated episodes: a run's ids, of which only responses are trained on."""

import json

import numpy as np
import pytest
import tokenizers
import transformers
from chat_templates import QWEN2

from rlhf_jax.data import batches, files, packing
from rlhf_jax.data.encoding import encode_episodes
from rlhf_jax.data.examples import Episode, Example
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.functional.checks import InputError

TURNS = ["calc 3 4", "\n7\n", "is 7"]


@pytest.fixture
def words():
    """One token per word, digit or newline."""
    names = ["<eos>", "<|im_start|>", "<|im_end|>", "<unk>", "\n", "calc", "is", "Hi"]
    names += ["user", "assistant", "system", "You", "are", "a", "helpful", "."]
    names += [str(digit) for digit in range(10)]
    model = tokenizers.models.WordLevel(
        {name: number for number, name in enumerate(names)}, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    split = tokenizers.Regex(r"\n|[0-9]|\w+|\.")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "removed", True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def shown(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(list(ids))


def test_responses_end_and_observations_are_told_apart(words):
    [episode] = encode_episodes(
        TextContract(words), [{"prompt": "3 4\n", "turns": TURNS}], limits=Limits(20)
    )
    assert shown(words, episode.prompt) == ["3", "4", "\n"]
    assert shown(words, episode.response) == [
        *("calc", "3", "4", "<eos>"),
        *("\n", "7", "\n"),
        *("is", "7", "<eos>"),
    ]
    assert episode.observed == ((4, 7),)
    assert episode.length == 13
    assert episode.trained == [False] * 3 + [True] * 4 + [False] * 3 + [True] * 3


def test_a_conversation_has_the_ids_of_its_template(words):
    """The template's ids, from the first turn to the last stop token."""
    words.chat_template = QWEN2.text
    stop = words.convert_tokens_to_ids("<|im_end|>")
    prompt = [{"role": "user", "content": "calc 3 4"}]
    observed = [{"role": "user", "content": "7"}]
    rows = [{"prompt": prompt, "turns": ["calc 3 4", observed, "is 7"]}]
    [episode] = encode_episodes(
        TextContract(words, stop_ids=[stop]), rows, limits=Limits(99)
    )
    responses = [
        {"role": "assistant", "content": text} for text in ("calc 3 4", "is 7")
    ]
    whole = words.apply_chat_template(
        [*prompt, responses[0], *observed, responses[1]],
        tokenize=True,
        return_dict=False,
    )
    ids = [*episode.prompt, *episode.response]
    assert ids == whole[: len(ids)]
    assert shown(words, whole[len(ids) :]) == ["\n"]
    [(start, end)] = episode.observed
    assert shown(words, episode.response[:start])[-1] == "<|im_end|>"
    encoder = TurnEncoder(words, stop_ids=[stop], chat=True)
    assert episode.response[start:end] == encoder.observation(observed)


def test_batches_and_packed_rows_train_on_responses_alone():
    episode = Episode([5, 6], [7, 0, 8, 9, 1, 0], ((2, 4),))
    example = Example([], [3, 4, 0])
    [batch] = batches.sequences_in_order([episode, example], batch_size=2, pad_id=2)
    np.testing.assert_array_equal(
        batch.tokens, [[5, 6, 7, 0, 8, 9, 1, 0], [3, 4, 0, 2, 2, 2, 2, 2]]
    )
    np.testing.assert_array_equal(
        batch.response_mask,
        np.array([[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0, 0]], bool),
    )
    [row] = packing.pack_examples([example, episode], width=11)
    assert row.tokens == [3, 4, 0, 5, 6, 7, 0, 8, 9, 1, 0]
    assert [int(trained) for trained in row.response] == [
        *(0, 1, 1),
        *(0, 0, 1, 1, 0, 0, 1, 1),
    ]


def test_an_episode_is_left_out_whole_or_named(words):
    rows = [{"prompt": "3 4\n", "turns": TURNS}, {"prompt": "3\n", "turns": ["is 3"]}]
    [fitting] = encode_episodes(
        TextContract(words), rows, limits=Limits(12, overlong="drop")
    )
    assert shown(words, fitting.response) == ["is", "3", "<eos>"]
    with pytest.raises(InputError, match=r"expected at most 12 tokens, got 13"):
        encode_episodes(TextContract(words), rows, limits=Limits(12))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], r"begins and ends with a response, with an observation between each"),
        (["calc", "7"], r"got 2 of them; correct the row"),
        ("calc", r"got 'calc'; correct the row"),
        (["calc", 7, "is"], r"expected text as turn 1 .* an observation, got 7"),
        ([["calc"]], r"expected text as turn 0 .* a response, got \['calc'\]"),
        (["calc", [{"role": "user", "content": "7"}], "is"], r"turn 1 .* observation"),
    ],
)
def test_turns_that_are_none_are_refused(tmp_path, turns, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "3 4", "turns": turns}) + "\n")
    with pytest.raises(InputError, match=message) as error:
        files.read_demonstrations(file, turns=True)
    assert f"{file}:1: " in str(error.value)


def test_turns_are_read_where_episodes_are_learned_alone(tmp_path):
    """A reward model's demonstrations are single responses; the error says so."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "3 4", "turns": TURNS}) + "\n")
    assert len(files.read_demonstrations(file, turns=True)) == 1
    with pytest.raises(
        InputError, match=r":1: expected a field 'response', got 'promp"
    ):
        files.read_demonstrations(file)
