"""What is told of a server that misbehaves, by a small one that does.

Real servers are in `studies.outside_sampler`; none is needed here.
"""

import dataclasses
import json
import threading

import jax
import numpy as np
import optax
import pytest
import toy_files
import toy_server

from rlhf_jax import hf
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles import policy
from rlhf_jax.samplers import completions, served
from rlhf_jax.samplers.connection import ServerError
from rlhf_jax.samplers.server import ServerSampler

RECIPE = GRPO(
    model=toy_files.MODEL,
    policy_optimizer=optax.sgd(1.0),
    max_new_tokens=3,
    stop_ids=(1,),
    group_size=2,
    temperature=1.0,
)
PROMPTS = Prompts(
    tokens=np.array([[0, 5], [6, 7]], np.int32),
    mask=np.array([[False, True], [True, True]]),
    index=np.arange(2, dtype=np.int32),
    sample=np.zeros(2, np.int32),
)
REQUEST = {
    "model": "toy",
    "max_new_tokens": 3,
    "temperature": 1.0,
    "stop_ids": (1,),
    "seed": 0,
}
KEY = jax.random.key(2)
PARAMS = jax.device_get(toy_files.params())


@pytest.fixture
def toy():
    return toy_server.Toy()


@pytest.fixture
def url(toy):
    with toy_server.serving(toy) as url:
        yield url


def sampler(url, **options):
    return ServerSampler(url, RECIPE, tolerance=1e-4, timeout=5.0, **options)


def test_what_is_asked_and_handed_over(toy, url, tmp_path):
    with sampler(url, weights=tmp_path / "new") as server:
        assert server.hand_over(PARAMS, version=4) < 1e-5
        asked, toy.asked = toy.asked, []
        assert len({json.dumps(each) for each in asked}) == 8
        drawn = server.draw(PROMPTS, key=KEY, version=4)
        first, toy.asked = toy.asked, []
        server.draw(PROMPTS, key=KEY, version=4)
        again, toy.asked = toy.asked, []
        server.draw(PROMPTS, key=jax.random.key(3), version=4)
    np.testing.assert_array_equal(drawn.tokens, [[5, 6, 7]] * 2)
    assert drawn.lengths.tolist() == [3, 3]
    assert drawn.entropy is None
    by_prompt = [{tuple(a["prompt"]): a for a in each} for each in (first, again)]
    assert by_prompt[0] == by_prompt[1]
    assert by_prompt[0].keys() == {(5,), (6, 7)}
    assert len({each["seed"] for each in first + toy.asked}) == 4
    assert first[0]["stop_token_ids"] == [1]
    assert all(0 <= each["seed"] < 2**31 for each in first)
    assert toy.loads == [("version-4", ["config.json", "model.safetensors"])]
    assert not list((tmp_path / "new").iterdir())


UNUSED = dataclasses.replace(
    RECIPE,
    model=dataclasses.replace(toy_files.MODEL, unused_ids=((2, 4), (20, 24))),
)


def test_ids_without_a_token_are_forbidden_to_the_server(toy, url):
    """By a bias in every request; the fixed prompts of the check have none of them."""
    forbidden = {str(i): -100.0 for i in (2, 3, 20, 21, 22, 23)}
    assert "logit_bias" not in completions.request([5], **REQUEST)
    with ServerSampler(url, UNUSED, tolerance=1e-4, timeout=5.0) as server:
        # The toy's log-probs are those of all ids, as of a server without the bias.
        with pytest.raises(SelfCheckError, match="after this hand-over"):
            server.hand_over(PARAMS, version=0)
        toy.unused = UNUSED.model.unused_ids
        assert server.hand_over(PARAMS, version=1) < 1e-5
        assert all(each["logit_bias"] == forbidden for each in toy.asked)
        shown = {token for each in toy.asked for token in each["prompt"]}
        assert not shown & set(map(int, forbidden))
        toy.change = spoilt("token_ids", [5, 21, 7])
        with pytest.raises(ServerError, match=r"has none of id 21, as .* logit_bias"):
            server.draw(PROMPTS, key=KEY, version=1)


def test_a_tied_head_is_handed_over_untied(toy, url):
    assert RECIPE.model.tied_head
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
    assert not toy.model.tied_head
    np.testing.assert_array_equal(
        toy.params["head"]["kernel"], toy.params["embed"]["tokens"]
    )


def test_weights_that_were_not_reloaded_are_told(toy, url):
    toy.keeps_weights = True
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        moved = jax.tree.map(lambda leaf: leaf * 1.05, PARAMS)
        with pytest.raises(SelfCheckError, match=r"after this hand-over.*samplers.s"):
            server.hand_over(moved, version=1)


def spoilt(key, value, *, inside="choices"):
    """A change of the answers to one path."""

    def change(path, answer):
        if path == completions.PATH and inside == "choices":
            choice = dict(answer["choices"][0])
            choice.pop(key)
            if value is not None:
                choice[key] = value
            return {"choices": [choice]}
        return value if path == inside else answer

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt("token_ids", None), "expected token_ids in a choice"),
        (spoilt("logprobs", None), "expected a log-prob of each of the 3 tokens"),
        (
            spoilt("logprobs", {"token_logprobs": [-1.0, None, -1.0]}),
            "expected a log-prob of each of the 3 tokens",
        ),
        (spoilt("token_ids", [5, 6]), "expected a log-prob of each of the 2 tokens"),
        (
            spoilt("logprobs", {"token_logprobs": [float("nan")] * 3}),
            "expected finite log-probs",
        ),
        (spoilt("token_ids", [5, 1, 7]), "the last of them one of the stop ids"),
        (spoilt("token_ids", [5, 6, 99]), "expected tokens of a vocabulary of 24"),
        (spoilt("prompt_token_ids", [3]), "expected a response to the prompt"),
        (
            spoilt("", {"choices": []}, inside=completions.PATH),
            "expected one choice",
        ),
        (spoilt("", b"<html>", inside=completions.PATH), "expected a JSON object, got"),
        (spoilt("", (500, {"error": "no"}), inside=completions.PATH), "got status 500"),
        (spoilt("", None, inside=completions.PATH), "expected a server there, got"),
        (
            spoilt("", (404, {}), inside="/collective_rpc"),
            "got status 404: {}. It was to reload the weights in",
        ),
        (
            spoilt("", {"success": False}, inside="/reset_prefix_cache"),
            "expected an empty prefix cache",
        ),
    ],
)
def test_what_is_told(toy, url, change, message, tmp_path):
    with sampler(url, weights=tmp_path) as server:
        toy.change = change
        with pytest.raises(StopError) as error:
            server.hand_over(PARAMS, version=0)
        assert message in str(error.value)
        assert not list(next(tmp_path.iterdir()).iterdir())


def test_a_server_that_dies_halfway_is_told(toy, url):
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        toy.change = lambda path, answer: None
        with pytest.raises(StopError, match=r"(?s)expected a server there.*--resume"):
            server.draw(PROMPTS, key=KEY, version=0)


def test_a_server_that_hangs_is_told(toy, url):
    let_go = threading.Event()
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        server._server.timeout = 0.2
        toy.change = lambda path, answer: let_go.wait(5) and answer
        with pytest.raises(StopError, match=r"within 0.2 s.*raise --sampler-timeout"):
            server.draw(PROMPTS, key=KEY, version=0)
        let_go.set()


def test_what_is_refused_at_the_start(toy, url):
    with pytest.raises(InputError, match=r"--sampler http://localhost:9/v1/models: .*"):
        sampler("http://localhost:9")
    for change, message in [
        (lambda *_: {"data": []}, "expected one model at .*, got none"),
        (
            lambda *_: {"data": [{"id": "a"}, {"id": "b"}]},
            "--sampler-model: expected one model at .*, got a, b",
        ),
        (
            lambda *_: {"data": [{"id": "a", "max_model_len": 3}]},
            "expected a context beyond the 3 tokens",
        ),
        (lambda *_: (404, {}), "Expected the models of an OpenAI-compatible"),
    ]:
        toy.change = change
        with pytest.raises(InputError, match=message):
            sampler(url)
    toy.change = lambda _, answer: answer
    with pytest.raises(InputError, match="--sampler-model: expected the model other"):
        sampler(url, model="other")
    empty = dataclasses.replace(PROMPTS, mask=np.array([[False, False], [True, True]]))
    with (
        sampler(url, model="toy") as server,
        pytest.raises(InputError, match="got none in row 0"),
    ):
        server.draw(empty, key=KEY, version=0)


def test_a_checkpoint_to_serve(tmp_path, capsys):
    toy_files.checkpoint(tmp_path / "model")
    served.main([str(tmp_path / "model"), str(tmp_path / "served")])
    assert f"vllm serve {tmp_path / 'served'} --dtype" in capsys.readouterr().out
    model, params = hf.load(tmp_path / "served")
    assert not model.tied_head
    tokens = np.array([[2, 3, 4, 5]], np.int32)
    mask = np.ones_like(tokens, bool)
    np.testing.assert_array_equal(
        policy.logprobs(params, model=model, tokens=tokens, mask=mask),
        policy.logprobs(PARAMS, model=RECIPE.model, tokens=tokens, mask=mask),
    )
    for words in (["one"], [str(tmp_path / "none"), "x"]):
        with pytest.raises(SystemExit, match=r"usage|error: "):
            served.main(words)
