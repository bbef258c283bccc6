"""The capability table: it refuses its pairs with their reasons, and nothing else."""

import functools
import importlib
import itertools

import features
import pytest
from places import ROOT

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.capabilities import CHOICES, TABLE, first
from rlhf_jax.train.main import TRAINERS

# Two features as a user writes them, after the name of the method.
PAIRS = {
    ("no reference", "asks for a reference"): "ppo --reference none --kl-coef 0.1",
    ("unplaced penalty", "KL coefficient"): (
        "ppo --penalty.placement None --kl-coef 0.1"
    ),
    ("further references or steps without one", "one reference"): (
        "online-dpo --references other=o"
    ),
    ("exact KL", "reference apart"): (
        "ppo --penalty.value-estimator exact --placement.reference cpu"
    ),
    ("adapters", "first reference apart"): "grpo --lora 8 --placement.reference cpu",
    ("adapters", "mixed reference"): (
        "grpo --lora 8 --lifecycle.move mix,every=2,rate=0.5"
    ),
    ("moving adapters", "exact KL or another reference"): (
        "grpo --lora 8 --lifecycle.move reset,every=2 --reference other"
    ),
    ("adapters", "critic of its own"): "ppo --lora 8 --critic.start other",
    ("shared trunk", "critic elsewhere"): "ppo --shared-trunk --critic.start other",
    ("critic apart", "joint guards"): (
        "ppo --placement.critic last:data=1 --max-ratio-mean 10"
    ),
    ("critic of a reward model", "not one reward model"): (
        "ppo --critic.start reward_model"
    ),
    ("options of reward models", "no reward model"): (
        "grpo --reward-storage.dtype int8"
    ),
    ("adapters", "rounded sampler"): "grpo --lora 8 --sampler here,dtype=int8",
    ("sampler outside", "drawn here"): "grpo --sampler process --environment rooms",
    ("server", "known to the decoder"): (
        "grpo --sampler http://localhost:1,model=m --continuous-batching 8"
    ),
    ("environment", "how prompts are written"): (
        "grpo --environment rooms --prompt-field question"
    ),
    ("environment", "decoder options"): "grpo --environment rooms --fixed-length 0",
    ("one width", "buckets"): "grpo --max-staleness 1 --buckets 8 16",
    ("redraws", "no known groups"): "ppo --max-redraws 2",
    ("other sampler", "uncorrected"): (
        "grpo --sampler here,dtype=int8 --sampler-correction recompute"
    ),
    ("draws beside", "mixture apart"): "nash-md --placement.reference cpu",
    ("packing", "context"): "grpo --packing auto --placement.policy context=2",
    ("packing", "padded loss"): "distill --reference o --packing auto",
    ("alternatives", "stale sampler"): ("grpo --num-alternatives 2 --max-staleness 1"),
    ("reference's samples", "not the start"): "grpo --sample-reference --lora 8",
}


@functools.cache
def parse(words):
    """The config of a command line with the required options added."""
    name, *options = words.split()
    needed = ["--out=x", "--model=m", "--prompts=p"]
    rewards = ("--reward", "--verifier", "--environment")
    if not any(option.startswith(rewards) for option in options) or (
        "--reward-storage.dtype" in options
    ):
        needed.append("--reward=my:score")
    if name == "distill" and "--reference" not in options:
        needed += ["--reference", "teacher"]
    return command_line.parse(
        importlib.import_module(TRAINERS[name].module).Config,
        description="A test.",
        argv=[*needed, *options],
    )


def violated(config):
    return [
        pair
        for pair in TABLE
        if all(first(CHOICES[feature](config)) is not None for feature in pair)
    ]


def test_the_table_is_short_and_every_row_has_a_command_line():
    assert list(PAIRS) == list(TABLE)
    assert len(TABLE) <= 25
    assert set(CHOICES) == set(itertools.chain(*TABLE))


@pytest.mark.parametrize(
    ("words", "pair"),
    [
        ("grpo --normalise each --max-redraws 2", ("redraws", "no known groups")),
        (
            "distill --success-score 1 --group-size 2 --max-redraws 2",
            ("redraws", "no known groups"),
        ),
        ("grpo --routing-replay sampler --sampler process", None),
        ("ppo --routing-replay sampler --environment rooms", None),
        ("grpo --routing-replay sampler --baseline greedy", None),
        ("grpo --routing-replay sampler --sampler http://localhost:1,model=m", None),
        ("ppo --routing-replay old --sampler http://localhost:1,model=m", None),
        ("ppo --routing-replay old --environment rooms", None),
        ("grpo --baseline greedy --sampler process", ("draws beside", "mixture apart")),
        (
            "grpo --surrogate centred --sampler process",
            ("sampler outside", "drawn here"),
        ),
        ("grpo --surrogate centred --packing auto", ("packing", "padded loss")),
        (
            "grpo --surrogate centred --environment rooms",
            ("environment", "decoder options"),
        ),
        ("grpo --surrogate centred --max-staleness 1", None),
        (
            "grpo --token-choice top_entropy --sampler http://localhost:1,model=m",
            ("server", "known to the decoder"),
        ),
    ],
)
def test_other_options_of_the_same_features(words, pair):
    assert violated(parse(words)) == ([] if pair is None else [pair])


@pytest.fixture(autouse=True)
def check(monkeypatch):
    """The check, which tests call themselves; on a command line it ends the process."""
    check = capabilities.check
    monkeypatch.setattr(capabilities, "check", lambda config: None)
    return check


@pytest.mark.cases(quick=5)
@pytest.mark.parametrize("pair", TABLE, ids=" with ".join)
def test_two_features_that_exclude_each_other_are_refused_with_the_reason(pair, check):
    config = parse(PAIRS[pair])
    assert violated(config) == [pair]
    with pytest.raises(InputError) as error:
        check(config)
    assert TABLE[pair] in str(error.value)
    for feature in pair:  # both are named as the user wrote them
        assert str(first(CHOICES[feature](config))) in str(error.value)


@pytest.mark.parametrize(
    ("words", "pair"),
    [
        (
            "ppo --reference none --placement.reference last",
            ("no reference", "asks for a reference"),
        ),
        (
            "ppo --reference none --lifecycle.kl-every 2",
            ("no reference", "asks for a reference"),
        ),
        (
            "ppo --reference none --penalty.reference-share 0.5",
            ("no reference", "asks for a reference"),
        ),
        (
            "grpo --reference none --kl-to-go --penalty.placement reward "
            "--penalty.grad-estimator None",
            ("no reference", "asks for a reference"),
        ),
        (
            "grpo --reference none --surrogate dar",
            ("no reference", "asks for a reference"),
        ),
        (
            "online-dpo --lifecycle.kl-every 2",
            ("further references or steps without one", "one reference"),
        ),
        (
            "distill --reference o --lifecycle.kl-every 2",
            ("further references or steps without one", "one reference"),
        ),
        (
            "ppo --reference none --penalty.value-estimator exact",
            ("no reference", "asks for a reference"),
        ),
        (
            "ppo --penalty.placement None --kl-coef 0 --kl-control linear,end=0.1",
            ("unplaced penalty", "KL coefficient"),
        ),
        (
            "grpo --lora 8 --placement.reference pinned_host",
            ("adapters", "first reference apart"),
        ),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(words, pair):
    assert violated(parse(words)) == [pair]


def test_adapters_beside_another_reference_take_it_from_the_host():
    words = "grpo --lora 8 --reference other --placement.reference pinned_host"
    assert not violated(parse(words))


def test_a_command_line_is_refused(monkeypatch, check):
    monkeypatch.setattr(capabilities, "check", check)
    with pytest.raises(InputError, match="because all of its batches have"):
        parse.__wrapped__("grpo --max-staleness 1 --buckets 8 16")


@pytest.mark.slow
@pytest.mark.parametrize("name", features.METHODS)
def test_a_method_refuses_an_option_by_what_the_method_is_alone(name, check):
    alone = parse(name)
    check(alone)
    own = {feature for feature in CHOICES if first(CHOICES[feature](alone))}
    for options in features.OPTIONS.values():
        for pair in violated(parse(f"{name} {options}")):
            assert own & set(pair), (options, pair)


def refused(name, options):
    return [TABLE[pair] for pair in violated(parse(f"{name} {options}"))]


@pytest.mark.slow
def test_the_matrix_of_the_front_page_is_that_of_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    matrix = features.matrix(refused)
    assert matrix in text, f"expected in README.md:\n\n{matrix}"


@pytest.mark.slow
def test_the_front_page_names_what_every_method_accepts():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for feature, options in features.OPTIONS.items():
        if not any(refused(name, options) for name in features.METHODS):
            assert feature in text


def test_the_trainers_readme_shows_every_pair():
    text = (ROOT / "rlhf_jax/train/README.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *PAIRS.values(), "```"]) in text
