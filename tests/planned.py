"""Runs with tiny shapes for `rlhf-jax plan`, from its command line."""

import atexit
import functools
import json
import tempfile
from pathlib import Path

from rlhf_jax.planning import measured
from rlhf_jax.train.plan import command, job

_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
REWARDS = {"ppo": ["--reward-model={}"], "grpo": ["--verifier=gsm8k"]}
SHAPES = {
    "ppo": ["--max-new-tokens=4", "--num-minibatches=1"],
    "grpo": ["--max-new-tokens=4"],
}


@functools.cache
def model(vocab=128, width=64, layers=2, heads=8, positions=1024):
    """A folder with the config.json of a GPT-2."""
    folder = Path(_FOLDER.name) / f"{vocab}-{width}-{layers}-{heads}-{positions}"
    folder.mkdir()
    shape = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def parsed(name, *words, path=None, chip="v5e"):
    """(config, options), by default with 16 rows of 6 + 4 tokens in one minibatch."""
    path = path or model()
    own = [f"--model={path}", "--prompt-length=6", "--batch-size=16"]
    own += [f"--chip={chip}"] if chip is not None else []
    own += SHAPES.get(name, ["--max-length=10"])
    if not any(word.startswith("--reward-model") for word in words):
        own += [word.format(path) for word in REWARDS.get(name, [])]
    return command.parse([name, *own, *words])


def target_of(config, options):
    """The chips of a plan."""
    mesh = config.placement.policy
    return measured.target(options.slice, chip=options.chip, mesh=mesh)


def work_of(name, *words, **options):
    """The workload of `parsed`."""
    config, chosen = parsed(name, *words, **options)
    return job.Job(chosen, target_of(config, chosen)).workload_of(config)
