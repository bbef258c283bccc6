"""Unions as one option: values written, parsed and written again are equal."""

import dataclasses
import json
import re
import typing

import places
import pytest
import reread
import tiers

from rlhf_jax.algorithms.policy_gradient.corrections import SamplerCorrection
from rlhf_jax.algorithms.policy_gradient.options import (
    EntropyTarget,
    GradientPenalty,
    TokenChoice,
)
from rlhf_jax.algorithms.policy_gradient.recipe import FixedLength, Surrogate
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import PI, Adaptive, Control, Fixed, Lagrangian
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Mix, Reset
from rlhf_jax.runs import choices, command_line, run_config
from rlhf_jax.train import commands
from rlhf_jax.train.config import models, optimizer, prompts, rewards, sampler
from rlhf_jax.train.config.optimizer import Adam, Custom, TFAdam
from rlhf_jax.train.methods import distill, grpo, nash_md, online_dpo, ppo, reinforce

CHANGELOG = places.ROOT / "rlhf_jax" / "CHANGELOG.md"
CONFIGS = [
    module.Config for module in (ppo, grpo, reinforce, online_dpo, nash_md, distill)
]
WRITTEN = {  # of every union: what is written, as short as it can be
    Control: [
        "fixed",
        "linear,end=0.0",
        "adaptive,target=6.0,unit=response",
        "pi,target=0.1,unit=token",
        "lagrangian,target=6.0,unit=response",
    ],
    models.Adapters: [
        "None",
        "lora",
        "rank=8",
        "rank=8,alpha=8.0,modules=attention/*+mlp/*",
    ],
    prompts.Packing: ["None", "auto", "auto,width=64,max_tokens_per_device=512"],
    optimizer.Rule: [
        "adam",
        "adam,eps=1e-05,b2=0.95,mu_dtype=bfloat16",
        "tf_adam",
        "adamw,weight_decay=0.1,decay=matrices",
        "adafactor",
        "adafactor,momentum=0.9",
        "muon,beta=0.9,ns_steps=6",
        "my_module:make",
    ],
    optimizer.ScheduleKind: [
        "constant",
        "linear,warmup=0.1",
        "cosine,end=0.1",
        "wsd,warmup=0.1,decay=0.3",
    ],
    sampler.Sampler: [
        "here",
        "here,dtype=int8,embeddings=bfloat16,cache=int8,prefill_chunk=64",
        "process",
        "process,weights=a/folder,timeout=5.0",
        "http://localhost:8000",
        "http://localhost:8000,model=mine,check_tolerance=0.1",
    ],
    RoutingReplay | None: ["None", "routing_replay", "source=old,reference=true"],
    sampler.Episodes | None: ["None", "name=rooms", "name=rooms,max_turns=2"],
    rewards.Model | None: ["None", "paths=a", "paths=a+b,combine=minimum"],
    rewards.Verifier | None: ["None", "name=gsm8k", "name=gsm8k,answer_field=gold"],
    Surrogate: [
        "clip",
        "clip,clip_range=0.0003,clip_range_high=0.0004,ratio_level=sequence",
        "clip,dual_clip=3.0",
        "cispo,clip_range=1.0,clip_range_high=4.0",
        "sapo",
        "sapo,temperature_neg=1.1,ratio_level=sequence_token",
        "dppo",
        "dppo,divergence=kl,threshold=0.05,threshold_high=0.1,cap=10.0",
        "gmpo",
        "gmpo,clip_range=0.3,clip_range_high=0.5",
        "vespo",
        "vespo,power_pos=1.0,decay_neg=3.0",
        "topr",
        "dar",
        "dar,beta=0.1,share=0.5,cap=10.0",
        "centred",
        "centred,top_k=64,cap=2.0,floor=0.5",
    ],
    EntropyTarget | None: [
        "None",
        "entropy_target",
        "target=0.3,increment=0.01,largest=0.5",
    ],
    TokenChoice | None: [
        "None",
        "top_entropy",
        "top_entropy,share=0.1",
        "clip_cov,low=0.5,high=2.0",
        "kl_cov,share=0.0002,coef=2.0",
    ],
    SamplerCorrection | None: [
        "None",
        "ratio",
        "recompute",
        "truncate",
        "truncate,cap=5.0,level=sequence",
        "mask,cap=5.0,floor=0.5",
        "reject,cap=2.0,level=geometric",
    ],
    FixedLength | None: [
        "None",
        "fixed_length",
        "truncate_after=16",
        "truncate_after=16,reward_only=true",
    ],
    GradientPenalty | None: [
        "None",
        "strength=0.01",
        "strength=0.01,step=0.01,max_norm=None",
    ],
    Reset | Mix | None: ["None", "reset,every=10", "mix,every=10,rate=0.5"],
}
LISTS = {
    rewards.Listed: (
        *("right=verifier:gsm8k", "kind=model:a+b,combine=minimum,weight=0.5"),
        *("short=length,weight=-0.001", "own=environment", "f=function:my:score"),
    ),
}


def unions(kind):
    """Every union of dataclasses among a config's fields, nested groups included."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        kinds = choices.kinds_of(hint) if choices.is_union(hint) else {}
        if kinds and not any(hasattr(kind, "parse") for kind in kinds.values()):
            yield hint
        elif dataclasses.is_dataclass(hint):
            yield from unions(hint)


def test_every_union_of_the_configs_is_here_with_every_kind():
    of_configs = {union for config in CONFIGS for union in unions(config)}
    assert {Control, optimizer.Rule} < of_configs
    assert of_configs <= {*WRITTEN, *(None | union for union in WRITTEN)}
    for union, texts in WRITTEN.items():
        made = {type(choices.parse(text, union)) for text in texts}
        assert made >= set(choices.kinds_of(union).values())


@pytest.mark.parametrize("union", WRITTEN, ids=lambda union: WRITTEN[union][-1])
def test_what_is_written_is_parsed_and_written_again(union):
    for text in WRITTEN[union]:
        value = choices.parse(text, union)
        assert choices.text(value, union) == text
        assert choices.parse(choices.text(value, union), union) == value


@pytest.mark.parametrize("text", LISTS[rewards.Listed])
def test_a_reward_of_the_list_is_parsed_and_written_again(text):
    assert str(rewards.Reward.parse(text)) == text


def test_what_a_text_stands_for():
    def parsed(text, union):
        return choices.parse(text, union)

    assert parsed("adaptive,target=6,unit=response", Control) == Adaptive(
        target=6.0, unit="response"
    )
    assert parsed("pi,unit=token,target=1", Control) == PI(target=1.0, unit="token")
    assert isinstance(parsed("lagrangian,target=6,unit=token", Control), Lagrangian)
    assert parsed("fixed", Control) == Fixed()
    assert parsed("16", models.Adapters) == LoRA(rank=16)
    assert parsed("16,alpha=8", models.Adapters) == LoRA(rank=16, alpha=8.0)
    assert parsed("None", models.Adapters) is None
    assert parsed("16,reward_only=true", FixedLength | None) == FixedLength(16, True)
    assert parsed("0", FixedLength | None) == FixedLength()
    assert parsed("tf-adam,mu-dtype=bfloat16", optimizer.Rule) == TFAdam(
        mu_dtype="bfloat16"
    )
    assert parsed("my:make", optimizer.Rule) == Custom("my:make")
    assert parsed("auto,width=64", prompts.Packing) == prompts.Auto(width=64)


@pytest.mark.parametrize(
    ("text", "union", "message"),
    [
        ("adamm", optimizer.Rule, "expected one of adam, adamw, tf_adam, adafactor"),
        ("adam,epsilon=1", optimizer.Rule, "before an equals sign, got epsilon"),
        ("adam,target=1", optimizer.Rule, "before an equals sign, got target"),
        ("clip,range=0.1", Surrogate, "clip_range_high, dual_clip, ratio_level before"),
        ("ratio,weight=1", SamplerCorrection, "expected no key before an equals sign"),
        ("adam,momentum=1", optimizer.Rule, "expected eps, b1, b2, mu_dtype, each"),
        ("adam,eps=small", optimizer.Rule, "expected eps to be a number, got 'small'"),
        (
            "adam,mu_dtype=int8",
            optimizer.Rule,
            "mu_dtype to be one of float32, bfloat16",
        ),
        ("adam,eps=1,eps=2", optimizer.Rule, "each with = and a value, got eps twice"),
        ("adaptive,unit=token", Control, "expected target with adaptive, got none"),
        ("fixed,target=1", Control, "expected fixed alone, which has no options"),
        ("sapo,clip_range=0.1", Surrogate, "expected temperature_pos, temperature_neg"),
        ("cispo,dual_clip=3", Surrogate, "expected clip_range, clip_range_high, ratio"),
        ("mask", SamplerCorrection, "expected cap with mask, got none"),
        (
            "recompute,cap=2",
            SamplerCorrection,
            "expected recompute alone, which has no",
        ),
        (
            "reject,cap=2,level=token",
            SamplerCorrection,
            "one of sequence, geometric, got",
        ),
        (
            "sixteen",
            models.Adapters,
            "expected rank to be a whole number, got 'sixteen'",
        ),
        ("mix,every=2", Reset | Mix | None, "expected rate with mix, got none"),
        ("never", Reset | Mix | None, "expected one of reset, mix, None, got 'never'"),
    ],
)
def test_a_text_that_is_no_choice_names_what_there_is(text, union, message):
    with pytest.raises(InputError) as error:
        choices.parse(text, union)
    assert message in str(error.value)


NEEDED = ("--out=x", "--model=m", "--prompts=p", "--verifier=gsm8k")


def parse(*argv, module=grpo):
    return command_line.parse(
        module.Config,
        description="A test.",
        renamed=commands.successors(module.Config),
        argv=[*NEEDED, *map(str, argv)],
    )


FILES = {
    "options.toml": """
num_steps = 7
[optimizer]
learning_rate = 1e-5
optimizer = "adam,eps=1e-5"
[kl]
kl_control = { kind = "adaptive", target = 6.0, unit = "response" }
[start]
lora = { rank = 16 }
[reference.lifecycle]
kl_every = 2
""",
    "options.yaml": """
num_steps: 7
optimizer: {learning_rate: 1.0e-5, optimizer: "adam,eps=1e-5"}
kl: {kl_control: {kind: adaptive, target: 6.0, unit: response}}
start: {lora: {rank: 16}}
reference: {lifecycle: {kl_every: 2}}
""",
    "options.json": json.dumps(
        {
            "num_steps": 7,
            "optimizer": {"learning_rate": 1e-5, "optimizer": "adam,eps=1e-5"},
            "kl": {
                "kl_control": {"kind": "adaptive", "target": 6.0, "unit": "response"}
            },
            "start": {"lora": {"rank": 16}},
            "reference": {"lifecycle": {"kl_every": 2}},
        }
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_sets_any_part_of_the_tree_and_a_flag_wins(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name])
    config = parse("--config", path)
    assert config.num_steps == 7
    assert config.optimizer.learning_rate == 1e-5
    assert config.optimizer.optimizer == Adam(eps=1e-5)
    assert config.kl.kl_control == Adaptive(target=6.0, unit="response")
    assert config.start.lora == LoRA(rank=16)
    assert config.reference.lifecycle == Lifecycle(kl_every=2)
    assert config.batch == parse().batch  # the others have their defaults
    won = parse("--config", path, "--num-steps=9", "--lora=8", "--kl-control=fixed")
    assert (won.num_steps, won.start.lora, won.kl.kl_control) == (
        *(9, LoRA(rank=8)),
        Fixed(),
    )
    assert won.optimizer == config.optimizer


@pytest.mark.parametrize("module", [ppo, distill])
def test_a_config_is_read_as_it_was_recorded(module, tmp_path):
    config = (
        parse(
            *("--lora=16,alpha=8", "--kl-control=linear,end=0.5", "--reference=other"),
            *("--references", "a=b,weight=2", "--optimizer=adamw,weight_decay=0.1"),
            *("--texts", "code=c", "--packing=None", "--sampler=here,dtype=float32"),
            "--surrogate=sapo,temperature_neg=1.2",
            module=module,
        )
        if module is ppo
        else parse("--reference=t", "--lora=4", module=module)
    )
    fields = json.loads(json.dumps(run_config.to_json(config)))
    source = tmp_path / "config.json"
    assert reread.config(module.Config, fields, source=source) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            'surrogate = "clip,range=1"',
            "method.surrogate: 'clip,range=1': expected clip_range, clip_range_high, "
            "dual_clip, ratio_level before an equals sign, got range",
        ),
        (
            'surrogate = { kind = "clip", range = 1.0 }',
            "method.surrogate: expected clip_range, clip_range_high, dual_clip, "
            "ratio_level with clip, got range",
        ),
        (
            'surrogate = { kind = "clip", clip_range = -1.0 }',
            "method.surrogate: clip_range: expected a finite number above 0, got -1.0",
        ),
        (
            'sampler_correction = "token_mask"',
            "method.sampler_correction: expected one of ratio, recompute, truncate, "
            "mask, reject, None, got 'token_mask'",
        ),
        (
            'sampler_correction = { kind = "mask" }',
            "method.sampler_correction: expected cap with mask, got none",
        ),
        (
            'sampler_correction = { kind = "mask", floor = "x" }',
            'method.sampler_correction: floor: expected a number or None, got "x"; '
            "expected cap with mask, got none",
        ),
        (
            'sampler_correction = { kind = "ratio", cap = 2 }',
            "method.sampler_correction: expected no option with ratio, got cap",
        ),
        (
            'surrogate = { kind = "clip", clip_range = "x", dual_clip = [] }',
            'method.surrogate: clip_range: expected a number, got "x"; dual_clip: '
            "expected a number or None, got []\n",
        ),
        (
            "fixed_length = true",
            "method.fixed_length: 'true': expected truncate_after to be a whole number",
        ),
        (
            "clip_range = 0.1",
            "method.clip_range: unknown; it is --surrogate clip,clip_range=VALUE now",
        ),
        (
            "sampler_correction = []",
            "method.sampler_correction: expected a text ratio|recompute|truncate|mask|"
            "reject[,KEY=VALUE...], got []",
        ),
        (
            "penalty = 1",
            "method.penalty: expected an object with value_estimator, ",
        ),
        ("colour = 1", "method.colour: unknown\n"),
        ('balance_coef = "x"', 'method.balance_coef: expected a number, got "x"\n'),
        ("off_policy_mask = []", "method.off_policy_mask: expected a number or None, "),
        ("[start]\nlora = { rank = 0 }", "start.lora: rank: expected a finite number "),
        (
            "[placement]\nreference = 'hosts'",
            "placement.reference: place: expected policy, AXIS=SIZE,..., last, ",
        ),
    ],
)
def test_a_choice_of_a_file_that_is_none_names_what_there_is(line, message, tmp_path):
    path = tmp_path / "options.toml"
    path.write_text(f"[method]\n{line}\n")
    with pytest.raises(InputError) as error:
        parse("--config", path)
    assert f"{path} does not fit the options of this command:\n  {message}" in str(
        error.value
    )


def test_an_option_outside_its_group_is_reported_with_the_group(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("model = 'm'\nlearning-rate = 1\nlora = 4\ncolour = 1\n")
    with pytest.raises(InputError) as error:
        parse("--config", path)
    assert str(error.value).splitlines()[1:-1] == [
        "  colour: unknown",
        "  learning-rate: unknown; it is optimizer.learning_rate",
        "  lora: unknown; it is start.lora",
        "  model: unknown; it is start.model",
    ]


def test_a_field_of_a_group_that_is_a_key_names_its_choice(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("[reference.lifecycle]\nevery = 2\n")
    with pytest.raises(InputError, match=r"it is --lifecycle\.move reset,every=VALUE"):
        parse("--config", path)


def test_a_number_of_a_file_is_the_choice_that_begins_with_it(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("[method]\nfixed_length = 3\n[start]\nlora = 16\n")
    config = parse("--config", path)
    assert config.method.fixed_length == FixedLength(truncate_after=3)
    assert config.start.lora == LoRA(rank=16)


@pytest.mark.parametrize(
    ("module", "option"),
    [(online_dpo, "--clip-range"), (nash_md, "--truncate-after")],
)
def test_a_key_of_a_choice_that_a_command_lacks_is_no_option_of_it(module, option):
    with pytest.raises(InputError, match=f"^expected options of .*, got '{option}=1'"):
        parse(f"{option}=1", module=module)


@pytest.mark.parametrize(
    ("option", "written"),
    [
        ("--lora.rank", "--lora RANK"),
        ("--lora.alpha", "--lora RANK,alpha=VALUE"),
        ("--clip-range", "--surrogate clip,clip_range=VALUE"),
        ("--power-pos", "--surrogate vespo,power_pos=VALUE"),
        ("--kl-control.target", "--kl-control adaptive,target=VALUE,unit=VALUE"),
        ("--sampler-cache", "--sampler here,cache=VALUE"),
        ("--sampler-model", "--sampler ADDRESS,model=VALUE"),
        ("--max-turns", "--environment NAME,max_turns=VALUE"),
        ("--packing-width", "--packing auto,width=VALUE"),
        ("--sampler-correction.floor", "--sampler-correction mask,cap=VALUE,floor="),
        ("--lifecycle.every", "--lifecycle.move reset,every=VALUE"),
        ("--weight-decay", "--optimizer adamw,weight_decay=VALUE"),
        ("--adam", "--optimizer adam"),
        ("--data", "--prompts"),
        ("--teacher", "--reference"),
    ],
)
def test_a_key_or_a_kind_that_is_given_as_an_option_is_written_out(option, written):
    with pytest.raises(InputError) as error:
        parse(f"{option}=1")
    expected = f"expected an option of this command, got {option}; write {written}"
    assert expected in str(error.value)


def old_options():
    """[(old, new)] of the changelog, without new values of options that still exist."""
    text = CHANGELOG.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[\w.-]+)` \| `(--[\w.-]+)[^|]*` \|$", text, re.M)
    assert len(rows) > 50
    return rows


@pytest.mark.parametrize(("old", "new"), old_options())
def test_an_option_of_an_earlier_version_is_answered_with_its_successor(old, new):
    with pytest.raises(InputError) as error:
        parse(f"{old}=1", module=ppo)
    got, _, written = str(error.value).partition("; write ")
    assert got == f"expected an option of this command, got {old}"
    assert written.split()[0] == new


@pytest.mark.parametrize("part", tiers.one_in(4, range(4)))
def test_what_is_written_in_place_of_a_key_has_the_form_of_its_choice(part):
    """With a number for each value, of which a kind may refuse only the value."""

    def refusal(written):
        option, _, text = written.partition(" ")
        try:
            parse(f"{option}={text.replace('VALUE', '1')}", module=ppo)
        except InputError as error:
            return str(error)
        return ""

    found = commands.successors(ppo.Config)
    refusals = [refusal(written) for written in sorted({*found.values()})[part::4]]
    wrong = ("before an equals sign", "is not an option", "expected options of")
    assert not [why for why in refusals if any(words in why for words in wrong)]
    assert refusals.count("") > 5
