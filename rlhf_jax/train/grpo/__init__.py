"""GRPO on grade-school mathematics: your own checkpoint, and answers that are checked.

    rlhf-jax sft --model gpt2 --data gsm8k/train.jsonl \\
        --prompt-field question --response-field answer --out runs/sft
    rlhf-jax grpo --model runs/sft/model --data gsm8k/train.jsonl \\
        --held-out gsm8k/test.jsonl --out runs/gsm8k

--data and --held-out hold {"question": ..., "answer": "... #### 72"} a line, as GSM8K
(github.com/openai/grade-school-math) has them. Each question of a batch is answered
--group-size times; an answer scores 1 where the number after its last #### is the
row's, else 0, and what got more than its group becomes likelier, at kl_coef times the
KL to the frozen reference, which is --model as it starts. There is no reward model and
no critic. Processes verify one batch while the device prices it by the reference.

--reference none leaves the reference out: never held, never run. --unmarked last_number
reads the last number of an answer without ####, and --template "Question: {question}
Answer:" is for models that were not trained on bare questions; --chat asks as the user
of the tokenizer's chat template does. --preset deepseekmath, rloo or reinforce++ starts
from a published recipe. Held-out accuracy, of the likeliest answer, is taken before and
after. OUT/model is a Hugging Face checkpoint.

One device that holds the parameters in float32 four times, and once more with a
reference (GPT-2 small: 2.4 GiB), and the activations of --micro-batch-size answers.
Checked at toy size on the real files only: on a checkpoint that can solve some of the
questions neither time nor accuracy was measured. One that solves none of them learns
nothing, as all answers of a group score 0: group/equal_fraction is 1 then.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.grpo.options import PRESETS, SCREEN, Config
from rlhf_jax.train.grpo.trainer import main

__all__ = ["PRESETS", "Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax grpo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        presets=PRESETS,
        screen=SCREEN,
        prog="rlhf-jax grpo",
        argv=argv,
    )
