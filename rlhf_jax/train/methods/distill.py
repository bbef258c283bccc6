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
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig

RECIPE = DistillRecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax distill`."""

    name: ClassVar[str] = "distill"
    makes: ClassVar[type[PolicyGradient]] = Distill
    default_kl_coef: ClassVar[float] = 1.0
    needs_reward: ClassVar[bool] = False  # the teacher alone is enough
    reads_hidden_states: ClassVar[bool] = True
    method: Annotated[DistillRecipe, FLAT] = RECIPE
    """Coefficients and choices of distillation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(kl_coef=self.kl_coef)
        self.method.check_read(rewarded=bool(self.sources))
        if self.reference.checkpoint is None:
            raise InputError(
                f"--reference: expected the checkpoint of a teacher, got "
                f"{self.reference.reference}; name one"
            )

    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """The recipe with what a run knows, and whether there is a reward."""
        return super().algorithm(rewarded=bool(self.sources), **shapes)


command = functools.partial(
    commands.run, Config, description=__doc__, first=("method.divergence",)
)
"""`rlhf-jax distill`: from a command line to a run."""
