"""A lower bound on the time of a PPO iteration, by arithmetic.

The machine's rates are measured: FLOPs per second of a product, and bytes per second of
a copy. A step takes the longer of its two times, and steps run one after another. For a
GPT-2 with L layers, width D and vocabulary V in float32, and B rows of P prompt and R
response tokens:

    forward of n tokens of a row, the first after c others:
                  FLOPs = n·24·L·D² + 4·L·D·Σ_{i=1..n} (c + i)     layers, attention
    head of n tokens:  2·n·D·V FLOPs
    weights:      bytes = 4·(12·L·D² + V·D)           read at least once by a program
    cache:        bytes = 8·L·D·B per position of context     keys and values, read

rollout  one forward of B·P tokens with the head at the last, whose logits give the
         first response token; then R - 1 steps of B tokens, which read the weights and
         the cache: few FLOPs per byte, so memory is the limit if B is small
score    reference and critic over P + R - 1 tokens, the reference's head at R
update   epochs × 3 × the forward of policy and critic (backward is twice forward), and
         an AdamW per minibatch: reads p, g, m, v and writes p, m, v, 28 bytes per
         parameter

Norms, softmax, activations, biases and the value head are small and not counted. The
bound assumes no recomputation, copies or padding: for uneven responses the real tokens
of the mean batch count, and a decode step reads the weights if any row is unfinished. A
small model may fit into a CPU's caches, which are faster than a copy; ratios below 1
have this cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks.peers.line_protocol import Workload

PHASES = ("rollout", "score", "update")
FLOAT = 4  # bytes


class Step(NamedTuple):
    """FLOPs and bytes that must be finished before the next step begins."""

    flops: float
    bytes: float
    times: int = 1


class Rates(NamedTuple):
    """FLOPs and bytes per second of a machine."""

    flops: float
    bytes: float


def forward(
    workload: Workload, *, tokens: int, context: int = 0, head_columns: int = 0
) -> int:
    """FLOPs of a forward pass of B rows, the head at `head_columns` of a row."""
    layers, width = workload.num_layers, workload.hidden_size
    attended = tokens * context + tokens * (tokens + 1) // 2
    row = 24 * layers * width**2 * tokens + 4 * layers * width * attended
    head = 2 * width * workload.vocab_size * head_columns
    return workload.num_prompts * (row + head)


def weights(workload: Workload) -> int:
    """Bytes of the matrices that a forward pass with head reads."""
    width = workload.hidden_size
    layers = 12 * workload.num_layers * width**2
    return FLOAT * (layers + workload.vocab_size * width)


def parameters(workload: Workload) -> int:
    """Number of parameters of the GPT-2; the head is the embedding."""
    width = workload.hidden_size
    layer = 12 * width**2 + 13 * width
    tables = (workload.vocab_size + workload.max_positions) * width
    return workload.num_layers * layer + tables + 2 * width


def steps(workload: Workload) -> dict[str, list[Step]]:
    """{phase: its steps in order}, by the formulas above."""
    prompt, response = workload.prompt_length, workload.response_length
    length = prompt + response - 1  # the last token is predicted, not read
    key_values = 2 * FLOAT * workload.num_layers * workload.hidden_size
    read = weights(workload)
    drawn = workload.lengths or (response,)
    policy, critic = (
        sum(
            forward(workload, tokens=prompt + n - 1, head_columns=n * head)
            for n in drawn
        )
        / len(drawn)
        for head in (1, 0)
    )

    def alive(before: int) -> float:
        """Share of the rows that draw a token at position `before`."""
        return sum(prompt + n - 1 > before for n in drawn) / len(drawn)

    def any_alive(before: int) -> float:
        return 1 - (1 - alive(before)) ** workload.num_prompts

    updates = workload.num_epochs * workload.num_minibatches
    trained = 2 * parameters(workload) + workload.hidden_size + 1
    return {
        "rollout": [
            Step(forward(workload, tokens=prompt, head_columns=1), read),
            *(
                Step(
                    alive(before)
                    * forward(workload, tokens=1, context=before, head_columns=1),
                    any_alive(before) * read
                    + alive(before) * workload.num_prompts * key_values * before,
                )
                for before in range(prompt, length)
            ),
        ],
        "score": [Step(policy, read), Step(critic, read)],
        "update": [
            Step(3 * (policy + critic), 0, workload.num_epochs),
            Step(0, 7 * FLOAT * trained, updates),
        ],
    }


def total(done: Iterable[Step]) -> Step:
    """Sums the FLOPs and bytes of all steps."""
    done = list(done)
    return Step(
        sum(step.flops * step.times for step in done),
        sum(step.bytes * step.times for step in done),
    )


def seconds(done: Iterable[Step], *, rates: Rates) -> float:
    """Σ times · max(FLOPs / rate, bytes / rate)."""
    return sum(
        step.times * max(step.flops / rates.flops, step.bytes / rates.bytes)
        for step in done
    )


def floors(workload: Workload, *, rates: Rates) -> Mapping[str, float]:
    """Seconds of each phase and of the iteration on a machine with these rates."""
    phases = {
        phase: seconds(done, rates=rates) for phase, done in steps(workload).items()
    }
    return {**phases, "iteration": sum(phases.values())}
