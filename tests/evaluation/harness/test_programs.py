"""Likelihoods and responses on token ids, against a loop over tokens in float64."""

import functools

import jax
import numpy as np
import oracles
import pytest
import toy_files
import toys

from rlhf_jax import policy
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.evaluation.harness import programs
from rlhf_jax.evaluation.harness.programs import Draw, Programs, bucket
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation.sampling import Shaping

CONTEXT = toys.GPT2.max_positions  # 24
STOP = 1
GREEDY = Draw(4, (STOP,), 1.0, Shaping(greedy=True))


def made(*, mesh="data=1", batch_size=3, max_length=CONTEXT):
    on = MeshShape.parse(mesh).make()
    start = Pretrained(
        model=toys.GPT2,
        params=sharding.place(toys.params(), mesh=on),
        tokenizer=toy_files.tokenizer(),
        stop_ids=(STOP,),
    )
    return Programs(
        start, mesh=on, batch_size=batch_size, max_length=max_length, seed=0
    )


@functools.cache
def logits(tokens):
    """f64[S, V], the logits of a text without padding."""
    return oracles.decoder_logits(toys.params(), toys.GPT2, list(tokens))


def by_token(context, continuation, *, max_length=CONTEXT):
    """Σ log π and the greedy flag, token by token with the full context."""
    text = [*context, *continuation][-(max_length + 1) :]
    read = logits(tuple(text[:-1]))[-len(continuation) :]
    total, greedy = 0.0, True
    for row, token in zip(read, continuation, strict=True):
        total += oracles.log_softmax(row)[token]
        greedy &= int(np.argmax(row)) == token
    return total, greedy


def likeliest(context, count):
    """The greedy continuation, token by token."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(int(np.argmax(logits(tuple(tokens))[-1])))
    return tokens[len(context) :]


def drawn(seed, size):
    return np.random.default_rng(seed).integers(0, 13, size).tolist()


LENGTHS = [(1, 1), (3, 2), (20, 4), (2, 17), (17, 7), (5, 1), (9, 5), (30, 6), (1, 24)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "batch_size"),
    [
        ("data=1", 2),
        pytest.param("data=2,fsdp=2,tensor=2", 4, marks=pytest.mark.slow),
    ],
)
def test_likelihoods_are_those_of_a_loop(mesh, batch_size):
    """With all lengths, in any order, and with partial batches."""
    texts = [(drawn(i, n), drawn(i + 50, k)) for i, (n, k) in enumerate(LENGTHS)]
    texts += [(drawn(7, 6), likeliest(drawn(7, 6), 3))]
    likelihoods = dict(made(mesh=mesh, batch_size=batch_size).likelihoods(texts))
    assert sorted(likelihoods) == list(range(len(texts)))
    for number, (context, continuation) in enumerate(texts):
        total, greedy = by_token(context, continuation)
        assert likelihoods[number].logprob == pytest.approx(total, rel=2e-5, abs=2e-5)
        assert likelihoods[number].greedy is greedy
    assert [likelihoods[number].greedy for number in (2, 7, len(texts) - 1)] == [
        False,
        False,
        True,
    ]


@pytest.mark.slow
def test_one_token_that_is_not_the_likeliest_is_not_greedy():
    context = drawn(7, 6)
    right = likeliest(context, 4)
    last = [*right[:3], (right[3] + 1) % 13]
    first = [(right[0] + 1) % 13, *right[1:]]
    texts = [(context, continuation) for continuation in (right, last, first)]
    likelihoods = dict(made().likelihoods(texts))
    assert [likelihoods[number].greedy for number in range(3)] == [True, False, False]


@pytest.mark.slow
def test_a_model_reads_no_more_than_it_is_told():
    texts = [(drawn(3, 12), drawn(4, 5)), (drawn(3, 12)[-4:], drawn(4, 5))]
    (_, first), (_, second) = sorted(made(max_length=8).likelihoods(texts))
    assert first == second
    assert first.logprob == pytest.approx(
        by_token(*texts[0], max_length=8)[0], rel=2e-5
    )
    with pytest.raises(InputError, match=r"at most the 8 tokens .* got 9"):
        list(made(max_length=8).likelihoods([([1], drawn(0, 9))]))


def test_an_empty_context_or_continuation_is_told():
    with pytest.raises(InputError, match=r"text 1: .* got no context"):
        list(made().likelihoods([([2], [3]), ([], [3])]))
    with pytest.raises(InputError, match=r"text 0: .* got no continuation"):
        list(made().likelihoods([([2], [])]))


@pytest.mark.slow
def test_logits_are_taken_a_few_columns_at_a_time(monkeypatch):
    texts = [(drawn(i, 4), drawn(i + 50, 15)) for i in range(3)]
    whole = dict(made().likelihoods(texts))
    monkeypatch.setattr(programs, "MAX_LOGITS", 3 * 13 * 2)  # two columns
    parts = dict(made().likelihoods(texts))
    for number in range(3):
        assert parts[number].logprob == pytest.approx(whole[number].logprob, rel=1e-6)


@pytest.mark.slow
def test_there_are_few_widths():
    assert [bucket(n, limit=100) for n in (1, 16, 17, 64, 65, 100)] == [
        *(16, 16, 32, 64, 100, 100)
    ]
    programs_made = made()
    lengths = [(n, k) for n in range(1, 9) for k in range(1, 9)]
    list(programs_made.likelihoods([(drawn(n, n), drawn(k, k)) for n, k in lengths]))
    assert programs_made._score._cache_size() == 1


@pytest.mark.slow
def test_greedy_responses_are_the_likeliest_tokens():
    prompts = [drawn(i, n) for i, n in enumerate((1, 5, 19, 22, 9))]
    responses = dict(made().responses(prompts, numbers=range(5), draw=GREEDY))
    for number, prompt in enumerate(prompts):
        expected = likeliest(prompt[-20:], 4)
        if STOP in expected:
            expected = expected[: expected.index(STOP) + 1]
        assert responses[number] == expected
    assert any(len(response) == 4 for response in responses.values())


@pytest.mark.slow
def test_a_draw_depends_on_the_number_of_its_request_alone():
    draw = Draw(4, (), 1.3, Shaping())
    prompts = [drawn(i, 5) for i in range(5)]
    together = dict(made().responses(prompts, numbers=range(5), draw=draw))
    apart = made(batch_size=1).responses(prompts[3:4], numbers=[3], draw=draw)
    assert dict(apart) == {3: together[3]}
    other = made(batch_size=1).responses(prompts[3:4], numbers=[4], draw=draw)
    assert dict(other)[4] != together[3]


def test_a_response_needs_room():
    with pytest.raises(InputError, match="max_gen_toks: expected less than the 8"):
        list(
            made(max_length=8).responses(
                [[1]], numbers=[0], draw=GREEDY._replace(max_new_tokens=8)
            )
        )


@pytest.mark.slow
def test_the_program_is_that_of_the_policy_s_own_log_probs():
    """Compares columns with another function of the library on unpadded rows."""
    text = drawn(11, 14)
    inputs = np.array([text[:-1]], np.int32)
    targets = np.array([text[-5:]], np.int32)
    mask = np.ones_like(inputs, bool)
    logprobs, _ = jax.jit(functools.partial(programs.score, model=toys.GPT2))(
        toys.params(), inputs, mask, targets
    )
    own = policy.logprobs(
        toys.params(),
        model=toys.GPT2,
        tokens=np.array([text], np.int32),
        mask=np.ones((1, 14), bool),
    )
    np.testing.assert_allclose(logprobs[0], own[0, -5:], rtol=1e-5)
