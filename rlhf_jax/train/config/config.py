"""The config of every policy gradient: one tree, in which methods differ by `method`.

    start  data  rewards  reference  kl  batch  sampler  method  optimizer  watch
    placement, and beside them the options of the run: out, seed, num_steps, ...

On the command line groups have no prefix, but for `placement.`, `lifecycle.` and
`critic.`. In a file each is a table: [kl] kl_coef = 0.1.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, Self

import optax
import tyro
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.devices.placement import WITH_POLICY, Place, RolloutPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.models import KL, Reference, Start
from rlhf_jax.train.config.optimizer import Critic, Optimizer
from rlhf_jax.train.config.prompts import Batch, Prompts
from rlhf_jax.train.config.rewards import Environment, Reward, Rewards, Verifier
from rlhf_jax.train.config.sampler import Sampling
from rlhf_jax.train.config.watch import Watch

AutoUpdate = Literal["mesh", "remat", "micro-batch"]
AutoChoice = Literal[AutoUpdate, "cache"]
FLAT = tyro.conf.arg(name="")  # of a group whose options have no prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(RunConfig):
    """What every policy gradient is asked; each method adds its recipe."""

    start: Annotated[Start, FLAT]
    """The model that is trained."""
    data: Annotated[Prompts, FLAT]
    """The prompts."""
    rewards: Annotated[Rewards, FLAT] = Rewards()
    """What is maximised."""
    reference: Annotated[Reference, FLAT] = Reference()
    """The frozen models of the KL."""
    kl: Annotated[KL, FLAT] = KL()
    """The KL coefficient."""
    batch: Annotated[Batch, FLAT] = Batch()
    """The batch of an iteration."""
    sampler: Annotated[Sampling, FLAT] = Sampling()
    """How it is drawn."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer()
    """How the policy follows its gradient."""
    watch: Annotated[Watch, FLAT] = Watch()
    """What is measured and not trained on."""
    placement: RolloutPlacement = RolloutPlacement()
    """Where each role is: devices, mesh and memory."""
    num_steps: int = 200
    """Iterations: a batch of responses, and the updates on it."""
    stop_timeout: float = 20.0
    """Seconds that sampling, rewards and judge may still take after SIGTERM or Ctrl-C.
    Then the state from before this step is saved, and the run ends."""
    auto: tuple[AutoChoice, ...] | None = None
    """What an estimate from model, devices and lengths chooses, and prints: mesh of the
    policy, remat, micro-batch, and rows of the KV cache (cache); --auto alone chooses
    all of them. Options that are not at their default stay."""
    check_memory: bool = True
    """Whether a run that cannot fit is refused before weights are read."""

    name: ClassVar[str]
    """Of the method: its command, its stage and its snapshots."""
    makes: ClassVar[type[PolicyGradient]]
    """The algorithm of the recipe, which has its fields."""
    default_kl_coef: ClassVar[float] = 0.05
    needs_reward: ClassVar[bool] = True
    """Whether there is nothing to learn from without a reward."""
    reads_hidden_states: ClassVar[bool] = False
    """Whether the loss reads hidden states of the reference, through its head."""
    mixes_reference: ClassVar[bool] = False
    """Whether responses are sampled from a mixture with the reference."""

    method: Annotated[PolicyRecipe, FLAT]
    """Coefficients and choices of the method."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(num_steps=self.num_steps, stop_timeout=self.stop_timeout)
        if not self.sources and self.needs_reward:
            raise InputError(
                "expected a reward, got none; give one of --reward-model, --reward, "
                "--verifier, --rewards and --environment"
            )
        self._check_needs()
        # As `PolicyGradient` checks them, but before a model is loaded.
        fixed = self.method.fixed_length
        checks.within(
            below=self.batch.max_new_tokens,
            advice="no longer response is drawn; lower it, or raise --max-new-tokens",
            **{
                "truncate_after of --fixed-length": fixed and fixed.truncate_after,
                "--scores.overlong-after": self.method.scores.overlong_after,
            },
        )
        checks.within(
            most=max(0, self.num_steps - 1),
            advice="no policy is older than the first of --num-steps; lower it",
            **{"--max-staleness": self.sampler.max_staleness},
        )
        self.kl.kl_control.controller(
            self.kl_coef, num_steps=self.num_steps
        )  # or raises
        capabilities.check(self)

    def _check_needs(self) -> None:
        """Raises InputError for an option without another one that it needs."""
        environment = self.sampler.environment is not None
        own = {
            f"--rewards {reward}": isinstance(reward.source, Environment)
            for reward in self.sources
        }
        capabilities.need(own, "--environment", has=environment)
        self.rewards.refuse_unread(
            has_pool=environment
            or any(isinstance(reward.source, Verifier) for reward in self.sources)
        )
        ptx, coef = self.data.ptx, self.method.ptx_coef
        capabilities.need({"--ptx": ptx is not None}, "--ptx-coef", has=coef != 0)
        capabilities.need({"--ptx-coef": coef != 0}, "--ptx", has=ptx is not None)
        pages = getattr(self.sampler.sampler, "cache_pages", None)
        capabilities.need(
            {"cache_pages of --sampler": pages is not None},
            "--continuous-batching",
            has=self.method.continuous_batching is not None,
        )

    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return self.makes(**vars(self.recipe), **shapes)

    @property
    def teacher_field(self) -> str | None:
        """Field of the rows that a teacher reads; None is the prompt."""
        return None

    @property
    def success_score(self) -> float | None:
        """Score of responses that a teacher reads as demonstrations; None: of none."""
        return None

    @property
    def compute_dtype(self) -> str:
        """What models compute in, --dtype."""
        return self.start.dtype

    @property
    def critic(self) -> Critic | None:
        """The options of the critic; None of a method without one."""
        return None

    @property
    def critic_place(self) -> Place:
        """Where the critic is."""
        return WITH_POLICY

    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """The optimizers of the trained models, as `algorithm` takes them."""
        return {"policy_optimizer": self.optimizer.make(self.num_steps * self.updates)}

    @property
    def rows_per_prompt(self) -> int:
        """Responses to each prompt of a batch."""
        return 1

    @property
    def trained_share(self) -> float:
        """Share of an iteration's responses that the update reads."""
        return 1.0

    @property
    def recipe(self) -> PolicyRecipe:
        """The recipe as the run uses it, corrected for a stale sampler."""
        return self.sampler.corrected(self.method)

    @property
    def sources(self) -> tuple[Reward, ...]:
        """Every reward of the run."""
        return self.rewards.sources(environment=self.sampler.environment is not None)

    @property
    def kl_coef(self) -> float:
        """β at the start, reward units per nat."""
        if self.kl.kl_coef is not None:
            return self.kl.kl_coef
        placed = self.method.penalty.placement is not None or self.name == "distill"
        return self.default_kl_coef if self.reference.has_reference and placed else 0.0

    @property
    def staleness(self) -> int:
        """k, the iterations that the sampler is behind."""
        if self.sampler.max_staleness is None:
            return int(self.placement.samples_ahead)
        return self.sampler.max_staleness

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return self.method.num_epochs * self.method.num_minibatches

    @property
    def sampler_dtype(self) -> str:
        """What the policy is stored in for a sampler that it is handed over to.

        Samples in bfloat16 are those of matrices that were cast before: fewer bytes
        travel, and are held.
        """
        stored = getattr(self.sampler.sampler, "dtype", "float32")
        handed_over = self.placement.sampler.apart or self.staleness > 0
        plain = self.start.lora is None and self.sampler.environment is None
        if stored == "float32" and handed_over and plain:
            return self.start.dtype
        return stored

    @property
    def sampler_tolerance(self) -> float:
        """What sampling adds to the distance to the trainer, nats per token."""
        return self.sampler.sampler.tolerance(self.start.dtype)

    @property
    def storage_tolerance(self) -> float:
        """What storing the reference adds to its distance to the policy at the start.

        Nats per token; under LoRA the two are rounded alike.
        """
        dtype = self.reference.reference_storage.dtype
        if self.start.lora is not None or dtype == "float32":
            return 0.0
        return self_check.TOLERANCE[dtype]

    def sampled_at(self, place: Place) -> Self:
        """The run with its sampler at a place."""
        placement = dataclasses.replace(self.placement, sampler=place)
        return dataclasses.replace(self, placement=placement)

    def policy_mesh(self) -> Mesh:
        """The policy's mesh, which leaves the devices of every other role free."""
        further = {ref.option: ref.place for ref in self.reference.references}
        return self.placement.policy_mesh(further=further)
