"""A policy, a reference and held-out prompts to figures with intervals.

    rlhf-jax evaluate --model POLICY --reference REF --prompts held_out.jsonl \\
        --verifier gsm8k --out OUT

Both models respond to every prompt, --num-samples times and once greedily. --verifier,
--reward or --reward-model scores the responses: mean score, pass@k (best@k of rewards),
majority@k, and the win rate against the reference. Without one of them the lengths, the
KL to the reference, the perplexity under it and the distinct share remain.
--environment plays episodes of several turns instead, by whose rewards it scores them.

--judge my_judges:better compares pairs of responses, in both orders:

    def better(prompts, first, second, rows) -> list[float]

returns for each pair the probability that the first response is the better one. --texts
adds the loss of both models on held-out texts, which shows what was forgotten.

Samples depend on the seed, the prompt's number and the sample's number alone. A run
that was killed goes on with --resume, to the same results.json. OUT/samples.jsonl has
every response with its numbers.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.commands import RENAMED
from rlhf_jax.train.evaluate.options import SCREEN, Config
from rlhf_jax.train.evaluate.trainer import main

__all__ = ["Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax evaluate`: from a command line to a table."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        renamed=RENAMED,
        prog="rlhf-jax evaluate",
        argv=argv,
    )
