"""On-policy distillation: a student learns a larger teacher's distributions.

    rlhf-jax distill --model STUDENT --teacher TEACHER --prompts prompts.jsonl --out OUT

The student responds to the prompts, and at every token of its responses it learns the
teacher's distribution over the whole vocabulary: --divergence reverse is KL(student ‖
teacher), forward the other way round, jensen_shannon lies between them (--jsd-beta).
The teacher may be of any family, width and depth that reads the student's tokens with
the same ids. It is run once per iteration, over the student's responses.

A line of --prompts is {"prompt": ..., and whatever a reward asks for}, or a prompt in a
.txt file; messages go through the tokenizer's chat template. --reward my_rewards:score
is a function

    def score(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]

of my_rewards.py in the working directory; the student then maximises
score - kl_coef * divergence, the score by REINFORCE++.
--penalty.placement reward --divergence None puts k1 into the reward instead, so that a
token is credited with the KL of the tokens after it too (the KL of whole responses).

--teacher-storage.dtype int8 makes the teacher cheaper; --placement.teacher last, cpu or
pinned_host gives it devices of its own, or takes it off the device. What comes back are
its hidden states, and no array over tokens and vocabulary is made anywhere.

Memory: the student in float32 four times, the teacher once as it is stored, its output
head once more, and the teacher's hidden states of a batch. Expect objective/kl, nats
per response from student to teacher, to fall. OUT/model is a Hugging Face checkpoint.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.distill.options import SCREEN, Config
from rlhf_jax.train.distill.trainer import main

__all__ = ["Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax distill`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        prog="rlhf-jax distill",
        argv=argv,
    )
