"""Error messages about misbehaving servers, with a small one that misbehaves.

`studies.outside_sampler` has real servers; none is needed here.
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
from rlhf_jax.algorithms.batch import Prompts, Request
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles import policy
from rlhf_jax.samplers import completions, protocol, served
from rlhf_jax.samplers.connection import ServerError, Unreachable
from rlhf_jax.samplers.server import ServerSampler
from rlhf_jax.train.rollouts.outside import OutsideSampler

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
    return ServerSampler(url, RECIPE, tolerance=1e-4, timeout=60.0, **options)


@pytest.mark.slow
def test_what_is_asked_and_handed_over(toy, url, tmp_path):
    with sampler(url, weights=tmp_path) as server:
        assert server.hand_over(PARAMS, version=4) < 1e-5
        requests, toy.requests = toy.requests, []
        assert len({json.dumps(request) for request in requests}) == 8
        drawn = server.draw(PROMPTS, key=KEY, version=4)
        first, toy.requests = toy.requests, []
        server.draw(PROMPTS, key=KEY, version=4)
        again, toy.requests = toy.requests, []
        server.draw(PROMPTS, key=jax.random.key(3), version=4)
    np.testing.assert_array_equal(drawn.tokens, [[5, 6, 7]] * 2)
    assert drawn.lengths.tolist() == [3, 3]
    assert drawn.entropy is None
    by_prompt = [
        {tuple(a["prompt"]): a for a in requests_of_draw}
        for requests_of_draw in (first, again)
    ]
    assert by_prompt[0] == by_prompt[1]
    assert by_prompt[0].keys() == {(5,), (6, 7)}
    assert len({request["seed"] for request in first + toy.requests}) == 4
    assert first[0]["stop_token_ids"] == [1]
    assert all(0 <= request["seed"] < 2**31 for request in first)
    assert toy.loads == [("version-4", ["config.json", "model.safetensors"])]
    assert not list(tmp_path.iterdir())


UNUSED = dataclasses.replace(
    RECIPE,
    model=dataclasses.replace(toy_files.MODEL, unused_ids=((2, 4), (20, 24))),
)


@pytest.mark.slow
def test_ids_without_a_token_are_forbidden_to_the_server(toy, url):
    """Every request has a bias against them; the check's fixed prompts have none."""
    forbidden = {str(i): -100.0 for i in (2, 3, 20, 21, 22, 23)}
    assert "logit_bias" not in completions.request([5], **REQUEST)
    with ServerSampler(url, UNUSED, tolerance=1e-4, timeout=60.0) as server:
        # The toy's log-probs are those of all ids, as of a server without the bias.
        with pytest.raises(SelfCheckError, match="after this hand-over"):
            server.hand_over(PARAMS, version=0)
        toy.unused = UNUSED.model.unused_ids
        assert server.hand_over(PARAMS, version=1) < 1e-5
        assert all(request["logit_bias"] == forbidden for request in toy.requests)
        shown = {token for request in toy.requests for token in request["prompt"]}
        assert not shown & set(map(int, forbidden))
        toy.change = spoilt("token_ids", [5, 21, 7])
        with pytest.raises(ServerError, match=r"has none of id 21, as .* logit_bias"):
            server.draw(PROMPTS, key=KEY, version=1)


@pytest.mark.slow
def test_a_tied_head_is_handed_over_untied(toy, url):
    assert RECIPE.model.tied_head
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
    assert not toy.model.tied_head
    np.testing.assert_array_equal(
        toy.params["head"]["kernel"], toy.params["embed"]["tokens"]
    )


@pytest.mark.slow
def test_weights_that_were_not_reloaded_are_told(toy, url):
    toy.keeps_weights = True
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        moved = jax.tree.map(lambda leaf: leaf * 1.05, PARAMS)
        with pytest.raises(SelfCheckError, match=r"after this hand-over.*samplers.s"):
            server.hand_over(moved, version=1)


def spoilt(key, value, *, inside="choices"):
    """Changes the answers to one path."""

    def change(path, answer):
        if path == completions.PATH and inside == "choices":
            choice = dict(answer["choices"][0])
            choice.pop(key)
            if value is not None:
                choice[key] = value
            return {"choices": [choice]}
        return value if path == inside else answer

    return change


@pytest.mark.cases(quick=5)
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
        (spoilt("", (400, {"error": "no"}), inside=completions.PATH), "got status 400"),
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
        with pytest.raises(Unreachable, match=r"(?s)expected a server there.*--resume"):
            server.draw(PROMPTS, key=KEY, version=0)


def test_a_server_that_hangs_is_told(toy, url):
    let_go = threading.Event()
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        server._server.timeout = 0.2
        toy.change = lambda path, answer: let_go.wait(5) and answer
        with pytest.raises(Unreachable, match=r"within 0.2 s.*raise timeout= of --s"):
            server.draw(PROMPTS, key=KEY, version=0)
        let_go.set()


class Failing:
    """Changes only the first answers to a path."""

    def __init__(self, answer, *, times, path=completions.PATH):
        self.answer, self.left, self.path = answer, times, path
        self.lock = threading.Lock()  # a request is answered in a thread of its own

    def __call__(self, path, answer):
        with self.lock:
            spoilt = path == self.path and self.left > 0
            self.left -= spoilt
        return self.answer if spoilt else answer


@pytest.fixture
def pauses(monkeypatch):
    """The waits before retries, in seconds, recorded without waiting."""
    waited = []
    monkeypatch.setattr(protocol.time, "sleep", waited.append)
    return waited


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_an_overloaded_server_did_not_answer_is_asked_again(
    toy, url, status, pauses, capsys
):
    """Only those rows; the weights stay, so equal requests have equal answers."""
    with sampler(url) as server:
        server.hand_over(PARAMS, version=0)
        expected = server.draw(PROMPTS, key=KEY, version=0)
        toy.requests = []
        toy.change = Failing((status, {"error": "busy"}), times=1)
        drawn = server.draw(PROMPTS, key=KEY, version=0)
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)
    np.testing.assert_array_equal(drawn.sampler_logprobs, expected.sampler_logprobs)
    assert len(toy.requests) == 3  # two rows, and one of them again
    assert len({json.dumps(request) for request in toy.requests}) == 2
    assert len(toy.loads) == 1
    assert pauses == [1.0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "sampler: try 2 of 5 in 1 s, as the one before failed: "
        f"{url.removesuffix('/v1')}/v1/completions: expected an answer, got status "
        f'{status}: {{"error": "busy"}} (1 of 2 requests)'
    )


def outside(url, **options):
    tries = protocol.Retries(**options)
    inner = sampler(url, retries=tries)
    return OutsideSampler(
        inner,
        home=ONE_DEVICE.make(),
        max_new_tokens=inner._recipe.max_new_tokens,
        retries=tries,
    )


def draw(sampler, *, version=0):
    policy = jax.tree.map(jax.numpy.asarray, PARAMS)
    return sampler(policy, Request(PROMPTS, KEY, np.int32(version)))


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("version", "failing", "loads", "count"),
    [
        # The server is another one, perhaps: in a draw, and in the check before it.
        (0, Failing(None, times=1), 1, 1),
        (1, Failing(None, times=1), 2, 1),
        (1, Failing((503, {}), times=1, path="/collective_rpc"), 2, 1),
        (1, Failing(None, times=1, path="/collective_rpc"), 2, 1),
        (1, Failing((503, {}), times=3, path="/reset_prefix_cache"), 4, 3),
    ],
)
def test_a_lost_connection_hands_the_weights_over_again(
    toy, url, version, failing, loads, count, pauses
):
    with outside(url) as sampler:
        expected = draw(sampler)
        toy.loads, toy.change = [], failing
        rollout = draw(sampler, version=version)
        assert sampler.retries.count == count
    assert [name for name, _ in toy.loads] == [f"version-{version}"] * loads
    assert pauses == [1.0, 2.0, 4.0][:count]
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    np.testing.assert_array_equal(rollout.old_logprobs, expected.old_logprobs)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("answer", [None, (503, {})])
def test_tries_have_an_end(toy, url, answer, pauses):
    with outside(url, tries=3) as sampler:
        draw(sampler)
        toy.change = Failing(answer, times=99)
        with pytest.raises(StopError, match=r"\(tried 3 times\)$"):
            draw(sampler)
        assert sampler.retries.count == 2
    assert pauses == [1.0, 2.0]


def test_pauses_have_an_end(pauses):
    def fails():
        raise Unreachable("gone")

    with pytest.raises(StopError, match=r"gone \(tried 9 times\)"):
        protocol.Retries(9)(fails)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_is_the_requests_fault_is_not_asked_again(toy, url, status, pauses):
    with outside(url) as sampler:
        draw(sampler)
        toy.change = Failing((status, {}), times=99)
        with pytest.raises(ServerError, match=f"got status {status}: {{}}$"):
            draw(sampler)
        assert sampler.retries.count == 0
    assert pauses == []


def test_what_is_refused_at_the_start(toy, url):
    with pytest.raises(InputError, match=r"--sampler http://localhost:9/v1/models: .*"):
        sampler("http://localhost:9")
    for change, message in [
        (lambda *_: {"data": []}, "expected one model at .*, got none"),
        (
            lambda *_: {"data": [{"id": "a"}, {"id": "b"}]},
            "--sampler: expected one model at .*, got a, b",
        ),
        (
            lambda *_: {"data": [{"id": "a", "max_model_len": 3}]},
            "expected a context beyond the 3 tokens",
        ),
        (lambda *_: (404, {}), "Expected an OpenAI-compatible server, with vLLM"),
    ]:
        toy.change = change
        with pytest.raises(InputError, match=message):
            sampler(url)
    toy.change = lambda _, answer: answer
    with pytest.raises(InputError, match="--sampler: expected the model other"):
        sampler(url, model="other")
    empty = dataclasses.replace(PROMPTS, mask=np.array([[False, False], [True, True]]))
    with (
        sampler(url, model="toy") as server,
        pytest.raises(InputError, match="got none in row 0"),
    ):
        server.draw(empty, key=KEY, version=0)


@pytest.mark.slow
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
