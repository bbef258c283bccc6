"""GRPO on your own model and questions, with a verifier in the reward model's place.

    rlhf-jax grpo --model runs/sft/model --data gsm8k/train.jsonl \\
        --held-out gsm8k/test.jsonl --out runs/gsm8k
    rlhf-jax grpo --model MODEL --data train.jsonl --held-out test.jsonl \\
        --verifier my_verifiers:check --out runs/grpo

--data and --held-out hold {"question": ..., "answer": ...} per line. Each question of a
batch gets --group-size responses. The verifier scores a response, and a response that
scores more than its group becomes likelier, at the KL coefficient β (--kl-coef) to the
frozen reference, which is --model as it starts. There is no reward model and no critic.

--verifier gsm8k compares the number after the last #### of a response with that of
"answer", as GSM8K (github.com/openai/grade-school-math) has them; --unmarked
last_number reads the last number of a response without ####. --verifier integer
compares the last number, exact the whole text, and my_verifiers:check calls

    def check(prompt: str, response: str, row: dict) -> float

of my_verifiers.py in the working directory, in processes of its own and with a time
limit (--timeout); row is that of --data, and 1 is right. --environment plays episodes
of several turns instead, and its rewards are the score.

The reference is --model as it starts; --reference CHECKPOINT takes another one, of any
shape, and --reference none leaves it out: it is neither loaded nor run. --template
"Question: {question} Answer:" is for models that were not trained on bare questions;
--chat puts the question as a message of the user, by the tokenizer's chat template.
--preset NAME starts from a published recipe: deepseekmath, rloo, rloo-masked, gspo,
cispo, sapo, dapo, dr-grpo or reinforce++-baseline. --max-redraws N draws up to N more
batches where groups have equal rewards, and puts mixed groups in their place. The
accuracy on --held-out is the mean score of greedy responses, before and after.
OUT/model is a Hugging Face checkpoint.

It needs one device that holds the parameters in float32 four times, and once more with
a reference (GPT-2 small: 2.4 GiB), and the activations of --micro-batch-size responses.
A model that solves none of the questions learns nothing, as all responses of a group
score 0: group/equal_fraction is 1 then. Checked at toy size on the real files of GSM8K;
neither time nor accuracy was measured on a model that solves some of them.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.grpo.options import SCREEN, Config
from rlhf_jax.train.grpo.presets import PRESETS
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
