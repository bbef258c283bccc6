"""The options of `rlhf-jax ppo`, and what does not fit together."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from rlhf_jax.algorithms import optimizers
from rlhf_jax.algorithms.ppo.recipe import Recipe
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.pretrained import Adapters
from rlhf_jax.devices.placement import WITH_POLICY, Placement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import CONSTANT, Control
from rlhf_jax.functional.kl.penalty import IN_REWARD
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.lifecycle import Lifecycle
from rlhf_jax.train.environment.options import EnvironmentConfig
from rlhf_jax.train.packed_rollouts import PackedConfig
from rlhf_jax.train.ppo.watched import WatchedConfig
from rlhf_jax.train.references import ReferencesConfig, refuse_unused
from rlhf_jax.train.reward_options import RewardModelConfig
from rlhf_jax.train.rollouts.options import StalenessConfig
from rlhf_jax.train.sampling.options import OF_DECODER

RECIPE = Recipe(num_minibatches=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(
    RewardModelConfig,
    ReferencesConfig,
    PackedConfig,
    StalenessConfig,
    EnvironmentConfig,
    WatchedConfig,
):
    """The options of `rlhf-jax ppo`."""

    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    prompts: str
    """Prompts: JSONL, .txt, or hf:NAME:SPLIT."""
    reward: str | None = None
    """Reward as a Python function of texts, module:function; or give --reward-model, or
    --environment, whose rewards are the score."""
    reference: str | None = None
    """Checkpoint that the KL is measured to, of any shape; None is --model at first."""
    prompt_field: str = "prompt"
    """Field of --prompts with the prompts."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts that leave no room for a response: an error, or drop
    them."""
    buckets: tuple[int, ...] | None = None
    """Widths to which a batch of prompts may be padded, tokens; None is the longest
    prompt."""
    num_steps: int = 200
    """Iterations, each a batch of responses and the updates on it."""
    batch_size: int = 64
    """Responses per iteration."""
    max_new_tokens: int = 48
    """Longest response, tokens."""
    kl_coef: float = 0.05
    """KL coefficient β, reward units per nat; at 0 the KL is still measured."""
    kl_control: Control = CONSTANT
    """How the KL coefficient β changes during the run."""
    ppo: Annotated[Recipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of PPO, options without a prefix."""
    ptx: str | None = None
    """Text or demonstrations whose loss is mixed in, weighted by --ptx-coef."""
    ptx_batch_size: int = 16
    """Rows of --ptx per iteration."""
    ptx_max_length: int | None = None
    """Longest row of --ptx, tokens; None is the model's context."""
    policy_learning_rate: float = 3e-6
    """Learning rate of the policy at the start; it falls to 0 linearly."""
    critic_learning_rate: float = 1e-5
    """Learning rate of the critic at the start; it falls to 0 linearly."""
    max_grad_norm: float | None = 1.0
    """Norm to which larger gradients are scaled down, policy and critic apart; None
    disables it."""
    adam: optimizers.Style = "standard"
    """Form of Adam; "tf" adds eps outside the bias correction (OAI)."""
    adam_mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of Adam's first moment; bfloat16 saves 2 bytes per parameter."""
    critic_from: str = "policy"
    """Model whose trunk the critic starts with: policy, reward_model, or a checkpoint
    of any shape; values start at 0, or as the reward model's scores."""
    reference_storage: Storage = frozen_models.COPY
    """Dtype in which the reference is stored; with LoRA it is the base."""
    reward_storage: Storage = frozen_models.COPY
    """Dtype in which the reward model is stored."""
    lifecycle: Lifecycle = lifecycle.FROZEN
    """How the reference moves during the run."""
    measure_kl: bool = True
    """Whether the KL is measured; off, with --kl-coef 0, no reference is loaded or
    run."""
    lora: Adapters = pretrained.ALL_PARAMETERS
    """Adapters that are trained instead of all parameters."""
    placement: Placement = dataclasses.field(default_factory=Placement)
    """Where each role is: devices, mesh and memory."""
    check_memory: bool = True
    """Whether a run that cannot fit is refused before weights are read."""
    stop_timeout: float = 20.0
    """Seconds that sampling, reward and judge may still take after SIGTERM or Ctrl-C.
    Then the state from before this step is saved, and the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_score()
        self.check_reward_models()
        if len(self.reward_models) > 1 and self.critic_from == "reward_model":
            raise InputError(
                f"--critic-from reward_model: expected one --reward-model to start "
                f"from, got {len(self.reward_models)}; start the critic from the policy"
            )
        self.check_watched()
        if self.critic_from == "reward_model" and self.reward_model is None:
            raise InputError(
                "--critic-from reward_model: expected a --reward-model to start from, "
                f"got {'a Python reward' if self.reward else 'an environment'}; start "
                f"the critic from the policy"
            )
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            num_steps=self.num_steps,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            stop_timeout=self.stop_timeout,
        )
        checks.non_negative(kl_coef=self.kl_coef)
        self.check_packing(
            max_new_tokens=self.max_new_tokens, mesh=self.placement.policy
        )
        self.check_sampler(
            self.ppo,
            max_new_tokens=self.max_new_tokens,
            placement=self.placement,
            adapters=self.lora.lora is not None,
        )
        if self.max_grad_norm is not None:
            checks.positive(max_grad_norm=self.max_grad_norm)
        self.kl_control.controller(self.kl_coef, num_steps=self.num_steps)  # or raises
        if not self.measure_kl and (
            self.kl_coef
            or self.kl_control != CONSTANT
            or self.reference is not None
            or self.lifecycle != lifecycle.FROZEN
            or self.ppo.penalty != IN_REWARD
        ):
            raise InputError(
                "--no-measure-kl: expected --kl-coef 0 and neither --kl-control, "
                "--reference, --penalty nor a lifecycle, as there is no reference "
                "then; leave one or the other out"
            )
        if self.ppo.penalty.placement is None and (
            self.kl_coef or self.kl_control != CONSTANT
        ):
            raise InputError(
                f"--penalty.placement None: expected --kl-coef 0 and no --kl-control, "
                f"as the KL is measured then and acts nowhere, got {self.kl_coef:g} "
                f"and {self.kl_control.kind}; place the penalty, or leave them out"
            )
        if self.ppo.critic_warmup >= self.num_steps:
            raise InputError(
                f"--critic-warmup: expected less than the {self.num_steps} of "
                f"--num-steps, got {self.ppo.critic_warmup}; the policy would never "
                f"learn"
            )
        if (self.ptx is None) != (self.ppo.ptx_coef == 0):
            raise InputError(
                f"expected --ptx and --ptx-coef together, got {self.ptx} and "
                f"{self.ppo.ptx_coef:g}; give both, or neither"
            )
        if self.ppo.shared_trunk and self.critic_from != "policy":
            raise InputError(
                f"--critic-from: expected policy with --shared-trunk, where the critic "
                f"is a head on the policy, got {self.critic_from}; leave one of them "
                f"out"
            )
        place = self.placement.reference
        self.check_staleness(self.ppo, num_steps=self.num_steps)
        if self.staleness and self.buckets:
            raise InputError(
                "--buckets: expected none where the sampler is behind "
                "(--max-staleness, or --placement.sampler last), as a snapshot has "
                "the next responses, all of one width; leave one of them out"
            )
        if self.staleness and self.num_alternatives:
            raise InputError(
                f"--num-alternatives {self.num_alternatives}: expected 0 where the "
                f"sampler is behind (--max-staleness, or --placement.sampler last), as "
                f"the responses are then of an older policy than the one that would be "
                f"asked; leave one of them out"
            )
        if self.placement.critic.apart:
            try:
                self.ppo.refuse_critic_apart()
            except InputError as error:
                raise InputError(f"--placement.critic: {error}") from None
        if self.ppo.penalty.needs_logits and place.apart:
            raise InputError(
                f"--placement.reference: expected policy for exact KL, which needs the "
                f"hidden states of both in one program, got {place}; leave it out, or "
                f"choose k1, k2 or k3"
            )
        self.check_references(
            self.ppo.penalty, first=None if self.measure_kl else "--no-measure-kl"
        )
        if not self.measure_kl and self.lora.lora is None:
            refuse_unused("reference", self.reference_storage, place)
        if (self.sample_reference or self.num_alternatives) and (
            self.reference is not None
            or not self.measure_kl
            or self.lora.lora is not None
            or place != WITH_POLICY
        ):
            raise InputError(
                "--sample-reference, --num-alternatives: expected the policy as it "
                "starts for the reference, on the policy's devices and without "
                "--lora.rank, as it runs in the policy's own program; leave one or "
                "the other out"
            )
        if self.reward_model is None:
            refuse_unused("reward", self.reward_storage, self.placement.reward)
        if self.lora.lora is not None:
            self.lifecycle.refuse_mixing_adapters()
            if self.ppo.penalty.needs_logits and self.lifecycle.moves:
                raise InputError(
                    "--penalty: expected k1, k2 or k3 with --lora.rank and a lifecycle "
                    "that moves the reference, got exact KL; leave one of them out"
                )
            if place.apart:
                raise InputError(
                    f"--placement.reference: expected policy with --lora.rank, where "
                    f"the reference is the policy's base and runs with it, got "
                    f"{place}; leave one of them out"
                )
            if self.reference is not None and self.lifecycle.moves:
                raise InputError(
                    "--reference: expected none with --lora.rank and a lifecycle, as a "
                    f"reset makes the reference adapters of the base, got "
                    f"{self.reference}; leave one of them out"
                )
            if self.critic_from != "policy":
                raise InputError(
                    f"--critic-from: expected policy with --lora.rank, got "
                    f"{self.critic_from}; the critic's adapters are over the policy's "
                    f"base"
                )

    def _check_score(self) -> None:
        """Raises InputError unless one thing scores, with the options that it reads."""
        given = {"--reward": self.reward, "--reward-model": self.reward_model}
        given = {name: value for name, value in given.items() if value is not None}
        if self.environment is None and len(given) != 1:
            got = "both" if given else "neither"
            raise InputError(f"expected one of --reward and --reward-model, got {got}")
        for name, value in given.items():
            if self.environment is not None:
                raise InputError(
                    f"{name} {value}: expected none with --environment "
                    f"{self.environment}, whose own rewards are the score of an "
                    f"episode; leave one of them out"
                )
        names = ("prompt_field", "buckets", "sample_reference", "num_alternatives")
        replaced = self.changed(*names, *OF_DECODER)
        if self.placement.sampler.devices == "last":
            replaced["--placement.sampler"] = self.placement.sampler
        if self.ppo.fixed_length:
            replaced["--fixed-length"] = True
        self.check_environment(
            max_new_tokens=self.max_new_tokens, replaced=replaced, alone=True
        )

    def staleness_by_default(self) -> int:
        """k where --max-staleness is not given: 1 for a sampler of its own devices."""
        return int(self.placement.samples_ahead)


SCREEN = {
    "Start": ("model", "reference"),
    "Data": ("prompts", "max_new_tokens"),
    "Reward": ("reward", "reward_model", "kl_coef"),
    "Training": (
        *("num_steps", "batch_size", "policy_learning_rate", "ppo.num_minibatches"),
        *("ppo.micro_batch_size", "lora.rank", "dtype"),
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""

ELSEWHERE: dict[str, str] = dict.fromkeys(
    (
        *("--sampler", "--sampler-model", "--sampler-weights", "--sampler-timeout"),
        "--sampler-check-tolerance",
    ),
    "rlhf-jax grpo and rlhf-jax reinforce, the trainers that take a sampler outside "
    "of their programs; leave it out, or use one of them",
)
"""Options of other trainers, and what the message about them says."""
