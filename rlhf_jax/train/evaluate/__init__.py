"""Evaluate a policy and a reference on held-out prompts, with confidence intervals.

    rlhf-jax evaluate --model POLICY --reference REF --prompts held_out.jsonl \\
        --verifier gsm8k --out OUT

Both models respond to every prompt, --num-samples times and once greedily. --verifier,
--reward or --reward-model scores the responses: mean score, pass@k (best@k of rewards),
majority@k, and the win rate against the reference. Lengths, the KL to the reference,
the perplexity under it and the distinct share are measured without scores too.
--environment plays episodes of several turns instead, and scores them by its rewards.

--judge my_judges:better compares pairs of responses, in both orders:

    def better(prompts, first, second, rows) -> list[float]

returns for each pair the probability that the first response is better. --texts adds
the loss of both models on held-out texts, which shows forgetting.

Samples depend only on the seed, the number of the prompt and the number of the sample.
A run that was killed continues with --resume, to the same results.json.
OUT/samples.jsonl has every response with its figures.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.commands import successors
from rlhf_jax.train.evaluate.options import SCREEN, Config
from rlhf_jax.train.evaluate.trainer import main

__all__ = ["Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax evaluate`: runs the command from a command line."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        renamed=successors(Config),
        prog="rlhf-jax evaluate",
        argv=argv,
    )
