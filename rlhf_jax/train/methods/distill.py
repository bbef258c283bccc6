"""On-policy distillation: a student learns a larger teacher's distributions.

    rlhf-jax distill --model STUDENT --reference TEACHER --prompts prompts.jsonl \\
        --out OUT

The student responds to the prompts, and at every token of its responses it learns the
teacher's distribution over the whole vocabulary. The teacher is its reference.
--divergence reverse is KL(student ‖ teacher), forward is KL(teacher ‖ student), and
jensen_shannon lies between them (--jsd-beta). The teacher may have any family, width
and depth, but must read the student's tokens with the same ids. It runs once per
iteration, over the student's responses.

With a reward (--reward, --verifier, --reward-model, --rewards) the student maximises
score - kl_coef * divergence, the score by REINFORCE++. --penalty.placement reward
--divergence None puts k1 into the reward instead, so that a token is also credited with
the KL of the tokens after it (the KL of whole responses).

--preset sdpo is self-distillation without demonstrations. The teacher is an average of
earlier students, and reads the prompt with another response of the group that scored
--success-score or more. Responses without such another one are not trained on.

--preset sdft is self-distillation with demonstrations: the teacher is the initial
--model, and reads the field --teacher-field of a row in place of the prompt.

--reference-storage.dtype int8 makes the teacher cheaper. --placement.reference last,
cpu or pinned_host gives it devices of its own, or takes it off the device. It returns
hidden states: no array over tokens and vocabulary is ever made.

Memory: the student in float32 four times, the teacher once as it is stored, its output
head once more, and the teacher's hidden states of a batch. Expect objective/kl,
KL(student ‖ teacher) in nats per response, to fall. OUT/model is a Hugging Face
checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from rlhf_jax.algorithms.distill.recipe import Distill, DistillRecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Mix
from rlhf_jax.train import commands
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig
from rlhf_jax.train.config.models import Reference
from rlhf_jax.train.config.prompts import Prompts

RECIPE = DistillRecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentPrompts(Prompts):
    """The prompts of the student and of its teacher."""

    teacher_field: str | None = None
    """Field of a row that the teacher reads in place of the prompt (SDFT: a
    demonstration with the prompt); None is the prompt itself."""

    @property
    def writing_option(self) -> str | None:
        """The option, other than --chat, that changes the prompts; None if unset."""
        if self.teacher_field is not None:
            return "--teacher-field"
        return super().writing_option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax distill`."""

    name: ClassVar[str] = "distill"
    makes: ClassVar[type[PolicyGradient]] = Distill
    default_kl_coef: ClassVar[float] = 1.0
    needs_reward: ClassVar[bool] = False
    reads_hidden_states: ClassVar[bool] = True
    data: Annotated[StudentPrompts, FLAT]
    """The prompts."""
    method: Annotated[DistillRecipe, FLAT] = RECIPE
    """Coefficients and choices of distillation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(kl_coef=self.kl_coef)
        self.method.check_read(rewarded=bool(self.sources))
        reads = {"--success-score": self.success_score is not None}
        capabilities.need(reads, "a reward", has=bool(self.sources))
        capabilities.exclude(
            reads,
            {"--teacher-field": self.teacher_field is not None},
            reason="the teacher reads one of them in the prompt's place",
        )
        reads["--teacher-field"] = self.teacher_field is not None
        own = any(reads.values()) and self.reference.has_reference
        if self.reference.checkpoint is None and not own:
            raise InputError(
                f"--reference: expected the checkpoint of a teacher, got "
                f"{self.reference.reference}; name one, or let --model teach itself by "
                f"--teacher-field or --success-score, and --reference start"
            )

    @property
    def teacher_field(self) -> str | None:
        """Field of the rows that the teacher reads; None reads the prompt."""
        return self.data.teacher_field

    @property
    def success_score(self) -> float | None:
        """Least score of responses that the teacher reads, or None."""
        return self.method.success_score

    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """Builds the algorithm, which depends on whether there is a reward."""
        return super().algorithm(rewarded=bool(self.sources), **shapes)


PRESETS: dict[str, dict[str, Any]] = {
    "sdft": {"reference": Reference(reference="start")},
    "sdpo": {
        "method": DistillRecipe(
            divergence="jensen_shannon",
            top_k=100,
            group_size=8,
            success_score=1.0,
        ),
        "reference": Reference(
            reference="start", lifecycle=Lifecycle(move=Mix(every=1, rate=0.05))
        ),
    },
}
"""--preset NAME. sdft: Shenfeld et al. 2026, arXiv:2601.19897. sdpo: Hübotter et al.
2026, arXiv:2601.20802, with the defaults of the authors' code."""


command = functools.partial(
    commands.run,
    Config,
    description=__doc__,
    first=("method.divergence",),
    presets=PRESETS,
)
"""`rlhf-jax distill`: runs the command from a command line."""
