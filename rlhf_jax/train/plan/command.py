"""`rlhf-jax plan COMMAND`: plan a run for chips that are not there.

    rlhf-jax plan ppo --model llama-2-7b --reward-model llama-2-7b \\
        --topology v5e:8x8 --placement.policy fsdp=64 --dtype bfloat16 --remat full \\
        --reference-storage.dtype bfloat16 --reward-storage.dtype bfloat16 \\
        --batch-size 512 --prompt-length 512 --max-new-tokens 512 --json plan.json
    rlhf-jax plan grpo --config RUN/config.json --chip h100 --topology 8x8

COMMAND and its options are those of the run (`rlhf-jax COMMAND --help-all`), or come
from a recorded run. --prompts, --data and --out are not needed. --model and other
checkpoints are known names (gpt2, llama-3.1-8b, ...), folders or hub ids, of which only
config.json is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rlhf_jax.devices import precision, processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import compiled
from rlhf_jax.runs import command_line
from rlhf_jax.train import commands, main
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.plan import plan
from rlhf_jax.train.plan.job import Options

UNREAD = {"prompts": "-", "data": "-", "out": "-"}  # options that only a run needs


def command(argv: Sequence[str]) -> None:
    """Prints the plan of a run."""
    config, options = parse(argv)
    if options.topology is not None:
        compiled.ask_compilers_alone()
    with precision.of(config.compute_dtype):  # that of the run
        plan.run(config, options, command=shlex.join(["rlhf-jax", "plan", *argv]))


def parse(argv: Sequence[str]) -> tuple[Any, Options]:
    """Parses the config of the run and the options of its plan."""
    name, known = argv[0] if argv else None, main.trainers()
    options, rest = command_line.cli(
        Options,
        prog=f"rlhf-jax plan {name if name in known else 'COMMAND'}",
        description=__doc__,
        args=[text for text in argv if text == "--help"] or list(argv[1:]),
        return_unknown_args=True,
    )
    if name not in known:
        raise InputError(
            f"expected a command to plan, one of {', '.join(known)}, got "
            f"{name or 'none'}; write it first"
        )
    if options.topology is None:  # before defaults of a config look for devices
        processes.check_platform()
    module = main.trainer(name)
    of_data = "prompts" if issubclass(module.Config, PolicyGradientConfig) else "data"
    missing = [
        f"--{field}={UNREAD[field]}"
        for field in (of_data, "out")
        if not any(text.partition("=")[0] == f"--{field}" for text in rest)
    ]
    prog = f"rlhf-jax plan {name}"
    return commands.parse(module, [*missing, *rest], prog=prog), options
