"""lm-eval's own package runs tasks on a policy (extra lm-eval)."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_jax import config, decoder, hf
from rlhf_jax.data import tokenization
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import policy as forward

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
CONTEXT = 32
MODEL = config.gpt2(
    vocab_size=50257, hidden_size=16, num_layers=2, num_heads=2, max_positions=CONTEXT
)
END = "<|endoftext|>"
TEXT = "Natalia sold clips to 48 of her friends in April, and then half as many. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, shared_data):
    """A checkpoint with non-uniform random weights and GPT-2's tokenizer."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=MODEL))
    params = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(0, 0.3, leaf.shape).astype(np.float32)),
        shapes,
    )
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    tokenizer = tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")
    hf.save(folder, MODEL, params, tokenizer=tokenizer)
    return folder, params, tokenizer


@pytest.fixture(scope="module")
def policy(checkpoint):
    pytest.importorskip("lm_eval", reason="extra lm-eval")
    from rlhf_jax.evaluation.harness.model import Policy

    return Policy(str(checkpoint[0]), batch_size=4)


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """log π of each token of an unpadded row by another function; the greedy tokens."""
    _, params, _ = checkpoint
    logits = jax.jit(
        lambda tokens: forward.logits(
            params, model=MODEL, tokens=tokens, mask=tokens >= 0
        )
    )

    def of(tokens):
        read = np.asarray(logits(np.array([tokens[:-1]], np.int32))[0], np.float64)
        top = read.max(axis=1, keepdims=True)
        logprobs = read - top - np.log(np.exp(read - top).sum(axis=1, keepdims=True))
        targets = np.array(tokens[1:])
        return logprobs[np.arange(len(targets)), targets], read.argmax(axis=1)

    return of


def test_log_likelihoods_are_sums_over_the_continuation(policy, checkpoint, alone):
    _, _, tokenizer = checkpoint
    pairs = [
        (TEXT, "Altogether"),
        ("The cat", " sat on the mat"),
        ("The cat ", "sat on the mat"),  # whose space goes to the continuation
        (TEXT * 3, " How many clips did she sell?"),
    ]
    likelihoods = policy.loglikelihood(
        [request(*pair) for pair in pairs], disable_tqdm=True
    )
    for (context, continuation), (total, greedy) in zip(
        pairs, likelihoods, strict=True
    ):
        context_ids = tokenizer(context.rstrip())["input_ids"]
        whole = tokenizer(context + continuation)["input_ids"]
        count = len(whole) - len(context_ids)
        logprobs, best = alone(whole[-(CONTEXT + 1) :])
        assert total == pytest.approx(logprobs[-count:].sum(), rel=1e-5)
        assert greedy == (best[-count:].tolist() == whole[-count:])
    assert likelihoods[1] == likelihoods[2]


def test_a_continuation_without_a_token_is_told(policy):
    """The token "ab" contains both, so no token is left to predict."""
    with pytest.raises(InputError, match="continuation 'b' of 'a': expected a token"):
        policy.loglikelihood([request("a", "b")], disable_tqdm=True)


def test_what_the_policy_would_say_itself_is_greedy(policy, checkpoint, alone):
    _, _, tokenizer = checkpoint
    context = tokenizer("The cat sat")["input_ids"]
    _, best = alone([*context, 0])
    token = int(best[-1])
    answers = policy._loglikelihood_tokens(
        [(("a", "b"), context, [token]), (("a", "c"), context, [token - 1])],
        disable_tqdm=True,
    )
    assert [greedy for _, greedy in answers] == [True, False]


def test_an_empty_context_is_the_prefix_token(policy, checkpoint, alone):
    _, _, tokenizer = checkpoint
    ids = tokenizer("The cat")["input_ids"]
    logprobs, _ = alone([tokenizer.bos_token_id, *ids])
    requests = [request("", "The cat"), request("", END + "The cat")]
    (first, _), (second, _) = policy.loglikelihood(requests, disable_tqdm=True)
    assert first == pytest.approx(logprobs.sum(), rel=1e-5)
    # A text that begins with the prefix has no second one, and does not predict it.
    assert second == pytest.approx(first, rel=1e-6)


def test_a_context_of_spaces_is_the_prefix_token(policy, checkpoint, alone):
    """The spaces move to the continuation, so its context is empty."""
    _, _, tokenizer = checkpoint
    ids = tokenizer(" The cat")["input_ids"]
    logprobs, _ = alone([tokenizer.bos_token_id, *ids])
    ((total, _),) = policy.loglikelihood([request(" ", "The cat")], disable_tqdm=True)
    assert total == pytest.approx(logprobs.sum(), rel=1e-5)


def test_bos_is_added_where_it_is_asked_for(policy, checkpoint, alone, monkeypatch):
    """GPT-2's tokenizer does not add it."""
    _, _, tokenizer = checkpoint
    bos, ids = tokenizer.bos_token_id, tokenizer("The cat")["input_ids"]
    assert policy.tok_encode("The cat") == ids
    monkeypatch.setattr(policy, "_add_bos_token", True)
    assert policy.tok_encode("The cat") == [bos, *ids]
    assert policy.tok_encode(END + "The cat") == [bos, *ids]
    assert policy.tok_encode("The cat", add_special_tokens=False) == ids
    logprobs, _ = alone([bos, *tokenizer("The cat sat")["input_ids"]])
    ((total, _),) = policy.loglikelihood(
        [request("The cat", " sat")], disable_tqdm=True
    )
    assert total == pytest.approx(logprobs[-1], rel=1e-5)
    monkeypatch.setattr(policy, "_add_bos_token", False)
    assert policy.tok_encode("The cat") == ids


@pytest.mark.parametrize("times", [1, 2, 4, 6])
def test_long_texts_are_read_in_windows(policy, checkpoint, alone, times):
    """Every token is read once; later windows begin with one token of the previous.

    tokens     0 1 2 3 4 5 6 7 8 9         a context of 4
    windows    E 0 1 2 | 3 4 5 6 | 5 6 7 8 (8 and 9 are predicted in the last)
    """
    _, _, tokenizer = checkpoint
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT * times)["input_ids"]]
    total, done = 0.0, 1
    while done < len(ids):
        end = min(done + CONTEXT, len(ids))
        logprobs, _ = alone(ids[max(end - CONTEXT - 1, 0) : end])
        total += logprobs[-(end - done) :].sum()
        done = end
    (logprob,) = policy.loglikelihood_rolling(
        [request(TEXT * times)], disable_tqdm=True
    )
    assert logprob == pytest.approx(total, rel=1e-5)
    assert math.isfinite(total)


def test_rolling_sums_stay_with_their_texts(policy):
    texts = [TEXT * 4, "", "The cat", TEXT]
    together = policy.loglikelihood_rolling(
        [request(text) for text in texts], disable_tqdm=True
    )
    assert together[1] == 0.0
    for text, total in zip(texts, together, strict=True):
        (own,) = policy.loglikelihood_rolling([request(text)], disable_tqdm=True)
        assert own == pytest.approx(total, rel=1e-6)


def generated(policy, context, **options):
    (text,) = policy.generate_until([request(context, options)], disable_tqdm=True)
    return text


def test_responses_end_before_the_first_until(policy, checkpoint, alone):
    _, _, tokenizer = checkpoint
    tokens = tokenizer(TEXT)["input_ids"]
    for _ in range(8):
        _, best = alone([*tokens[-CONTEXT:], 0])
        tokens = [*tokens, int(best[-1])]
    response = tokenizer.decode(tokens[-8:])
    whole = generated(policy, TEXT, until=[], max_gen_toks=8)
    assert whole == response
    middle = len(whole) // 2
    until = whole[middle : middle + 5]  # most likely of more than one token
    assert (
        generated(policy, TEXT, until=["\n\n\n", until], max_gen_toks=8)
        == (whole[: whole.index(until)])
    )
    assert (
        generated(policy, TEXT, until=until, max_gen_toks=8, do_sample=False)
        == (whole[: whole.index(until)])
    )
    assert generated(policy, TEXT, until=[""], max_gen_toks=8) == whole


def test_a_token_that_holds_an_until_ends_the_loop(policy, checkpoint):
    _, _, tokenizer = checkpoint
    until, draw = policy._draw({"until": ["\n"], "max_gen_toks": 8})
    assert until == ["\n"]
    newline, pair = (tokenizer(text)["input_ids"] for text in ("\n", "\n\n"))
    assert {*newline, *pair, tokenizer.eos_token_id} <= set(draw.stop_ids)
    assert tokenizer("a")["input_ids"][0] not in draw.stop_ids
    assert draw.shaping.greedy
    _, plain = policy._draw({"max_gen_toks": 8})
    assert plain.stop_ids == (tokenizer.eos_token_id,)


def test_sampling_has_the_temperature_of_the_task(policy):
    options = {"until": [], "max_gen_toks": 6, "do_sample": True}
    _, draw = policy._draw({**options, "temperature": 0.7, "top_p": 0.9})
    assert (draw.temperature, draw.shaping.top_p) == (0.7, 0.9)
    assert not draw.shaping.greedy
    _, off = policy._draw({**options, "temperature": 1.0, "top_k": 0, "min_p": 0.0})
    assert (off.shaping.top_k, off.shaping.min_p) == (None, None)
    texts = policy.generate_until(
        [request(TEXT, {**options, "temperature": 5.0}) for _ in range(5)],
        disable_tqdm=True,
    )
    assert len(set(texts)) == 5
    # At next to no temperature it is the greedy response.
    cold = generated(policy, TEXT, **{**options, "temperature": 1e-4})
    assert cold == generated(policy, TEXT, until=[], max_gen_toks=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "expected until, .* got num_beams=4"),
        ({"do_sample": True, "temperature": 0.0}, "above 0 .* got temperature=0.0"),
        ({"max_gen_toks": 0}, "max_gen_toks of at least 1, .* got max_gen_toks=0"),
        ({"max_gen_toks": CONTEXT}, f"expected less than the {CONTEXT} tokens"),
    ],
)
def test_options_that_cannot_be_followed_are_told(policy, options, message):
    with pytest.raises(InputError, match=message):
        generated(policy, TEXT, until=[], **options)


def test_an_empty_prompt_is_the_prefix_token(policy):
    empty = generated(policy, "", until=[], max_gen_toks=4)
    assert empty == generated(policy, END, until=[], max_gen_toks=4)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
metric_list:
  - metric: {metric}
"""


def test_lm_eval_runs_tasks_of_all_kinds(policy, tmp_path, monkeypatch):
    """Multiple choice, perplexity and generation tasks, from local files."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    questions = [f"{TEXT} How many is {i} and {i}?" for i in range(5)]
    choices = [" Two", " None at all"]
    scores = policy.loglikelihood(
        [request(q, choice) for q in questions for choice in choices], disable_tqdm=True
    )
    best = [int(a[0] < b[0]) for a, b in zip(scores[::2], scores[1::2], strict=True)]
    answers = [generated(policy, q, until=["\n"], max_gen_toks=4) for q in questions]
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for number, question in enumerate(questions):
            row = {
                "question": question,
                # Right in three of five.
                "label": best[number] if number < 3 else 1 - best[number],
                "said": answers[number] if number < 2 else "something else",
            }
            file.write(json.dumps(row) + "\n")
    tasks = {
        "choice": (
            ("multiple_choice", "{{label}}", "acc"),
            f"doc_to_choice: {json.dumps(choices)}\n",
        ),
        "perplexity": (
            ("loglikelihood_rolling", "{{question}}", "word_perplexity"),
            "",
        ),
        "response": (
            ("generate_until", "{{said}}", "exact_match"),
            'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\n',
        ),
    }
    for name, ((kind, target, metric), more) in tasks.items():
        text = TASK.format(
            name=f"toy_{name}", rows=rows, kind=kind, target=target, metric=metric
        )
        if name == "perplexity":
            text = text.replace('doc_to_text: "{{question}}"', 'doc_to_text: ""')
        (tmp_path / f"{name}.yaml").write_text(text + more)
    results = lm_eval.simple_evaluate(
        policy,
        tasks=[f"toy_{name}" for name in tasks],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    assert results["toy_choice"]["acc,none"] == pytest.approx(3 / 5)
    assert results["toy_response"]["exact_match,none"] == pytest.approx(2 / 5)
    totals = policy.loglikelihood_rolling([request(q) for q in questions])
    words = sum(len(question.split()) for question in questions)
    assert results["toy_perplexity"]["word_perplexity,none"] == pytest.approx(
        math.exp(-sum(totals) / words)
    )


def test_lm_eval_finds_it_by_its_name(policy, checkpoint):
    from lm_eval.api.registry import get_model

    made = get_model("rlhf_jax").create_from_arg_string(
        f"pretrained={checkpoint[0]},max_length=16,seed=3",
        {"batch_size": 2, "max_batch_size": None, "device": "cuda:0"},
    )
    assert type(made) is type(policy)
    assert (made.batch_size, made.max_length) == (2, 16)
    with pytest.raises(InputError, match="batch_size: expected rows at a time"):
        type(policy)(str(checkpoint[0]), batch_size="auto")
