"""On-policy distillation: a student learns a larger teacher's distributions.

    rlhf-jax distill --model STUDENT --reference TEACHER --prompts prompts.jsonl \\
        --out OUT

The student responds to the prompts, and at every token of its responses it learns the
distribution of the teacher, which is its reference, over the whole vocabulary:
--divergence reverse is KL(student ‖ teacher), forward the other way round,
jensen_shannon lies between them (--jsd-beta). The teacher may be of any family, width
and depth that reads the student's tokens with the same ids. It is run once per
iteration, over the student's responses.

A reward is added where one is given (--reward, --verifier, --reward-model, --rewards):
the student then maximises score - kl_coef * divergence, the score by REINFORCE++.
--penalty.placement reward --divergence None puts k1 into the reward instead, so that a
token is credited with the KL of the tokens after it too (the KL of whole responses).

--preset sdpo needs no demonstrations: the teacher is --model as it was a while ago (an
average of the student), and of a response it reads the prompt with another of its group
that scored --success-score or more. Responses without one are not trained on.

--preset sdft is self-distillation: the teacher is --model as it starts, and reads the
field --teacher-field of a row in the prompt's place, as a demonstration and the prompt.

--reference-storage.dtype int8 makes the teacher cheaper; --placement.reference last,
cpu or pinned_host gives it devices of its own, or takes it off the device. What comes
back are its hidden states, and no array over tokens and vocabulary is made anywhere.

Memory: the student in float32 four times, the teacher once as it is stored, its output
head once more, and the teacher's hidden states of a batch. Expect objective/kl, nats
per response from student to teacher, to fall. OUT/model is a Hugging Face checkpoint.
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
    """Which prompts the student responds to, and what its teacher reads."""

    teacher_field: str | None = None
    """Field of the rows that the teacher reads in the prompt's place (SDFT: a
    demonstration and the prompt); None is the prompt itself."""

    @property
    def writing_option(self) -> str | None:
        """The option that says how a row becomes a prompt; None by default."""
        if self.teacher_field is not None:
            return "--teacher-field"
        return super().writing_option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax distill`."""

    name: ClassVar[str] = "distill"
    makes: ClassVar[type[PolicyGradient]] = Distill
    default_kl_coef: ClassVar[float] = 1.0
    needs_reward: ClassVar[bool] = False  # the teacher alone is enough
    reads_hidden_states: ClassVar[bool] = True
    data: Annotated[StudentPrompts, FLAT]
    """The prompts."""
    method: Annotated[DistillRecipe, FLAT] = RECIPE
    """Coefficients and choices of distillation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(kl_coef=self.kl_coef)
        self.method.check_read(rewarded=bool(self.sources))
        checks.groups(self.batch.batch_size, group_size=self.method.group_size)
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
        """The field that the teacher reads; None is the prompt."""
        return self.data.teacher_field

    @property
    def success_score(self) -> float | None:
        """Score of responses that the teacher reads; None: it reads none."""
        return self.method.success_score

    @property
    def rows_per_prompt(self) -> int:
        """Responses to each prompt of a batch."""
        return self.method.group_size

    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """The recipe with what a run knows, and whether there is a reward."""
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
"""--preset NAME: Shenfeld et al. 2026, arXiv:2601.19897, whose teacher is the start;
Hübotter et al. 2026, arXiv:2601.20802, with the defaults of the authors' code."""


command = functools.partial(
    commands.run,
    Config,
    description=__doc__,
    first=("method.divergence",),
    presets=PRESETS,
)
"""`rlhf-jax distill`: from a command line to a run."""
