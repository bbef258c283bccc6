"""Configs recorded before `--placement` are read as the command line of today."""

import dataclasses
import shutil

import pytest
from places import FIXTURES

from rlhf_jax.runs import command_line, run_config
from rlhf_jax.runs.folder import check_run
from rlhf_jax.train.dpo import Config as DPO
from rlhf_jax.train.grpo import Config as GRPO
from rlhf_jax.train.ppo.options import Config as PPO

RECORDS = FIXTURES / "configs_before_placement"
SHARED = (
    *("--model=model", "--batch-size=8", "--snapshot-every=2", "--no-progress"),
    *("--attention=xla", "--save-dtype=float32"),
)
# What the recorded runs were asked for, in the options of today.
RUNS = {
    "ppo": (
        PPO,
        (
            *("--prompts=prompts.jsonl", "--reward=their_rewards:score"),
            *("--num-steps=3", "--max-new-tokens=4", "--num-epochs=1"),
            *("--num-minibatches=1", "--sample-every=1", "--kl-coef=0.1"),
            *("--policy-learning-rate=1e-3", "--critic-learning-rate=1e-3"),
            *("--placement.policy=data=4", "--placement.sampler=last:data=4"),
            "--placement.critic=last:data=2",
        ),
    ),
    "grpo": (
        GRPO,
        (
            *("--data=questions.jsonl", "--held-out=held_out.jsonl"),
            *("--num-steps=4", "--max-new-tokens=3", "--group-size=4"),
            *("--template={question}", "--num-workers=1", "--verifier=gsm8k"),
            "--unmarked=last_number",
            *("--placement.policy=data=1", "--placement.sampler=policy"),
        ),
    ),
}


def parse(config_class, *argv):
    return command_line.parse(config_class, description="A test.", argv=list(argv))


@pytest.mark.parametrize("trainer", RUNS)
def test_an_older_config_repeats_and_resumes_its_run(trainer, tmp_path):
    config_class, options = RUNS[trainer]
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(RECORDS / f"{trainer}.json", out / "config.json")
    asked = parse(config_class, *SHARED, *options, f"--out={out}")
    recorded = parse(config_class, f"--config={out / 'config.json'}")
    assert recorded == asked
    check_run(dataclasses.replace(asked, resume=True))


def test_a_config_of_dpo_from_before_its_kinds_is_read(tmp_path):
    asked = parse(DPO, "--model=model", "--data=pairs.jsonl", f"--out={tmp_path}")
    older = run_config.to_json(asked)
    for name in ("target_margin", "desirable_weight", "undesirable_weight"):
        del older["dpo"][name]
    fields = run_config.complete(older, names=run_config.option_names(DPO))
    assert run_config.from_json(DPO, fields, source=tmp_path) == asked
