"""The config of every policy gradient: one tree, in which methods differ by `method`.

    start  data  rewards  reference  kl  batch  sampler  method  optimizer  watch
    placement, and the options of the run itself: out, seed, num_steps, ...

On the command line only `placement`, `critic` and groups inside other groups are
prefixes. In a file each group is a table: [kl] kl_coef = 0.1.
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
FLAT = tyro.conf.arg(name="")  # marks a group whose options have no prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(RunConfig):
    """The options of every policy gradient; each method adds its recipe."""

    start: Annotated[Start, FLAT]
    """The model that is trained."""
    data: Annotated[Prompts, FLAT]
    """The prompts."""
    rewards: Annotated[Rewards, FLAT] = Rewards()
    """The rewards that are maximised."""
    reference: Annotated[Reference, FLAT] = Reference()
    """The frozen models of the KL."""
    kl: Annotated[KL, FLAT] = KL()
    """The KL coefficient."""
    batch: Annotated[Batch, FLAT] = Batch()
    """The batch of an iteration."""
    sampler: Annotated[Sampling, FLAT] = Sampling()
    """How responses are drawn."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer()
    """How the policy is updated from its gradient."""
    watch: Annotated[Watch, FLAT] = Watch()
    """What is measured but not trained on."""
    placement: RolloutPlacement = RolloutPlacement()
    """Devices, mesh and memory of each role."""
    num_steps: int = 200
    """Number of iterations. Each draws a batch of responses and learns from it."""
    stop_timeout: float = 20.0
    """Seconds that sampling, rewards and judge may still take after SIGTERM or Ctrl-C.
    Then the state from before this step is saved, and the run ends."""
    auto: tuple[AutoChoice, ...] | None = None
    """Options to choose by an estimate from model, devices and lengths: mesh of the
    policy, remat, micro-batch, and rows of the KV cache (cache). --auto alone chooses
    all of them. Options that are not at their default are kept; None chooses none."""
    check_memory: bool = True
    """Whether a run that cannot fit into memory is refused before weights are read."""

    name: ClassVar[str]
    """Name of the method's command, stage and snapshots."""
    makes: ClassVar[type[PolicyGradient]]
    """The algorithm that the recipe configures; it has the recipe's fields."""
    default_kl_coef: ClassVar[float] = 0.05
    """β of a run with a reference and without --kl-coef, reward units per nat."""
    needs_reward: ClassVar[bool] = True
    """Whether the method cannot learn without a reward."""
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
        # `PolicyGradient` checks these too, but only after a model is loaded.
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
        checks.groups(self.batch.batch_size, group_size=self.method.rows_per_prompt)

    def _check_needs(self) -> None:
        """Raises InputError for an option without another option that it needs."""
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
        # The default correction of a stale sampler would be refused.
        capabilities.need(
            {
                "--surrogate dar": self.method.reads_reference
                and bool(self.sampler.max_staleness)
            },
            "--sampler-correction ratio, as --max-staleness is given",
            has=self.method.sampler_correction is not None,
        )
        pages = getattr(self.sampler.sampler, "cache_pages", None)
        capabilities.need(
            {"cache_pages of --sampler": pages is not None},
            "--continuous-batching",
            has=self.method.continuous_batching is not None,
        )

    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """Builds the algorithm from the recipe and the run's shapes and optimizers."""
        return self.makes(**vars(self.recipe), **shapes)

    @property
    def teacher_field(self) -> str | None:
        """Field of the rows that a teacher reads; None reads the prompt."""
        return None

    @property
    def success_score(self) -> float | None:
        """Least score of responses that a teacher reads as demonstrations, or None."""
        return None

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations, --dtype."""
        return self.start.dtype

    @property
    def critic(self) -> Critic | None:
        """The options of the critic; None for a method without a critic."""
        return None

    @property
    def critic_place(self) -> Place:
        """The place of the critic."""
        return WITH_POLICY

    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """The optimizers of the trained models, as arguments of `algorithm`."""
        return {"policy_optimizer": self.optimizer.make(self.num_steps * self.updates)}

    @property
    def recipe(self) -> PolicyRecipe:
        """The recipe that the run uses, with the correction for a stale sampler."""
        return self.sampler.corrected(self.method)

    @property
    def sources(self) -> tuple[Reward, ...]:
        """Every reward of the run."""
        return self.rewards.sources(environment=self.sampler.environment is not None)

    @property
    def kl_coef(self) -> float:
        """Initial KL coefficient β, reward units per nat."""
        if self.kl.kl_coef is not None:
            return self.kl.kl_coef
        placed = self.method.penalty.placement is not None or self.name == "distill"
        return self.default_kl_coef if self.reference.has_reference and placed else 0.0

    @property
    def staleness(self) -> int:
        """k, the iterations by which the sampler is behind the trainer."""
        if self.sampler.max_staleness is None:
            return int(self.placement.samples_ahead)
        return self.sampler.max_staleness

    @property
    def updates(self) -> int:
        """Number of optimizer steps per iteration."""
        return self.method.num_epochs * self.method.num_minibatches

    @property
    def sampler_dtype(self) -> str:
        """Dtype of the parameters that the sampler reads.

        A policy that computes in bfloat16 is cast before it is copied to a sampler. The
        samples are the same, and the copy takes half the bytes.
        """
        stored = getattr(self.sampler.sampler, "dtype", "float32")
        handed_over = self.placement.sampler.apart or self.staleness > 0
        plain = self.start.lora is None and self.sampler.environment is None
        if stored == "float32" and handed_over and plain:
            return self.start.dtype
        return stored

    @property
    def sampler_tolerance(self) -> float:
        """Tolerance added for the sampler's log-probs, nats per token."""
        return self.sampler.sampler.tolerance(self.start.dtype)

    @property
    def storage_tolerance(self) -> float:
        """Tolerance added for a reference stored in fewer bits, nats per token.

        Under LoRA policy and reference share the stored base: nothing is added.
        """
        dtype = self.reference.reference_storage.dtype
        if self.start.lora is not None or dtype == "float32":
            return 0.0
        return self_check.TOLERANCE[dtype]

    def sampled_at(self, place: Place) -> Self:
        """Returns the config with its sampler at `place`."""
        placement = dataclasses.replace(self.placement, sampler=place)
        return dataclasses.replace(self, placement=placement)

    def policy_mesh(self) -> Mesh:
        """Returns the policy's mesh, without the devices that other roles take."""
        further = {ref.option: ref.place for ref in self.reference.references}
        return self.placement.policy_mesh(further=further)
