"""The kinds of run that `kill_runs` kills, and the files that they read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import toy_files

PAUSE = 0.03  # seconds that the reward takes, so that kills meet a run under way
REWARD = f"""
import time

def score(prompts, responses, rows):
    time.sleep({PAUSE})
    return [float(len(set(response.split()))) for response in responses]
"""
VERIFIER = """
def check(prompt, response, row):
    return float(len(response) % 3)
"""
ENVIRONMENT = """
import random
import time

from rlhf_jax.environments.protocol import Started, Turn

class Hall:
    def reset(self, row):
        return Started(row["start"], (row["start"], 0))

    def step(self, state, response):
        time.sleep(random.expovariate(100))  # answers come in any order
        start, turn = state
        reward = float("good" in response.split()) + 0.5 * (start in response)
        return Turn("the dog ran", reward, turn == 2, (start, turn + 1))
"""


class Kind(NamedTuple):
    """A kind of run, by its command line."""

    trainer: str
    options: tuple[str, ...]
    devices: int = 1  # virtual ones of each process
    processes: int = 1


STEPS = ("--num-steps=60", "--snapshot-every=2")
ON_PPO = (
    *("--model=model", "--prompts=prompts.jsonl", "--batch-size=4", "--num-epochs=1"),
    *("--max-new-tokens=4", "--num-minibatches=1", "--sample-every=1"),
    *("--learning-rate=1e-3", "--critic.learning-rate=1e-3", *STEPS),
)
WITHOUT_CRITIC = tuple(o for o in ON_PPO if not o.startswith("--critic"))
ON_GRPO = (
    *("--model=model", "--prompts=questions.jsonl", "--held-out=held_out.jsonl"),
    *("--batch-size=8", "--group-size=4", "--max-new-tokens=3"),
    *(
        "--prompt-field=question",
        "--num-workers=1",
        "--verifier=gsm8k,unmarked=last_number",
        *STEPS,
    ),
)
MOVED = (
    *(option for option in ON_GRPO if not option.startswith("--verifier")),
    *("--verifier=their_verifiers:check", "--learning-rate=1e-3"),
)  # scores differ, so that versions do
HALL = "their_environments:Hall,max_turn_tokens=4,max_turns=3,observation_chunk=2"
EPISODES = (
    *(f"--environment={HALL}", "--model=model", "--prompts=starts.jsonl"),
    *("--held-out=starts.jsonl", "--batch-size=8", "--group-size=4"),
    *("--max-new-tokens=14", "--learning-rate=1e-3", "--num-workers=2", *STEPS),
)
EPISODES_OF_PPO = (
    *(f"--environment={HALL}", "--prompts=starts.jsonl", "--max-new-tokens=14"),
    *("--num-workers=2", "--kl-coef=0.1"),
)
REWARDED = "--reward=their_rewards:score"
KINDS = {
    "ppo": Kind("ppo", (*ON_PPO, REWARDED, "--kl-coef=0.1")),
    "ppo with a reward model and adaptive KL": Kind(
        "ppo",
        (
            *(*ON_PPO, "--reward-model=scorer", "--kl-coef=0.05"),
            "--kl-control=adaptive,target=1,unit=response",
            *("--lifecycle.move=reset,every=7", "--scores.normalise"),
        ),
    ),
    "ppo with adapters": Kind("ppo", (*ON_PPO, REWARDED, "--lora=2")),
    "ppo with devices of their own": Kind(
        "ppo",
        (
            *(*ON_PPO, REWARDED, "--placement.policy=data=2"),
            *("--placement.sampler=last:data=2", "--placement.critic=last:data=2"),
        ),
        devices=4,
    ),
    "ppo on-policy": Kind("ppo", (*ON_PPO, REWARDED, "--max-staleness=0")),
    "ppo one step behind": Kind("ppo", (*ON_PPO, REWARDED, "--max-staleness=1")),
    "ppo three steps behind": Kind("ppo", (*ON_PPO, REWARDED, "--max-staleness=3")),
    "ppo in two processes": Kind(
        "ppo",
        (*ON_PPO, REWARDED, "--placement.policy=data=2,fsdp=2"),
        devices=2,
        processes=2,
    ),
    "grpo": Kind("grpo", ON_GRPO),
    "grpo one step behind": Kind("grpo", (*MOVED, "--max-staleness=1")),
    "grpo three steps behind": Kind("grpo", (*MOVED, "--max-staleness=3")),
    "grpo with a sampler in a process": Kind("grpo", (*MOVED, "--sampler=process")),
    "grpo with a sampler in a process, two steps behind": Kind(
        "grpo", (*MOVED, "--sampler=process", "--max-staleness=2")
    ),
    "grpo in an environment": Kind("grpo", EPISODES),
    "grpo in an environment, one step behind": Kind(
        "grpo", (*EPISODES, "--max-staleness=1")
    ),
    "grpo in an environment, four steps behind": Kind(
        "grpo", (*EPISODES, "--max-staleness=4")
    ),
    "grpo in an environment, on four devices": Kind(
        "grpo", (*EPISODES, "--placement.policy=data=2,fsdp=2"), devices=4
    ),
    "reinforce in an environment": Kind(
        "reinforce",
        tuple(o for o in EPISODES if not o.startswith("--group-size")),
    ),
    "ppo in an environment": Kind("ppo", (*ON_PPO, *EPISODES_OF_PPO)),
    "ppo in an environment, one step behind": Kind(
        "ppo", (*ON_PPO, *EPISODES_OF_PPO, "--max-staleness=1")
    ),
    "online-dpo": Kind("online-dpo", (*WITHOUT_CRITIC, REWARDED)),
    "online-dpo with adapters, one step behind": Kind(
        "online-dpo", (*WITHOUT_CRITIC, REWARDED, "--lora=2", "--max-staleness=1")
    ),
    "nash-md": Kind("nash-md", (*WITHOUT_CRITIC, REWARDED)),
    "distill": Kind("distill", (*WITHOUT_CRITIC, "--reference=teacher")),
    "distill two steps behind": Kind(
        "distill",
        (*WITHOUT_CRITIC, "--reference=teacher", "--max-staleness=2"),
    ),
    "grpo, packed": Kind("grpo", (*MOVED, "--packing=auto")),
    "dpo": Kind(
        "dpo",
        ("--model=model", "--data=pairs.jsonl", "--batch-size=4", *STEPS),
    ),
    "sft": Kind(
        "sft",
        ("--model=model", "--data=answers.jsonl", "--batch-size=4", *STEPS),
    ),
    "sft, packed": Kind(
        "sft",
        (
            *("--model=model", "--data=answers.jsonl", "--batch-size=4", *STEPS),
            "--max-length=16",
        ),
    ),
    "sft with adapters": Kind(
        "sft",
        (
            *("--model=model", "--data=answers.jsonl", "--batch-size=4", *STEPS),
            *("--lora=2", "--optimizer=muon", "--schedule=wsd,warmup=0.1"),
            "--held-out-every=5",
        ),
    ),
    "reward model": Kind(
        "reward-model",
        (
            *("--model=model", "--data=pairs.jsonl", "--batch-size=4", *STEPS),
            "--normalise=samples,num_samples=8,max_new_tokens=4",
        ),
    ),
    "evaluate": Kind(
        "evaluate",
        (
            *("--model=model", "--reference=teacher", "--prompts=many.jsonl", REWARDED),
            *("--num-samples=2", "--max-new-tokens=4", "--batch-size=1"),
            "--snapshot-every=2",
        ),
    ),
    "sweep": Kind("sweep", ("sweep.toml", "--jobs=2")),
}
SWEEP = """
trainer = "grpo"
seeds = [0, 1]
grid = { kl_coef = [0.0, 0.1] }
measures = { score = "objective/scores" }

[options]
model = "model"
prompts = "prompts.jsonl"
reward = "their_rewards:score"
batch_size = 4
group_size = 2
max_new_tokens = 4
num_steps = 20
snapshot_every = 2
"""


def write_files(folder: Path) -> None:
    """Writes a checkpoint, a reward model, a reward and data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "their_rewards.py").write_text(REWARD)
    (folder / "their_verifiers.py").write_text(VERIFIER)
    (folder / "their_environments.py").write_text(ENVIRONMENT)
    (folder / "sweep.toml").write_text(SWEEP)
    toy_files.checkpoint(folder / "model")
    toy_files.checkpoint(folder / "teacher", seed=1)
    toy_files.reward_model(folder / "scorer")
    prompts = ("the cat", "a dog was", "it is so")
    toy_files.jsonl(folder / "prompts.jsonl", *({"prompt": text} for text in prompts))
    many = [{"prompt": text} for text in prompts for _ in range(10)]
    toy_files.jsonl(folder / "many.jsonl", *many)
    words = ("cat", "dog", "good", "bad", "very", "so", "and", "to")
    answers = [
        {"prompt": f"a {word}", "response": f"ran by the {word} ."} for word in words
    ]
    toy_files.jsonl(folder / "answers.jsonl", *answers * 3)
    pairs = [
        {"prompt": f"a {word}", "chosen": f"sat {word} good .", "rejected": "ran bad ."}
        for word in words
    ]
    toy_files.jsonl(folder / "pairs.jsonl", *pairs * 3)
    row = {"question": "the cat", "answer": "so it is #### 4"}
    toy_files.jsonl(folder / "questions.jsonl", *[row] * 24)
    toy_files.jsonl(folder / "held_out.jsonl", row)
    starts = ("cat", "dog", "good", "bad")
    toy_files.jsonl(folder / "starts.jsonl", *({"start": word} for word in starts))
