"""Command lines of trainers: the options of --help, and how to write others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.runs import choices, command_line
from rlhf_jax.train.config.config import PolicyGradientConfig

if TYPE_CHECKING:
    from rlhf_jax.train.config.supervised import SupervisedConfig

OTHERS = {
    "--data": "--prompts",
    "--prompts": "--data",
    "--reference-free": "--reference none",
    # Of version 0.1, where no key of an option has the name.
    "--adam-mu-dtype": "--optimizer adam,mu_dtype=VALUE",
    "--alarms.held-out-perplexity": "--alarms.text-perplexity",
    "--alarms.out-of-domain-perplexity": "--alarms.text-perplexity",
    "--critic-from": "--critic.start",
    "--critic-learning-rate": "--critic.learning-rate",
    "--episodes-timeout": "--environment NAME,seconds=VALUE",
    "--eval-rows": "--held-out-rows or --text-rows",
    "--kl-control.kind": "--kl-control KIND,target=VALUE",
    "--lifecycle.mix-every": "--lifecycle.move mix,every=VALUE,rate=VALUE",
    "--lifecycle.mix-rate": "--lifecycle.move mix,every=VALUE,rate=VALUE",
    "--lifecycle.reset-every": "--lifecycle.move reset,every=VALUE",
    "--no-measure-kl": "--reference none",
    "--out-of-domain": "--texts NAME=SOURCE",
    "--placement.teacher": "--placement.reference",
    "--policy-learning-rate": "--learning-rate",
    "--question-field": "--prompt-field",
    "--recompute-logprobs": "--sampler-correction recompute",
    "--reward-combine": "--reward-model A+B,combine=VALUE",
    "--reward-std-coef": "--reward-model A+B,combine=mean_minus_std,std_coef=VALUE",
    "--sampler-mesh": "--placement.sampler",
    "--sampler-storage.dtype": "--sampler here,dtype=VALUE",
    "--sampler-storage.embeddings": "--sampler here,dtype=int8,embeddings=VALUE",
    "--sampler-weight-cap": "--sampler-correction truncate,cap=VALUE",
    "--sampler-weight-floor": "--sampler-correction mask,cap=VALUE,floor=VALUE",
    "--sapo-temperature-neg": "--surrogate sapo,temperature_neg=VALUE",
    "--sapo-temperature-pos": "--surrogate sapo,temperature_pos=VALUE",
    "--staleness-weight-cap": "--sampler-correction truncate,cap=VALUE",
    "--teacher": "--reference",
    "--teacher-storage.dtype": "--reference-storage.dtype",
    "--teacher-storage.embeddings": "--reference-storage.embeddings",
    "--truncate-reward-only": "--fixed-length AFTER,reward_only=true",
}
"""{option of another command, program or version: what to write instead}."""


def successors(config_class: type[Any]) -> dict[str, str]:
    """Returns what to write in place of an option that is only a key or kind of one.

    {"--clip-range": "--surrogate clip,clip_range=VALUE", "--adam": "--optimizer adam"}

    A key may also follow its option, as in --lora.alpha or --sampler-cache.
    """
    found: dict[str, str] = {}
    for option, hint in choices.options(config_class):
        choice = choices.bare(hint)
        if not choices.is_union(choice):
            continue
        group = option[: option.rfind(".") + 1] or "--"
        for name, kind in choices.kinds_of(choice).items():
            for key in (None, *(field.name for field in dataclasses.fields(kind))):
                written = f"{option} {_example(kind, key, choice=choice)}"
                for before in (group, f"{option}.", f"{option}-"):
                    found.setdefault(before + (key or name).replace("_", "-"), written)
    return found | OTHERS


def _example(kind: Any, key: str | None, *, choice: Any) -> str:
    """A kind with a key and with the keys that it needs, as "adam,b1=VALUE"."""
    word = choices.metavar(choice).partition("[")[0]
    if len(choices.kinds_of(choice)) > 1:
        word = choices.name_of(kind)
    if getattr(kind, "OPEN", False):
        word = dataclasses.fields(kind)[0].name.upper()
    keys = dict.fromkeys(choices.missing(kind, {}) + ([] if key is None else [key]))
    given = [f"{name}=VALUE" for name in keys if name.upper() != word]
    return ",".join([word, *given])


def parse(
    module: Any,
    argv: Sequence[str],
    *,
    prog: str,
    screen: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Parses the options of a trainer's module; the arguments are those of `run`."""
    return command_line.parse(
        module.Config,
        description=None,
        presets=vars(module).get("PRESETS"),
        screen=screen,
        renamed=successors(module.Config),
        prog=prog,
        argv=argv,
    )


def run(
    config_class: type[PolicyGradientConfig],
    argv: Sequence[str] | None = None,
    *,
    description: str | None,
    first: Sequence[str] = (),
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """`rlhf-jax NAME`: runs a policy gradient from a command line.

    Args:
      first: options of the method to show in --help.
      presets: {name: {group: its value}}, for --preset.
    """

    def main(config: PolicyGradientConfig) -> None:
        from rlhf_jax.train import trainer  # not needed to parse a command line

        trainer.main(config)

    command_line.main(
        main,
        config_class,
        description=description,
        presets=presets,
        screen={
            "Start": ("start.model", "reference.reference", "start.lora"),
            "Data": ("data.prompts", "batch.max_new_tokens"),
            "Reward": (
                *("rewards.reward_model", "rewards.reward", "rewards.verifier"),
                *("rewards.rewards", "sampler.environment", "kl.kl_coef"),
            ),
            "Training": (
                *("num_steps", "batch.batch_size", *first),
                *("optimizer.learning_rate", "watch.held_out", "watch.judge"),
            ),
            "Run": ("out", "resume"),
        },
        renamed=successors(config_class),
        prog=f"rlhf-jax {config_class.name}",
        argv=argv,
    )


def supervised(
    main: Callable[[Any], None],
    config_class: type[SupervisedConfig],
    argv: Sequence[str] | None = None,
    *,
    description: str | None,
    first: Sequence[str],
    start: Sequence[str] = (),
    training: Sequence[str] = (),
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """`rlhf-jax NAME`: runs a supervised command from a command line.

    Args:
      main: runs the command with its config.
      first: options of the data to show in --help.
      start, training: further options to show in --help.
      presets: as in `run`.
    """
    command_line.main(
        main,
        config_class,
        description=description,
        presets=presets,
        screen={
            "Start": ("start.model", *start, "start.lora", "start.dtype"),
            "Data": ("data.data", "data.max_length", *first),
            "Training": (
                *("num_steps", "batch.batch_size", "optimizer.learning_rate"),
                *training,
            ),
            "Run": ("out", "resume"),
        },
        renamed=successors(config_class),
        prog=f"rlhf-jax {config_class.name}",
        argv=argv,
    )
