"""PPO on your own model, prompts and reward.

    rlhf-jax ppo --model runs/sft/model \\
        --prompts prompts.jsonl --reward-model runs/reward/model --out runs/ppo
    rlhf-jax ppo --model gpt2 \\
        --prompts prompts.txt --reward my_rewards:score --out runs/ppo

A line of --prompts is {"prompt": ..., and whatever the reward asks for}, or a prompt
in a .txt file; messages go through the tokenizer's chat template. The reward is a
checkpoint of `rlhf-jax reward-model`, or a function

    def score(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]

of my_rewards.py in the working directory; rows are those of --prompts. The policy
maximises score - kl_coef * KL(policy || reference). OUT/model is a Hugging Face
checkpoint with its tokenizer. --environment plays episodes of several turns instead.

--lora.rank 16 trains adapters of policy and critic over one frozen base, which is also
the reference; OUT/adapter is then a PEFT adapter, and OUT/model is merged.
--reference-storage.dtype int8 makes the reference cheaper, --placement.reference
pinned_host or cpu takes it off the device, --lifecycle.* moves it, and --no-measure-kl
with --kl-coef 0 leaves it out. --references NAME=CHECKPOINT,weight=W penalises a KL to
another reference too, at W times the coefficient of the first.
--preset openai-2019 or n-plus starts from a published recipe.
Every --eval-every steps the run evaluates --held-out and --out-of-domain texts and a
--judge; --alarms.* are limits beyond which it prints a warning.

Memory: policy and critic in float32 four times each, reference and reward model once;
for GPT-2 small 4.7 GiB. With the small models of `rlhf-jax sft` and
`rlhf-jax reward-model`, an iteration of 16 responses of 24 tokens takes 4 seconds on 2
laptop cores, and 10 of them at --policy-learning-rate 1e-4 raise the score from -0.1 to
0.4 at 2 nats. Expect the score to rise and the KL to stay in single digits [nats per
response]; if the KL runs away while the score soars, the policy has found a hole in the
reward: raise --kl-coef, or hold the KL with --kl-control.kind adaptive.
"""

from collections.abc import Sequence

from rlhf_jax.runs import command_line
from rlhf_jax.train.ppo.options import ELSEWHERE, SCREEN, Config
from rlhf_jax.train.ppo.presets import PRESETS
from rlhf_jax.train.ppo.trainer import main

__all__ = ["PRESETS", "Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax ppo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        presets=PRESETS,
        screen=SCREEN,
        elsewhere=ELSEWHERE,
        prog="rlhf-jax ppo",
        argv=argv,
    )
