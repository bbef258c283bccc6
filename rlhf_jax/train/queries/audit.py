"""Compare the expected gradient of a loss with that of every KL.

    rlhf-jax audit my_losses:penalty
    rlhf-jax audit my_losses:torch_penalty --torch --json audit.json

The function takes one record, `rlhf_jax.audit.Batch`: log-probs of policy, sampler and
reference, mask, rewards and logits of a group of three responses. It returns a number.
Its expected gradient is computed exactly, as a sum over every group of four small
worlds, and compared with the gradients of the KLs.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from rlhf_jax import audit
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, folder, report
from rlhf_jax.runs.command_line.options import load_function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax audit`."""

    loss: tyro.conf.Positional[str]
    """The loss, module:function, of one audit.Batch."""
    torch: bool = False
    """Whether the function takes and returns PyTorch tensors (extra parity)."""
    with_rewards: bool = False
    """Whether to draw rewards; otherwise they are 0, and the gradient is that of the
    penalty."""
    seed: int = 0
    """Seed of the worlds' tables."""
    json: Path | None = None
    """File to write all figures to, which must not exist; None writes none."""


def main(options: Config) -> None:
    """Runs `rlhf-jax audit` with its options."""
    if options.json is not None and options.json.exists():
        raise InputError(
            f"--json {options.json}: expected a file that is not there, got one; "
            f"give another"
        )
    loss = _loaded(options)
    findings = audit.of_loss(loss, with_rewards=options.with_rewards, seed=options.seed)
    report.table(
        f"Expected gradient of {options.loss}",
        ("world", "norm", "gradient of", "distance", "by column"),
        [
            (
                one.world,
                f"{one.norm:.2g}",
                one.verdict + f", nearest {one.nearest}" * (one.verdict == audit.NONE),
                f"{one.fits[one.nearest].distance:.2g}",
                " ".join(f"{scale:.2f}" for scale in one.by_depth),
            )
            if one.verdict != audit.ZERO
            else (one.world, f"{one.norm:.1g}", one.verdict, "", "")
            for one in findings
        ],
    )
    _say(
        "norm: over that of the full reverse KL. distance: the share of the gradient "
        "that is not the nearest KL's. by column: how strongly tokens there are "
        "penalised, against the first."
    )
    betas = [one.fits[one.nearest].beta for one in findings]
    for one, beta in zip(findings, betas, strict=True):
        if beta is not None:
            _say(f"beta beside the reward, {one.world}: {beta:.4g} of {one.nearest}")
    lengths, slopes = audit.by_length(loss), audit.by_log_ratio(loss)
    shown = ", ".join(f"{weight:.2f} at {n}" for n, weight in lengths.items())
    _say(f"weight of a token by the length of its response: {shown}")
    report.table(
        "Largest slope of the loss in a log-prob, by the log ratio",
        ("log ratio [nats]", *(f"{nats:g}" for nats in slopes["reference"])),
        [
            (f"to the {which}", *(f"{slope:.3g}" for slope in by_nats.values()))
            for which, by_nats in slopes.items()
        ],
    )
    if not all(math.isfinite(x) for of in slopes.values() for x in of.values()):
        _say(
            "inf, nan: beyond float32, so that one such token loses the whole update; "
            "clip the log ratio or the estimate."
        )
    if options.json is not None:
        fits = [
            {name: fit._asdict() for name, fit in one.fits.items()} for one in findings
        ]
        figures = {
            "loss": options.loss,
            "seed": options.seed,
            "worlds": [
                one._asdict()
                | {
                    "norm": _figure(one.norm),
                    "fits": of_world,
                    "by_depth": [*one.by_depth],
                }
                for one, of_world in zip(findings, fits, strict=True)
            ],
            "by_length": {n: _figure(weight) for n, weight in lengths.items()},
            "by_log_ratio": {
                which: {f"{nats:g}": _figure(slope) for nats, slope in by_nats.items()}
                for which, by_nats in slopes.items()
            },
        }
        folder.write_json(options.json, figures)


def _say(text: str) -> None:
    print(textwrap.fill(text, 80, break_on_hyphens=False))


def _figure(number: float) -> float | str:
    """Returns a number as strict JSON allows it, or "inf" or "nan"."""
    return number if math.isfinite(number) else str(number)


def _loaded(options: Config) -> audit.Loss:
    loss: Any = load_function(options.loss)
    if options.torch:
        try:
            loss = audit.from_torch(loss)
        except ImportError as error:
            raise InputError(
                f"--torch: expected PyTorch, got {error}; pip install "
                f"'rlhf-jax[parity]'"
            ) from error
    try:
        value = jax.jit(loss)(audit.example())  # the audit traces it too
    except Exception as error:  # whatever the user's own code raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, jax.errors.JaxRuntimeError):  # has PyTorch's traceback
            problem = str(error).strip().splitlines()[-1]
        raise InputError(
            f"{options.loss}: expected a function of one audit.Batch, got "
            f"{problem:.300}; see rlhf_jax/audit/README.md"
        ) from error
    if jnp.shape(value) != () or not jnp.issubdtype(
        jnp.result_type(value), jnp.floating
    ):
        raise InputError(
            f"{options.loss}: expected one float, the loss of a group, got "
            f"{jnp.result_type(value)}{list(jnp.shape(value))}; add up the tokens"
        )
    return loss


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax audit`: runs the audit from a command line."""
    options = command_line.cli(
        Config, prog="rlhf-jax audit", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # the worlds are small
    main(options)
