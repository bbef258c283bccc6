"""Command lines of trainers: the options of --help, and old names of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.runs import command_line
from rlhf_jax.train.config.config import PolicyGradientConfig

if TYPE_CHECKING:
    from rlhf_jax.train.config.supervised import SupervisedConfig

RENAMED = {
    "--data": "--prompts",
    "--question-field": "--prompt-field",
    "--policy-learning-rate": "--learning-rate",
    "--critic-learning-rate": "--critic.learning-rate (rlhf-jax ppo)",
    "--critic-from": "--critic.start (rlhf-jax ppo)",
    "--no-measure-kl": "--reference none",
    "--teacher": "--reference",
    "--teacher-storage.dtype": "--reference-storage.dtype",
    "--teacher-storage.embeddings": "--reference-storage.embeddings",
    "--placement.teacher": "--placement.reference",
    "--lora.rank": "--lora RANK",
    "--lora.alpha": "--lora RANK,alpha=A",
    "--lora.modules": "--lora RANK,modules=A+B",
    "--adam": "--optimizer adam or tf_adam",
    "--adam-mu-dtype": "--optimizer adam,mu_dtype=bfloat16",
    "--kl-control.kind": "--kl-control KIND,target=T",
    "--kl-control.target": "--kl-control adaptive,target=T",
    "--kl-control.unit": "--kl-control KIND,unit=response or token",
    "--kl-control.end": "--kl-control linear,end=E",
    "--kl-control.horizon": "--kl-control adaptive,horizon=N",
    "--clip-range": "--surrogate clip,clip_range=R",
    "--clip-range-high": "--surrogate clip,clip_range_high=R",
    "--dual-clip": "--surrogate clip,dual_clip=C",
    "--ratio-level": "--surrogate KIND,ratio_level=LEVEL",
    "--sapo-temperature-pos": "--surrogate sapo,temperature_pos=T",
    "--sapo-temperature-neg": "--surrogate sapo,temperature_neg=T",
    "--recompute-logprobs": "--sampler-correction recompute",
    "--sampler-weight-cap": "--sampler-correction truncate,cap=CAP",
    "--sampler-weight-floor": "--sampler-correction mask,cap=CAP,floor=FLOOR",
    "--staleness-weight-cap": "--sampler-correction truncate,cap=CAP or ratio",
    "--truncate-after": "--fixed-length AFTER",
    "--truncate-reward-only": "--fixed-length AFTER,reward_only=true",
    "--sampler-mesh": "--placement.sampler",
    "--lifecycle.reset-every": "--lifecycle.move reset,every=N",
    "--lifecycle.mix-every": "--lifecycle.move mix,every=N,rate=R",
    "--lifecycle.mix-rate": "--lifecycle.move mix,every=N,rate=R",
    "--reward-combine": "--reward-model A+B,combine=minimum",
    "--reward-std-coef": "--reward-model A+B,combine=mean_minus_std,std_coef=C",
    "--answer-field": "--verifier NAME,answer_field=FIELD",
    "--unmarked": "--verifier gsm8k,unmarked=last_number",
    "--sampler-storage.dtype": "--sampler here,dtype=D",
    "--sampler-storage.embeddings": "--sampler here,dtype=int8,embeddings=D",
    "--sampler-cache": "--sampler here,cache=int8",
    "--sampler-cache-pages": "--sampler here,cache_pages=N",
    "--sampler-page-size": "--sampler here,page_size=N",
    "--prefill-chunk": "--sampler here,prefill_chunk=N",
    "--sampler-model": "--sampler http://HOST:PORT,model=NAME",
    "--sampler-weights": "--sampler process,weights=FOLDER",
    "--sampler-timeout": "--sampler process,timeout=SECONDS",
    "--sampler-check-tolerance": "--sampler http://HOST:PORT,check_tolerance=T",
    "--max-turns": "--environment NAME,max_turns=N",
    "--max-turn-tokens": "--environment NAME,max_turn_tokens=N",
    "--observation-chunk": "--environment NAME,observation_chunk=N",
    "--episodes-timeout": "--environment NAME,seconds=S",
    "--packing-width": "--packing auto,width=N",
    "--max-tokens-per-device": "--packing auto,max_tokens_per_device=N",
    "--out-of-domain": "--texts NAME=SOURCE",
    "--eval-rows": "--held-out-rows or --text-rows",
    "--alarms.held-out-perplexity": "--alarms.text-perplexity",
    "--alarms.out-of-domain-perplexity": "--alarms.text-perplexity",
}
"""{option of an earlier version or another program: what to write instead}."""


OF_SUPERVISED = {
    **{name: new for name, new in RENAMED.items() if name.startswith("--lora.")},
    "--prompts": "--data",
    "--warmup": "--schedule cosine,warmup=SHARE",
    "--weight-decay": "--optimizer adamw,weight_decay=W",
    "--reference-free": "--reference none",
    "--num-samples": "--normalise samples,num_samples=N",
    "--max-new-tokens": "--normalise samples,max_new_tokens=N",
    "--temperature": "--normalise samples,temperature=T",
    "--demonstrations": "--normalise demonstrations,source=FILE",
}
"""As `RENAMED`, for supervised commands."""


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
        renamed=RENAMED,
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
        renamed=OF_SUPERVISED,
        prog=f"rlhf-jax {config_class.name}",
        argv=argv,
    )
