"""What every storage of the reference costs, and how far its numbers are off.

    python experiments studies.ablate_reference_storage --text tinyshakespeare.txt \\
        --out runs/storage
    python experiments studies.ablate_reference_storage --text held_out.txt \\
        --model gpt2 --max-length 256 --out runs/storage_gpt2

The reference is trained, never at its initial weights, whose log-probs no rounding
would move: the first command trains a byte-level GPT-2 of 4.8 million parameters on
the text, the second takes a checkpoint. A policy is trained on from it, on other
blocks of the text, and samples responses. Every storage then prices the same responses
and the same held-out text: device bytes held, peak bytes of the scoring program as the
compiler reports them (its arguments and temporaries; with --topology also as a TPU's
compiler does, which keeps host memory apart), seconds a batch, and the error against
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
per response; of log-probs bfloat16 is off by 0.002 nats a token, float16 by 0.0002 and
int8 by 0.005 (0.003 with embeddings in bfloat16), every other way by nothing. The peak
of bfloat16 is above the copy's on a CPU, whose compiler widens the layers beforehand;
a TPU's does not. The table and the plot are in recorded/ablate_reference_storage.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from matplotlib.figure import Figure

from rlhf_jax import config, decoder, frozen, policy, sft, state
from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored, Sequences
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.checkpoints import precomputed, pretrained
from rlhf_jax.data import batches, digests, encoding, files, json_lines
from rlhf_jax.data.encoding import Example
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import compiled, run_shape
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import command_line, plots, report, run
from rlhf_jax.runs.folder import write_json, write_summary
from rlhf_jax.runs.run_config import RunConfig

Params = Any
Row = dict[str, Any]


class Exact(NamedTuple):
    """What the copy in float32 says, that the others are held against."""

    logprobs: np.ndarray  # f32[N], nats, of the held-out tokens
    kl: np.ndarray  # f32[responses], nats


MIB = 2**20
COST = {
    "held_mib": "held [MiB]",
    "host_mib": "host [MiB]",
    "peak_mib": "peak [MiB]",
    "tpu_peak_mib": "on a TPU [MiB]",
    "seconds": "seconds a batch",
}
ERROR = {
    "logprob_error": "|Δ log-prob| [nats a token]",
    "kl": "KL [nats a response]",
    "kl_error": "|Δ KL| [nats a response]",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    text: str
    """A .txt file: trained on unless --model is given, and held out from."""
    model: str | None = None
    """A trained checkpoint, a folder or a hub id; None trains one on bytes."""
    hidden_size: int = 256
    """Width of the model that is trained."""
    num_layers: int = 6
    """Depth of the model that is trained."""
    num_heads: int = 4
    """Attention heads of the model that is trained."""
    num_steps: int = 500
    """Updates that train it."""
    learning_rate: float = 2e-3
    """Peak; falls to 0 along a cosine."""
    nudge_steps: int = 20
    """Updates on other blocks that make the policy out of the reference."""
    nudge_learning_rate: float = 2e-4
    """Of those, constant."""
    batch_size: int = 16
    """Blocks of text an update."""
    max_length: int = 128
    """Tokens of a block, and of prompt and response together."""
    max_new_tokens: int = 64
    """Tokens of a response."""
    responses: int = 32
    """Responses of the batch that is priced."""
    temperature: float = 1.0
    """Of sampling and pricing."""
    held_out: float = 0.05
    """Share of the blocks that measures log-probs; as many more make the policy."""
    repeats: int = 5
    """Times a batch is priced for the seconds, of which the median counts."""
    topology: str | None = None
    """A TPU whose compiler is asked too, as v5e:2x2 (extra plan); None is no TPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_steps=self.num_steps,
            nudge_steps=self.nudge_steps,
            learning_rate=self.learning_rate,
            nudge_learning_rate=self.nudge_learning_rate,
            max_new_tokens=self.max_new_tokens,
            responses=self.responses,
            temperature=self.temperature,
            held_out=self.held_out,
            repeats=self.repeats,
        )
        if self.max_new_tokens >= self.max_length:
            raise InputError(
                f"max_new_tokens: expected less than max_length, {self.max_length}, "
                f"so that there is a prompt, got {self.max_new_tokens}"
            )


def blocks(options: Config) -> tuple[ModelConfig, Params, list[Example]]:
    """The model as it is before any update here, and the text in its tokens."""
    text = json_lines.read_text(options.text)
    size = options.max_length
    if options.model is not None:
        start = pretrained.load(options.model)
        start.limit(size)
        examples = encoding.encode_text(start.tokenizer, text, block_size=size)
        return start.model, start.params, examples
    model = config.gpt2(
        vocab_size=256,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        max_positions=size,
    )
    tokens = list(text.encode())
    examples = [
        Example((), tokens[first : first + size])
        for first in range(0, len(tokens) - 1, size - 1)
    ]
    init = jax.jit(decoder.init, static_argnames=("model",))
    return model, init(jax.random.key(options.seed), model=model), examples


def train(
    job: run.Run,
    name: str,
    params: Params,
    *,
    model: ModelConfig,
    examples: list[Example],
    schedule: optax.Schedule,
) -> Params:
    """The parameters after the stage `name`, next-token prediction on the examples."""
    options: Any = job.config
    stream = batches.sequence_batches(
        examples, batch_size=options.batch_size, seed=options.seed, pad_id=0
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    update = jax.jit(
        functools.partial(sft.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    initial = state.supervised_state(storage.store(params), optimizer=optimizer)
    meta = {"data_digest": digests.of_tokens(examples)}
    with job.stage(name, initial, meta=meta) as stage:
        for step in stage.steps():
            stage.state, stats = update(stage.state, batch=stream[step])
            stage.end_step(step, stats)
    return stage.state.params


def sample(
    options: Config, params: Params, *, model: ModelConfig, texts: list[Example]
) -> Rollout:
    """The policy goes on from the beginnings of texts."""
    width = options.max_length - options.max_new_tokens
    tokens = [text.response[:width] for text in texts if len(text.response) >= width]
    if not tokens:
        raise InputError(
            f"{options.text}: expected a held-out block of at least {width} tokens, "
            f"got none; give a longer text, or a smaller max_length"
        )
    rows = [tokens[row % len(tokens)] for row in range(options.responses)]
    numbers = jnp.arange(options.responses, dtype=jnp.int32)
    prompts = Prompts(
        tokens=jnp.asarray(rows, jnp.int32),
        mask=jnp.ones((options.responses, width), bool),
        index=numbers,
        sample=jnp.zeros_like(numbers),
    )
    draw = jax.jit(
        functools.partial(
            rollout.rollout,
            model=model,
            max_new_tokens=options.max_new_tokens,
            stop_ids=(),
            temperature=options.temperature,
        )
    )
    key = jax.random.fold_in(jax.random.key(options.seed), 1)
    return draw(params, prompts=prompts, key=key)


def scoring(options: Config, *, model: ModelConfig) -> Callable[..., Scored]:
    """The program whose cost is measured: KL of the policy's responses."""

    def scored(reference: Frozen | None, responses: Rollout) -> Scored:
        return score.score(
            responses,
            scores=jnp.zeros(options.responses, jnp.float32),
            reference=reference,
            model=model,
            critic=None,
            critic_model=None,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )

    return scored


def cost(
    options: Config, reference: Frozen | None, *, model: ModelConfig, responses: Rollout
) -> tuple[Row, Scored]:
    """What scoring with a storage takes: bytes at most and seconds."""

    def there() -> Rollout:
        return responses if reference is None else frozen.beside(reference, responses)

    price = scoring(options, model=model)
    program = jax.jit(price).lower(reference, there()).compile()
    scored = program(reference, there())
    seconds = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(reference, there()))
        seconds.append(time.perf_counter() - began)
    row: Row = {
        "peak_mib": peak(program.memory_analysis()),
        "tpu_peak_mib": None,
        "seconds": statistics.median(seconds),
    }
    if options.topology is not None:
        device = compiled.target(options.topology)
        memory = compiled.memory(price, reference, responses, device=device)
        row["tpu_peak_mib"] = peak(memory)
    return row, scored


def peak(memory: Any) -> float:
    """MiB of a program's arguments and temporaries on the device."""
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / MIB


def held_out_logprobs(
    reference: Frozen, held_out: list[Sequences], *, model: ModelConfig
) -> np.ndarray:
    """Log-probs of all held-out tokens, nats."""

    @jax.jit
    def logprobs(reference: Frozen, batch: Sequences) -> jax.Array:
        return policy.logprobs(
            frozen.read(reference), model=model, tokens=batch.tokens, mask=batch.mask
        )

    said = [
        np.asarray(logprobs(reference, frozen.beside(reference, batch)))[
            np.asarray(batch.response_mask)
        ]
        for batch in held_out
    ]
    return np.concatenate(said)


def ways(params: Params, *, base: Frozen) -> dict[str, Callable[[], Frozen | None]]:
    """Every storage by name, made when its turn comes.

    Args:
      base: that a policy of adapters holds in any case, and is its reference.
    """
    chosen: dict[str, Callable[[], Frozen | None]] = {
        name: functools.partial(frozen.freeze, params, **how)
        for name, how in run_shape.WAYS.items()
    }
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    chosen["cpu"] = functools.partial(frozen.freeze, params, sharding=cpu)
    chosen["lora-base"] = lambda: base
    chosen["none"] = lambda: None
    return chosen


def live_mib() -> tuple[float, float]:
    """MiB of all arrays that live, on the devices and in the host's pinned memory."""
    sizes = {True: 0, False: 0}
    for array in jax.live_arrays():
        sizes[array.sharding.memory_kind == "pinned_host"] += array.nbytes
    return sizes[False] / MIB, sizes[True] / MIB


def errors(logprobs: np.ndarray, kl: np.ndarray, *, exact: Exact) -> Row:
    """Distance from what the copy in float32 says."""
    return {
        "logprob_error": float(np.abs(logprobs - exact.logprobs).mean()),
        "kl": float(kl.mean()),
        "kl_error": float(np.abs(kl - exact.kl).mean()),
    }


def from_disk(
    options: Config,
    reference: Frozen,
    *,
    folder: Path,
    model: ModelConfig,
    responses: Rollout,
    held_out: list[Sequences],
    exact: Exact,
) -> Row:
    """Log-probs priced once and read back: for a data set that does not change."""
    price = functools.partial(
        precomputed.load_or_compute,
        folder,
        reference=reference,
        model=model,
        pad_id=0,
        progress=options.progress,
    )
    texts = [
        (tokens[mask].tolist(), trained[mask])
        for batch in jax.device_get(held_out)
        for tokens, mask, trained in zip(
            batch.tokens, batch.mask, batch.response_mask, strict=True
        )
        if mask.any()
    ]
    said = price([tokens for tokens, _ in texts], batch_size=options.batch_size)
    logprobs = np.concatenate(
        [said.row(i)[trained] for i, (_, trained) in enumerate(texts)]
    )
    tokens = np.asarray(responses.tokens).tolist()
    price = functools.partial(
        price, tokens, batch_size=len(tokens), temperature=options.temperature
    )
    found = price().padded(range(len(tokens)), width=len(tokens[0]))
    before, seconds = live_mib(), []
    for _ in range(options.repeats):
        began = time.perf_counter()
        price().padded(range(len(tokens)), width=len(tokens[0]))
        seconds.append(time.perf_counter() - began)
    after = live_mib()
    log_ratio = np.asarray(responses.old_logprobs) - found
    kl = np.where(np.asarray(responses.response_mask), log_ratio, 0.0).sum(axis=1)
    return {
        "held_mib": after[0] - before[0],
        "host_mib": after[1] - before[1],
        "peak_mib": None,  # no program runs
        "tpu_peak_mib": None,
        "seconds": statistics.median(seconds),
        **errors(logprobs, kl, exact=exact),
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
        reference = scored = None  # what the one before held goes first
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
            found = held_out_logprobs(reference, in_order, model=model)
            exact = Exact(found, kl) if exact is None else exact  # the copy is first
            row |= errors(found, kl, exact=exact)
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
