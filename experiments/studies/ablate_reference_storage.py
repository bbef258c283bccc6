"""What does each storage of the reference cost, and how exact is it?

    rlhf-jax sweep experiments/studies/storage/sweep.toml --out runs/storage
    python experiments studies.storage.tables runs/storage

    python experiments studies.ablate_reference_storage --storage int8 \\
        --text tinyshakespeare.txt --out runs/int8

The sweep runs the program for every storage. The second command prints the tables and
draws runs/storage/storage.png. The third command measures one storage.

The reference is trained, because rounding would hardly change the log-probs of initial
weights: a byte-level GPT-2 of 4.8 million parameters learns the text, or --model names
a checkpoint. A policy is trained from it on other blocks of the text and samples
responses. The first run prepares the models, the responses and the figures of a float32
copy in --prepared; other runs read them. Two runs may start at once, and the next run
continues an interrupted preparation.

Every storage scores the same responses and the same held-out text. Measured are bytes
on the device; peak bytes of the scoring program, as the compiler reports its arguments
and temporaries (with --topology also a TPU's compiler, which counts host memory
separately); seconds per batch; and the errors, relative to the copy, of log-probs
(nats, mean over held-out tokens) and of the KL from policy to reference (nats, mean
over responses). The error of the copy is that of a second process: 0 on a CPU.

In addition to `run_shape.WAYS` there are `cpu`, which runs the reference's forward on
the CPU's devices; `lora-base`, the base that a LoRA policy stores anyway; `none`,
without a reference; and `precomputed`, which reads log-probs of a fixed data set from
disk. Bytes held are those of the arrays that creating the storage allocates.
OUT/summary.json has the figures as `row`.

On 2 shared CPU cores the preparation took 27 minutes and a storage 6 to 54 s. The model
reaches a held-out loss of 1.87 nats per byte, and the policy a KL of 2.55 nats per
response. The error of log-probs is 0.002 nats per token in bfloat16, 0.0002 in float16
and 0.005 in int8 (0.003 with embeddings in bfloat16). On a CPU the peak of bfloat16 is
above the copy's, because its compiler widens the layers first; a TPU's does not. The
table and the plot are in recorded/ablate_reference_storage.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlhf_jax import frozen
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.folder import open_run, write_summary
from studies.storage import preparation
from studies.storage.costs import (
    cost,
    errors,
    from_disk,
    held_out_logprobs,
    live_mib,
    stored,
)
from studies.storage.options import Config
from studies.storage.preparation import Prepared
from studies.storage.tables import COST, ERROR

Row = dict[str, Any]


def measure(options: Config, prepared: Prepared) -> Row:
    """Measures a storage and returns its row."""
    model, exact = prepared.model, prepared.exact
    base = frozen.freeze(prepared.params)
    row: Row = {"storage": options.storage}
    if options.storage == "precomputed":
        return row | from_disk(
            *(options, base),
            folder=options.out / "precomputed",
            model=model,
            responses=prepared.responses,
            held_out=prepared.held_out,
            exact=exact,
        )
    before = live_mib()
    reference = stored(options.storage, prepared.params, base=base)
    device, host = (b - a for a, b in zip(before, live_mib(), strict=True))
    taken, scored = cost(options, reference, model=model, responses=prepared.responses)
    row |= {"held_mib": device, "host_mib": host, **taken}
    row |= {"logprob_error": None, "kl": None, "kl_error": None}
    if options.storage == "cpu":
        row["tpu_peak_mib"] = None  # the reference is not on the TPU
    if reference is not None:
        assert scored.kl is not None  # because there is a reference
        kl = np.asarray(scored.kl).sum(axis=1)
        logprobs = held_out_logprobs(reference, prepared.held_out, model=model)
        row |= errors(logprobs, kl, exact=exact)
        frozen.verify(reference)
    return row


def main(options: Config) -> None:
    started = time.perf_counter()
    preparation.check(options)  # before the run folder is created
    folder = open_run(options)
    prepared = preparation.get(options)
    row = measure(options, prepared)
    report.table(
        f"The reference as {options.storage}",
        ("", "measured"),
        [
            (text, row[name])
            for name, text in (COST | ERROR).items()
            if row[name] is not None
        ],
    )
    summary = {
        "row": row,
        "held_out_loss": prepared.summary["held_out_loss"],
        "held_out_tokens": prepared.summary["held_out_tokens"],
        "parameters": prepared.summary["parameters"],
        "seconds": time.perf_counter() - started,
    }
    write_summary(folder, summary)
    print(f"{summary['seconds']:.0f} s; the row is in {folder / 'summary.json'}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
