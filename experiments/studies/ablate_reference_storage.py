"""What every storage of the reference costs, and how far its numbers are off.

    python experiments studies.ablate_reference_storage --text tinyshakespeare.txt \\
        --out runs/storage
    python experiments studies.ablate_reference_storage --text held_out.txt \\
        --model gpt2 --max-length 256 --out runs/storage_gpt2

The reference is trained, never at its initial weights, whose log-probs no rounding
would move: the first command trains a byte-level GPT-2 of 4.8 million parameters on
the text, the second takes a checkpoint. A policy is trained on from it, on other
blocks of the text, and samples responses. Every storage then scores the same responses
and the same held-out text: bytes on the device, peak bytes of the scoring program,
which the compiler reports (its arguments and temporaries; with --topology so does a
TPU's compiler, which keeps host memory apart), seconds per batch, and the error against
float32 of log-probs (nats, mean over held-out tokens) and of the KL from policy to
reference (nats, mean over responses).

Beside `run_shape.WAYS` the table has `cpu`, where the reference's forward runs on the
CPU's devices, `lora-base`, where it is the base that a policy of adapters holds anyway,
`none`, which is never loaded and never run, and `precomputed`, which is read from the
disk as for a data set that does not change. Bytes held are those of the arrays that
come to live when a storage is made. OUT/storage.json and OUT/plots/storage.png hold
the table.

The first command takes 10 to 20 minutes on 2 CPU cores that do other work too. Its
model reaches a held-out loss of 1.87 nats per byte, and the policy a KL of 2.0 nats
per response. Log-probs of bfloat16 are off by 0.002 nats per token, of float16 by
0.0002 and of int8 by 0.005 (0.003 with embeddings in bfloat16). The peak
of bfloat16 is above the copy's on a CPU, whose compiler widens the layers beforehand;
a TPU's does not. The table and the plot are in recorded/ablate_reference_storage.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure

from rlhf_jax import decoder, frozen
from rlhf_jax.data import batches, files
from rlhf_jax.runs import command_line, plots, report, run
from rlhf_jax.runs.folder import write_json, write_summary
from studies.storage.costs import (
    Exact,
    cost,
    errors,
    from_disk,
    held_out_logprobs,
    live_mib,
    ways,
)
from studies.storage.models import blocks, sample, train
from studies.storage.options import Config

Row = dict[str, Any]


COST = {
    "held_mib": "held [MiB]",
    "host_mib": "host [MiB]",
    "peak_mib": "peak [MiB]",
    "tpu_peak_mib": "on a TPU [MiB]",
    "seconds": "seconds per batch",
}


ERROR = {
    "logprob_error": "|Δ log-prob| [nats per token]",
    "kl": "KL [nats per response]",
    "kl_error": "|Δ KL| [nats per response]",
}


def draw(rows: list[Row]) -> Figure:
    """A panel a column of the table, a bar a storage."""
    wanted = ("held_mib", "peak_mib", "tpu_peak_mib", "logprob_error", "kl_error")
    shown = [name for name in wanted if rows[0][name] is not None]
    figure = Figure(figsize=(3 * len(shown), 3.6), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True)
    for axis, column in zip(axes, shown, strict=True):
        values = [row[column] for row in rows]
        bars = axis.barh(
            [row["storage"] for row in rows], [0.0 if v is None else v for v in values]
        )
        labels = ["—" if v is None else f"{v:.3g}" for v in values]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.set_title((COST | ERROR)[column], fontsize=9)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return figure


def main(options: Config) -> None:
    started = time.perf_counter()
    model, params, examples = blocks(options)
    share, seed = options.held_out, options.seed
    trained, held_out = files.hold_out(examples, share=share, seed=seed)
    trained, other = files.hold_out(trained, share=share, seed=seed)
    in_order = batches.sequences_in_order(
        held_out, batch_size=options.batch_size, pad_id=0
    )
    num_steps = {"sft": options.num_steps, "nudge": options.nudge_steps}
    if options.model is not None:
        del num_steps["sft"]
    with run.Run(options, num_steps=num_steps) as job:
        if options.model is None:
            schedule = optax.warmup_cosine_decay_schedule(
                0.0, options.learning_rate, options.num_steps // 20, options.num_steps
            )
            params = train(
                job, "sft", params, model=model, examples=trained, schedule=schedule
            )
        nudged = train(
            *(job, "nudge", params),
            model=model,
            examples=other,
            schedule=optax.constant_schedule(options.nudge_learning_rate),
        )
    responses = sample(options, nudged, model=model, texts=held_out)

    rows: list[Row] = []
    base, exact = frozen.freeze(params), None
    for name, make in ways(params, base=base).items():
        reference = scored = None  # frees the memory of the one before
        before = live_mib()
        reference = make()
        device, host = (b - a for a, b in zip(before, live_mib(), strict=True))
        row, scored = cost(options, reference, model=model, responses=responses)
        row = {"storage": name, "held_mib": device, "host_mib": host, **row}
        row |= {"logprob_error": None, "kl": None, "kl_error": None}
        if name == "cpu":
            row["tpu_peak_mib"] = None  # it is not there
        if reference is not None:
            assert scored.kl is not None  # as there is a reference
            kl = np.asarray(scored.kl).sum(axis=1)
            logprobs = held_out_logprobs(reference, in_order, model=model)
            exact = Exact(logprobs, kl) if exact is None else exact  # the copy is first
            row |= errors(logprobs, kl, exact=exact)
            frozen.verify(reference)
        rows.append(row)
    assert exact is not None
    read = from_disk(
        *(options, base),
        folder=job.folder / "precomputed",
        model=model,
        responses=responses,
        held_out=in_order,
        exact=exact,
    )
    rows.append({"storage": "precomputed", **read})
    loss = float(-exact.logprobs.mean())
    for title, columns in {
        "Cost of a reference's storage": COST,
        f"Error at a held-out loss of {loss:.3f} nats per token": ERROR,
    }.items():
        shown = [name for name in columns if rows[0][name] is not None]
        report.table(
            title,
            ("storage", *(columns[name] for name in shown)),
            [(row["storage"], *(row[name] for name in shown)) for row in rows],
        )
    plots.draw(job.folder)
    draw(rows).savefig(job.folder / "plots" / "storage.png", dpi=110)
    write_json(job.folder / "storage.json", {"rows": rows})
    summary = {
        "held_out_loss": loss,
        "held_out_tokens": len(exact.logprobs),
        "parameters": decoder.num_parameters(model),
        "seconds": time.perf_counter() - started,
    }
    write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the table is in {job.folder / 'storage.json'}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
