"""Experts that a server returns with its responses, and routing replay behind it.

The exchange has the format of vLLM 0.32, whose server needs a GPU to return experts.
"""

import base64
import dataclasses

import jax
import numpy as np
import optax
import pytest
import toy_files
import toy_server

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.algorithms.self_check import SelfCheckError
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder
from rlhf_jax.models.experts import OWN
from rlhf_jax.roles import policy
from rlhf_jax.samplers import completions, protocol, routed_experts, served
from rlhf_jax.samplers.connection import ServerError
from rlhf_jax.samplers.server import ServerSampler

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = toy_files.MIXTURE  # two layers, each token to 2 of 4 experts
RECIPE = GRPO(
    model=MODEL,
    policy_optimizer=optax.sgd(1.0),
    max_new_tokens=3,
    stop_ids=(1,),
    group_size=2,
    temperature=1.0,
    routing_replay=RoutingReplay("sampler"),
)
PROMPTS = Prompts(
    tokens=np.array([[0, 0, 5], [8, 6, 7]], np.int32),
    mask=np.array([[False, False, True], [True, True, True]]),
    index=np.arange(2, dtype=np.int32),
    sample=np.zeros(2, np.int32),
)
# `vllm.utils.serial_utils.numpy2base64` of vLLM 0.32, of [[[0, 3], [2, 1]]], uint8.
RECORDED = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3"
    "NoYXBlJzogKDEsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgIAoAAwIB"
)
logprobs = jax.jit(policy.logprobs, static_argnames=("model",))
routed = jax.jit(decoder.hidden_and_routing, static_argnames=("model",))


def params():
    """Routers whose choices differ between tokens and are no near ties."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype),
        jax.device_get(toy_files.params(MODEL)),
    )


@pytest.fixture
def toy():
    toy = toy_server.Toy()
    toy.context, toy.records = 32, True
    toy.model, toy.params = MODEL, params()
    # Of one to three tokens.
    toy.drawn = lambda body: [5, 6, 1][-min(body["max_tokens"], len(body["prompt"])) :]
    return toy


@pytest.fixture
def url(toy):
    with toy_server.serving(toy) as url:
        yield url


def sampler(url):
    return ServerSampler(url, RECIPE, tolerance=1e-5, timeout=60.0)


def test_the_format_of_vllm_is_read():
    record = routed_experts.read({"routed_experts": RECORDED})
    np.testing.assert_array_equal(record, [[[0, 3], [2, 1]]])
    assert record.dtype == np.uint8
    for text in (None, 7, "", "AA=", "@", RECORDED[:-8], [[[0, 3], [2, 1]]]):
        assert routed_experts.read({"routed_experts": text}) is None
    objects = np.array([{}], object)
    assert routed_experts.read({"routed_experts": toy_server.encoded(objects)}) is None


def test_a_draw_has_the_experts_of_every_token_that_ran(toy, url):
    with sampler(url) as server:
        assert server.hand_over(params(), version=0) < 1e-5
        drawn = server.draw(PROMPTS, key=jax.random.key(2), version=0)
    rollout = protocol.rollout_of(PROMPTS, drawn, version=0)
    assert drawn.lengths.tolist() == [1, 3]
    assert drawn.experts.shape == (2, 3 + 3, 2, 2)
    assert drawn.experts.dtype == np.int32
    whole = {"tokens": rollout.tokens, "mask": rollout.mask, "model": MODEL}
    chosen = np.asarray(routed(params(), **whole)[1].chosen)
    assert len(np.unique(chosen[rollout.mask])) == 4
    ran = rollout.mask.copy()
    ran[[0, 1], [3, 5]] = False  # the last token of each row
    expected = np.where(ran[..., None, None], chosen, OWN)
    np.testing.assert_array_equal(drawn.experts, expected)
    replayed = logprobs(params(), **whole, experts=drawn.experts)
    np.testing.assert_allclose(replayed[:, 3:], rollout.old_logprobs[:, 3:], atol=1e-5)


def test_experts_in_another_order_are_the_same_and_of_other_numbers_are_told(toy, url):
    """A server that numbers its experts anew replays others than it ran."""
    with sampler(url) as server:
        toy.renumber = lambda record: record[..., ::-1]
        assert server.hand_over(params(), version=0) < 1e-5
        toy.renumber = lambda record: (record + 1) % 4
        with pytest.raises(SelfCheckError, match="after this hand-over"):
            server.hand_over(params(), version=1)


def without(choice):
    del choice["routed_experts"]


def holds(record):
    def change(choice):
        choice["routed_experts"] = toy_server.encoded(record)

    return change


TWO = np.array([0, 1], np.uint8)
WRONG = {
    "none": (without, "expected routed_experts in a choice, the base64 of a NumPy"),
    "null": (
        lambda choice: choice.update(routed_experts=None),
        "the base64 of a NumPy",
    ),
    "an archive": (
        lambda choice: choice.update(routed_experts="UEsDBA=="),
        "the base64 of a NumPy",
    ),
    "half a header": (
        lambda choice: choice.update(
            routed_experts=base64.b64encode(
                b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<i4', 'fort".ljust(118)
            ).decode()
        ),
        "the base64 of a NumPy",
    ),
    "lists": (
        lambda choice: choice.update(routed_experts=[[[0, 1], [0, 1]]]),
        "(vLLM 0.22 or newer, and its model runner V2), or choose --routing-replay old",
    ),
    "layers": (
        holds(np.tile(TWO, (1, 3, 1))),
        "integers [1, 2, 2], [tokens but the last, layers, experts per token], not "
        "uint8[1, 3, 2]",
    ),
    "per token": (holds(np.zeros((1, 2, 3), np.uint8)), "not uint8[1, 2, 3]"),
    "tokens": (holds(np.tile(TWO, (2, 2, 1))), "not uint8[2, 2, 2]"),
    "floats": (holds(np.tile(TWO, (1, 2, 1)).astype("f4")), "not float32[1, 2, 2]"),
    "high": (holds(np.tile(TWO + 3, (1, 2, 1))), "from 0 to 3, not 3 to 4"),
    "low": (holds(np.full((1, 2, 2), -1, "i4")), "from 0 to 3, not -1 to -1"),
    "blank": (holds(np.zeros((1, 2, 2), "u1")), "expected 2 different routed_experts"),
}


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("name", WRONG)
def test_a_record_that_does_not_fit_is_refused_before_weights_are_sent(toy, url, name):
    change, message = WRONG[name]

    def spoilt(path, answer):
        if path == completions.PATH:
            change(answer["choices"][0])
        return answer

    toy.change = spoilt
    with pytest.raises(InputError) as error:
        sampler(url)
    told = str(error.value)
    assert told.startswith("--sampler http://localhost:")
    assert message in told
    assert told.endswith("--enable-return-routed-experts")
    assert not toy.loads


def test_a_record_that_stops_to_fit_later_ends_the_draw(toy, url):
    with sampler(url) as server:
        server.hand_over(params(), version=0)
        toy.renumber = lambda record: record[:-1]
        with pytest.raises(
            ServerError, match=r"routed_experts of integers \[\d, 2, 2\]"
        ):
            server.draw(PROMPTS, key=jax.random.key(2), version=0)


def test_a_run_without_replay_asks_for_no_experts(toy, url):
    toy.records = False
    recipe = dataclasses.replace(RECIPE, routing_replay=None)
    with ServerSampler(url, recipe, tolerance=1e-5, timeout=60.0) as server:
        server.hand_over(params(), version=0)
        drawn = server.draw(PROMPTS, key=jax.random.key(2), version=0)
    assert drawn.experts is None


def test_how_a_mixture_is_served_is_told(tmp_path, capsys):
    toy_files.checkpoint(tmp_path / "model", model=MODEL)
    served.main([str(tmp_path / "model"), str(tmp_path / "served")])
    assert "VLLM_USE_V2_MODEL_RUNNER=1 and --enable-ret" in capsys.readouterr().out
