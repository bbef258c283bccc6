"""The self-teacher's prompt contains the first other success of the group."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy_files
import transformers

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.rollouts import reprompt
from rlhf_jax.train.rollouts.reprompt import AFTER, BEFORE, Reprompt

TOKENIZER = toy_files.tokenizer()
START = Pretrained(
    toy_files.config.gpt2(
        vocab_size=toy_files.MODEL.vocab_size,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        max_positions=64,
    ),
    None,
    TOKENIZER,
    stop_ids=(1,),
)
ROWS = [{"prompt": "the cat"}, {"prompt": "a dog was"}]
RESPONSES = ("sat on", "ran <eos>", "was good", "so bad . <eos>")
GROUPS = (1, 1, 0, 0)  # rows of the data set, in groups of two
NEW = 4


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def rollout():
    tokens, mask, response = (np.zeros((4, 3 + NEW), int) for _ in range(3))
    for row, (number, text) in enumerate(zip(GROUPS, RESPONSES, strict=True)):
        prompt, own = ids(ROWS[number]["prompt"]), ids(text)
        before = slice(3 - len(prompt), 3)
        tokens[row, before], mask[row, before] = prompt, 1
        after = slice(3, 3 + len(own))
        tokens[row, after], mask[row, after], response[row, after] = own, 1, 1
    return Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(mask, bool),
        response_mask=jnp.asarray(response, bool),
        old_logprobs=jnp.zeros(tokens.shape),
        entropy=jnp.zeros(tokens.shape),
        index=jnp.asarray(GROUPS, jnp.int32),
        sample=jnp.arange(4, dtype=jnp.int32),
    )


def made(**changes):
    options = {
        "options": AskedPrompts(prompts="p"),
        "start": START,
        "success_score": 1.0,
        "group_size": 2,
        "max_new_tokens": NEW,
    }
    return Reprompt(ROWS, **options | changes)


def read(scores, **changes):
    prompts = made(**changes)(rollout(), Scores(jnp.asarray(scores), {}))
    tokens, mask = np.asarray(prompts.tokens), np.asarray(prompts.mask)
    assert (mask == (np.cumsum(mask, axis=1) > 0)).all()  # left-padded
    texts = [row[own].tolist() for row, own in zip(tokens, mask, strict=True)]
    return texts, np.asarray(prompts.taught).tolist()


def test_a_success_of_the_group_is_read_by_the_others():
    texts, taught = read([0.5, 1.0, 2.0, 1.0])
    assert taught == [True, False, True, True]
    asked = [ROWS[number]["prompt"] for number in GROUPS]
    shown = ("ran", None, "so bad .", "was good")  # without the stop token
    for text, prompt, response in zip(texts, asked, shown, strict=True):
        whole = prompt if response is None else f"{prompt}{BEFORE}{response}{AFTER}"
        assert text == ids(whole)


def test_what_is_left_out_is_no_success():
    scores = Scores(jnp.ones(4), {}, left_out=jnp.array([True, False, False, True]))
    taught = made()(rollout(), scores).taught
    assert np.asarray(taught).tolist() == [True, False, False, True]


def test_the_template_and_messages_are_those_of_the_prompts():
    texts, _ = read(
        [0.0, 1, 0, 0], options=AskedPrompts(prompts="p", template="? {prompt} is")
    )
    assert texts[0] == ids(f"? a dog was{BEFORE}ran{AFTER} is")
    said = [{"role": "user", "content": "the"}, {"role": "user", "content": "cat"}]
    assert reprompt.demonstrated(said, "sat") == [
        said[0],
        {"role": "user", "content": f"cat{BEFORE}sat{AFTER}"},
    ]


def test_a_batch_has_one_width_and_what_is_wider_is_not_taught():
    longest = max(len(ids(f"{row['prompt']}{BEFORE}{AFTER}")) for row in ROWS)
    for scores in ([0.0] * 4, [1.0] * 4):
        prompts = made()(rollout(), Scores(jnp.asarray(scores), {}))
        assert prompts.tokens.shape == (4, longest + 1 + NEW)
    # Of the two prompts one leaves room for one token of a demonstration, one for two.
    small = START._replace(
        model=toy_files.config.gpt2(
            vocab_size=toy_files.MODEL.vocab_size,
            hidden_size=8,
            num_layers=1,
            num_heads=2,
            max_positions=longest + NEW + 1,
        )
    )
    _, taught = read([1.0] * 4, start=small)
    assert taught == [True, False, False, True]  # row 1 would read two, row 2 three
    with pytest.raises(InputError, match="--success-score: expected prompts of at"):
        made(start=small, max_new_tokens=NEW + 1)


def test_a_response_of_full_length_fits_where_newlines_are_merged(shared_data):
    """GPT-2 merges the newlines around an empty demonstration into one token fewer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        shared_data / "gpt2-tokenizer"
    )
    response = tokenizer("x12 is the sum")["input_ids"]
    start = START._replace(
        model=toy_files.config.gpt2(
            vocab_size=len(tokenizer),
            hidden_size=8,
            num_layers=1,
            num_heads=2,
            max_positions=64,
        ),
        tokenizer=tokenizer,
        stop_ids=(tokenizer.eos_token_id,),
    )
    reader = Reprompt(
        [{"prompt": "1 + 6 ="}],
        options=AskedPrompts(prompts="p"),
        start=start,
        success_score=1.0,
        group_size=2,
        max_new_tokens=len(response),
    )
    asked = tokenizer("1 + 6 =")["input_ids"]
    tokens = jnp.asarray([asked + response] * 2, jnp.int32)
    drawn = Rollout(
        tokens=tokens,
        mask=jnp.ones(tokens.shape, bool),
        response_mask=jnp.arange(tokens.shape[1])[None].repeat(2, 0) >= len(asked),
        old_logprobs=jnp.zeros(tokens.shape),
        entropy=jnp.zeros(tokens.shape),
        index=jnp.zeros(2, jnp.int32),
        sample=jnp.arange(2, dtype=jnp.int32),
    )
    taught = reader(drawn, Scores(jnp.ones(2), {})).taught
    assert np.asarray(taught).all()
