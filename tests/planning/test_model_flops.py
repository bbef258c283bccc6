"""Model FLOPs token by token, and the resulting MFU."""

import dataclasses

import pytest
import tiny

from rlhf_jax.models.families import registry
from rlhf_jax.planning import chips, measured, model_flops
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train.plan import plan

TEXTS = [Text(3, response) for response in (4, 1, 9, 4)]
LOCAL = dataclasses.replace(
    tiny.LLAMA, sliding_window=5, local_layers=(True, False), num_layers=2
)


def by_token(model, texts, *, head, first=0):
    """FLOPs of every product of every token from column `first` of each text on."""
    total = 0
    heads = model.num_heads * model.head_dim
    size = model.hidden_size
    for prompt, response, _ in texts:
        for column in range(first, prompt + response):
            for layer in range(model.num_layers):
                total += 2 * size * heads * 2  # query and output
                total += 2 * size * model.num_kv_heads * model.head_dim * 2
                ups = 2 if model.gated_mlp else 1
                total += 2 * size * model.intermediate_size * (ups + 1)
                num_visible = column + 1
                if model.is_local(layer):
                    num_visible = min(num_visible, model.sliding_window)
                total += 2 * 2 * num_visible * heads
            if head and column >= prompt:
                total += 2 * size * model.vocab_size
    return total


@pytest.mark.parametrize("model", [tiny.GPT2, tiny.LLAMA, LOCAL])
@pytest.mark.parametrize("head", [True, False])
def test_a_forward_pass_token_by_token(model, head):
    flops = model_flops.forward(model, TEXTS, head=head)
    assert flops == by_token(model, TEXTS, head=head)


def test_a_prompt_that_texts_share_is_run_once():
    flops = model_flops.forward(LOCAL, TEXTS, head=True, group_size=2)
    prompt = by_token(LOCAL, [Text(3, 0)] * 2, head=False)
    rest = by_token(LOCAL, TEXTS, head=True, first=3)
    assert flops == prompt + rest


def test_observed_tokens_are_run_for_each_text_and_not_predicted():
    observed = (2, 0, 3, 1)
    texts = [
        text._replace(observed=more) for text, more in zip(TEXTS, observed, strict=True)
    ]
    flops = model_flops.forward(tiny.GPT2, texts, head=True, group_size=2)
    # As one response, less the predictions of what was observed.
    as_one = [Text(3, text.response + text.observed) for text in texts]
    predictions = 2 * 6 * tiny.GPT2.hidden_size * tiny.GPT2.vocab_size
    prompt = by_token(tiny.GPT2, [Text(3, 0)] * 2, head=False)
    rest = by_token(tiny.GPT2, as_one, head=True, first=3)
    assert flops == prompt + rest - predictions


def test_a_gradient_is_two_passes_more_and_that_of_adapters_one():
    forward = model_flops.forward(tiny.GPT2, TEXTS, head=True)
    assert model_flops.training(
        tiny.GPT2, TEXTS, head=True, adapters=None
    ) == pytest.approx(3 * forward)
    tokens = 4 * 3 + 18
    assert model_flops.training(
        tiny.GPT2, TEXTS, head=True, adapters=10
    ) == pytest.approx(2 * forward + 3 * 2 * 10 * tokens)


def test_six_parameters_a_token():
    """A training step of a 7B model on short texts costs about 6 N per token."""
    model = registry.KNOWN["llama-2-7b"]
    flops = model_flops.training(model, [Text(0, 64)], head=True, adapters=None)
    assert flops == pytest.approx(6 * 6.738e9 * 64, rel=0.03)


def test_the_mfu_by_hand():
    """989 TFLOP in 2 s on 4 chips of 989 TFLOP/s are an MFU of 1/8."""
    chip = chips.CHIPS["h100"]
    assert measured.mfu(989e12, seconds=2.0, chip=chip, num_chips=4) == 1 / 8
    assert measured.mfu(1.0, seconds=0.0, chip=chip, num_chips=4) is None


def test_the_speed_of_a_step():
    def program(stage, seconds, flops):
        return {"stage": stage, "seconds": {"bound": seconds}, "model_flops": flops}

    programs = [
        program("rollout", 2.0, 1e12),
        program("score", 0.5, 1e12),
        program("score", 1.5, 2e12),
        program("update", 4.0, 12e12),
    ]
    chip = dataclasses.replace(chips.CHIPS["h100"], flops=1e12)
    speed = plan.speed(programs, chip=chip, num_chips=4, tokens=640)
    assert speed == {
        "seconds": 8.0,
        "model_flops": 16e12,
        "mfu": 0.5,
        "tokens": 640,
        "tokens_per_second_per_chip": 20.0,
        "shares": {"rollout": 0.25, "score": 0.25, "update": 0.5},
    }
    refused = plan.speed(
        [program("update", 0.0, 1.0)], chip=chip, num_chips=1, tokens=1
    )
    assert refused["mfu"] is refused["tokens_per_second_per_chip"] is None


def test_prompts_of_several_lengths():
    texts = [Text(3, 4), Text(5, 4), Text(3, 4), Text(5, 4)]
    apart = [
        model_flops.forward(LOCAL, of_prompt, head=True, group_size=2)
        for of_prompt in (texts[::2], texts[1::2])
    ]
    together = model_flops.forward(LOCAL, texts, head=True, group_size=2)
    assert together == sum(apart)
