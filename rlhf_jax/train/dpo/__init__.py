"""DPO: a policy from your own preference pairs, without a reward model.

    rlhf-jax dpo --model runs/sft/model --data pairs.jsonl --out runs/dpo
    rlhf-jax dpo --model gpt2 --data pairs.jsonl --lora.rank 16 \\
        --learning-rate 1e-4 --row-width 2048 --out runs/dpo_lora
    rlhf-jax dpo --kind kto --model runs/sft/model --data labels.jsonl --out runs/kto

A line of --data is {"prompt": ..., "chosen": ..., "rejected": ...}, or two dialogues
that share their beginning, as in hh-rlhf; messages go through the tokenizer's chat
template. The reference is --model as it starts, which should have learned responses
like these (`rlhf-jax sft`), or --reference; with --lora.rank it is the base of the
policy. --precompute computes the reference log-probs before the first update and then
frees the reference; the run is the same to the bit. --row-width packs several pairs
into a row, where no text attends to another. OUT/model is a Hugging Face checkpoint,
and with LoRA OUT/adapter is a PEFT adapter.

--kind kto takes {"prompt": ..., "completion": ..., "label": true} instead, or makes two
such rows of a pair; --held-out then is a share of the prompts. --kind simpo and orpo
have no reference and thus no KL: they are here for comparison with DPO.

One device that holds the parameters in float32 five times over, four times with
--precompute (GPT-2 small: 2.4 and 2 GiB). On a model of 3.3 million parameters after 40
updates of `rlhf-jax sft` on tiny Shakespeare, one pass over the 655 pairs of hh-rlhf
(harmless, first 1,800; --overlong drop --blank drop) that fit into 128 tokens, in 181
rows of 512, at a learning rate of 1e-4, takes 2 minutes of CPU time. On 73 held-out
pairs the loss falls from 0.693 to 0.685, accuracy is 0.56 (standard error 0.06), and
both responses become less likely, the rejected one more so.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.dpo.options import PRESETS, SCREEN, Config
from rlhf_jax.train.dpo.trainer import main

__all__ = ["PRESETS", "Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax dpo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        presets=PRESETS,
        screen=SCREEN,
        prog="rlhf-jax dpo",
        argv=argv,
    )
