"""The covering array of all pairs of what a policy gradient takes, as command lines.

    PARAMETERS   the independent choices: {parameter: {choice: options}}
    rows()       few command lines, which contain every pair of choices that
                 `capabilities.TABLE` allows

Only the table says which choices exclude each other: a row may not have two excluded
features.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
import json
import shlex
from unittest import mock

import covertable
import jax
import toy_files
from places import ROOT

from rlhf_jax import hf, rewards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.capabilities import CHOICES, TABLE
from rlhf_jax.train.main import TRAINERS

MODEL = dataclasses.replace(toy_files.MODEL, num_layers=2, max_positions=32)
PROMPTS = ("the cat", "a dog was", "it ran", "we sat on")
TEXTS = ("sat on a dog .", "was good and we ran .", "was so bad .", "ran .")
ABSENT = "-"
RECORDED = ROOT / "tests/fixtures/pairs.jsonl"
METHOD = "method"
BASICS = (
    "--model model --prompts prompts.jsonl --batch-size 16 --max-new-tokens 4 "
    "--num-steps 2 --learning-rate 3e-3 --sample-every 1 --no-progress"
)
SERVER = "http://localhost:1/v1"  # until there is one
PARAMETERS: dict[str, dict[str, str]] = {
    METHOD: {
        "ppo": "ppo",
        "ppo, critic of the reward model": "ppo --critic.start reward_model",
        "ppo, critic of another model": "ppo --critic.start other",
        "ppo, shared trunk": "ppo --shared-trunk",
        "ppo, critic apart": "ppo --placement.critic last:data=4",
        "grpo": "grpo --group-size 4",
        "reinforce": "reinforce",
        "online-dpo": "online-dpo --group-size 2",
        "nash-md": "nash-md",
        "distill": "distill --reference teacher",
    },
    "rewards": {
        "model": "--reward-model scorer",
        "ensemble": "--reward-model scorer+scorer_2,combine=minimum",
        "function": "--reward toy_pairs:score",
        "verifier": "--verifier toy_pairs:check --num-workers 1",
        "list": "--rewards distinct=function:toy_pairs:score,weight=0.5 "
        "right=verifier:toy_pairs:check kind=model:scorer short=length,weight=-0.01 "
        "--num-workers 1",
    },
    "reward models": {
        ABSENT: "",
        "int8": "--reward-storage.dtype int8",
        "apart": "--placement.reward last:data=4",
    },
    "environment": {
        ABSENT: "",
        "present": "--environment toy_pairs:Hall,max_turns=2,max_turn_tokens=3 "
        "--num-workers 1 --max-new-tokens 10",
    },
    "sampler": {
        ABSENT: "",
        "int8": "--sampler here,dtype=int8",
        "process": "--sampler process",
        "server": f"--sampler {SERVER}",
    },
    "staleness": {
        ABSENT: "",
        "stale": "--max-staleness 2 --num-steps 3",
        "devices of its own": "--placement.sampler last:data=4",
    },
    "redraws": {ABSENT: "", "present": "--max-redraws 2"},
    "decoder": {
        ABSENT: "",
        "continuous": "--continuous-batching 8",
        "fixed": "--fixed-length 0",
    },
    "prompts": {
        ABSENT: "",
        "buckets": "--buckets 4 8",
        "template": "--template 'so {prompt}'",
        "field": "--prompt-field question",
    },
    "adapters": {ABSENT: "", "present": "--lora 2"},
    "reference": {ABSENT: "", "other": "--reference other", "none": "--reference none"},
    "reference storage": {ABSENT: "", "int8": "--reference-storage.dtype int8"},
    "reference place": {
        ABSENT: "",
        "apart": "--placement.reference last:data=4",
        "cpu": "--placement.reference cpu",
        "pinned": "--placement.reference pinned_host",
    },
    "move": {
        ABSENT: "",
        "reset": "--lifecycle.move reset,every=1",
        "mix": "--lifecycle.move mix,every=1,rate=0.5",
    },
    "KL steps": {ABSENT: "", "few": "--lifecycle.kl-every 2"},
    "further references": {
        ABSENT: "",
        "present": "--references further=other,weight=0.5",
        "apart": "--references further=other,place=last:data=4",
    },
    "KL control": {
        ABSENT: "",
        "adaptive": "--kl-control adaptive,target=6,unit=response,horizon=64",
        "linear": "--kl-control linear,end=0.5",
        "pi": "--kl-control pi,target=6,unit=response",
        "lagrangian": "--kl-control lagrangian,target=6,unit=response,min_kl_coef=.001",
    },
    "penalty": {
        ABSENT: "",
        "exact": "--penalty.value-estimator exact",
        "loss": "--penalty.placement loss --penalty.grad-estimator k2",
        "unplaced": "--penalty.placement None --penalty.grad-estimator None "
        "--kl-coef 0",
    },
    "log-probs": {
        ABSENT: "",
        "recomputed": "--sampler-correction recompute",
        "corrected": "--sampler-correction truncate",
    },
    "guards": {
        ABSENT: "",
        "stop": "--stop-approxkl 10",
        "leave out": "--max-ratio-mean 10",
    },
    "optimizer": {
        ABSENT: "",
        "adamw": "--optimizer adamw,mu_dtype=bfloat16 --schedule cosine,warmup=0.5",
        "muon": "--optimizer muon",
    },
    "updates": {
        ABSENT: "",
        "several": "--num-epochs 2 --num-minibatches 2 --micro-batch-size 4",
    },
    "texts mixed in": {ABSENT: "", "present": "--ptx texts.jsonl --ptx-coef 0.5"},
    "packing": {ABSENT: "", "present": "--packing auto,max_tokens_per_device=64"},
    "mesh": {
        ABSENT: "",
        "sharded": "--placement.policy fsdp=FSDP,tensor=2",
        "context": "--placement.policy fsdp=FSDP,context=2",
    },
    "dtype": {ABSENT: "", "bfloat16": "--dtype bfloat16"},
    "saved": {ABSENT: "", "bfloat16": "--save-dtype bfloat16"},
    "held out": {
        ABSENT: "",
        "present": "--held-out held_out.jsonl --held-out-every 1 --held-out-samples 2",
    },
    "texts": {ABSENT: "", "present": "--texts code=texts.jsonl --eval-every 1"},
    "judge": {ABSENT: "", "present": "--judge toy_pairs:judge --judge-failure warn"},
    "samples": {ABSENT: "", "of the reference": "--sample-reference"},
    "alternatives": {ABSENT: "", "present": "--num-alternatives 3"},
    "alarms": {ABSENT: "", "present": "--alarms.stop kl --alarms.drift 1e-9"},
}
# What a method takes or not is its own recipe's business, with these.
OF_THE_RECIPE = ("decoder", "penalty", "log-probs", "guards", "updates")


def first(parameter):
    """The default choice of a parameter."""
    return next(iter(PARAMETERS[parameter]))


def words(row):
    """The command line of a row after `rlhf-jax`, without --out."""
    options = [PARAMETERS[name][row.get(name, first(name))] for name in PARAMETERS]
    method, *options = shlex.split(" ".join([*options[:1], BASICS, *options[1:]]))
    # The policy has the devices that no role takes.
    fsdp = 2 if any("last:" in word for word in options) else 4
    return [method, *(word.replace("FSDP", str(fsdp)) for word in options)]


@functools.cache
def parsed(line):
    """Parses a command line without checking the capability table."""
    name, *options = line
    with mock.patch.object(capabilities, "check", return_value=None):
        return command_line.parse(
            importlib.import_module(TRAINERS[name].module).Config,
            description="A test.",
            argv=["--out=x", *options],
        )


def config_of(row):
    """The config of some choices, combined from configs parsed for single choices.

    It skips the config's own checks; `test_pairs.py` parses every whole row.
    """
    config = _alone(METHOD, row.get(METHOD, first(METHOD)))
    for name, choice in row.items():
        if name != METHOD:
            config = _changed(config, _changes_of(name, choice))
    return config


@functools.cache
def _alone(name, choice):
    """The config of one choice alone."""
    return parsed(tuple(words({name: choice})))


@functools.cache
def _changes_of(name, choice):
    return _changes(_alone(METHOD, first(METHOD)), _alone(name, choice))


def _changes(before, after):
    """{field: its new value, or for a group of options its changes}."""
    changes = {}
    for field in dataclasses.fields(before):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(one) and type(one) is type(other):
            if inner := _changes(one, other):
                changes[field.name] = inner
        elif one != other:
            changes[field.name] = other
    return changes


def _changed(config, changes):
    names = {field.name for field in dataclasses.fields(config)}
    if unknown := changes.keys() - names:
        raise InputError(f"{type(config).__name__} has no {', '.join(unknown)}")
    config = copy.copy(config)
    for name, value in changes.items():
        if isinstance(value, dict):
            value = _changed(getattr(config, name), value)
        object.__setattr__(config, name, value)
    return config


def chosen(row):
    """The table's features that a row has."""
    config = config_of(row)
    return frozenset(
        name
        for name, choices in CHOICES.items()
        if capabilities.first(choices(config)) is not None
    )


@functools.cache
def violated(choices):
    """The table's excluded pairs among some (parameter, choice)."""
    features = chosen(dict(choices))
    return [pair for pair in TABLE if features.issuperset(pair)]


@functools.cache
def is_refused_alone(method, name, choice):
    """Whether a method's own recipe refuses a choice regardless of the others."""
    try:
        config = config_of({METHOD: method, name: choice})
        with mock.patch.object(capabilities, "check", return_value=None):
            config.method.__post_init__()
            config.__post_init__()
    except InputError:
        return True
    return False


def is_allowed(row):
    """Whether these choices alone can be combined.

    Methods and rewards that are not chosen yet may take any value.
    """
    return any(
        not any(is_refused_alone(method, *choice) for choice in row.items())
        and not violated(tuple(({METHOD: method, "rewards": reward} | row).items()))
        for method in _any(row, METHOD)
        for reward in _any(row, "rewards")
    )


def write_files(folder):
    """Writes the files that rows name: checkpoints, reward models, prompts, texts."""
    for seed, name in enumerate(("model", "other", "teacher")):
        toy_files.checkpoint(folder / name, model=MODEL, seed=seed)
    for seed, name in enumerate(("scorer", "scorer_2"), start=1):
        key, trunk = jax.random.key(seed), toy_files.params(MODEL, seed=seed + 2)
        scorer = rewards.init(key, trunk, model=MODEL)
        hf.save_reward(folder / name, MODEL, scorer, tokenizer=toy_files.tokenizer())
    rows = [{"prompt": text, "question": f"{text} ?"} for text in PROMPTS]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    toy_files.jsonl(folder / "held_out.jsonl", *rows[:3])
    pairs_of_texts = zip(PROMPTS, TEXTS, strict=True)
    texts = [{"prompt": prompt, "response": text} for prompt, text in pairs_of_texts]
    toy_files.jsonl(folder / "texts.jsonl", *texts)


def _any(row, name):
    return [row[name]] if name in row else list(PARAMETERS[name])


def pairs_of(row):
    """Every two choices of a row, as ((parameter, choice), (parameter, choice))."""
    return set(itertools.combinations(((name, row[name]) for name in PARAMETERS), 2))


def every_pair():
    """Every two choices of different parameters."""
    choices = [[(name, choice) for choice in PARAMETERS[name]] for name in PARAMETERS]
    return itertools.chain.from_iterable(
        itertools.product(*two) for two in itertools.combinations(choices, 2)
    )


def generate(presets):
    """Adds rows to `presets` until they contain every allowed pair; takes minutes.

    It uses covertable, which searches a row for each missing pair; allpairspy stops at
    the first row without a new pair, hundreds of pairs early.
    """

    def condition(row):
        if not is_allowed({name: row[name] for name in PARAMETERS if name in row}):
            return False
        return True if len(row) == len(PARAMETERS) else None  # it is not known yet

    condition = {"operator": "fn", "requires": [], "evaluate": condition}
    choices = {name: list(PARAMETERS[name]) for name in PARAMETERS}
    return covertable.make(choices, constraints=[condition], presets=presets)


def rows():
    """The recorded rows, with the choices that their lines omit as absent."""
    if not RECORDED.exists():
        return []
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    absent = {name: first(name) for name in PARAMETERS}
    return [absent | json.loads(line) for line in lines]


def record():
    """Writes the rows, sorted by the number of choices; keeps rows still allowed."""
    lines = [
        {name: row[name] for name in PARAMETERS if row[name] != ABSENT}
        for row in generate([row for row in rows() if is_allowed(row)])
    ]
    lines.sort(key=len)
    RECORDED.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    record()
