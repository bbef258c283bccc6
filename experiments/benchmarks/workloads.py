"""The workloads of the benchmark of an iteration."""

from __future__ import annotations

import dataclasses

from benchmarks.peers.line_protocol import Workload

GPT2_SMALL = Workload(
    name="gpt2-small",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocab_size=50257,
    max_positions=1024,
    num_prompts=8,
    prompt_length=32,
    response_length=32,
    num_epochs=1,
    num_minibatches=1,
)
SMALL = Workload(
    name="small",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    vocab_size=512,
    max_positions=64,
    num_prompts=64,
    prompt_length=16,
    response_length=48,
    num_epochs=4,
    num_minibatches=4,
)
TINY = Workload(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    vocab_size=64,
    max_positions=24,
    num_prompts=64,
    prompt_length=8,
    response_length=16,
    num_epochs=4,
    num_minibatches=4,
)
LONG = Workload(
    name="long",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    vocab_size=512,
    max_positions=2048,
    num_prompts=2,
    prompt_length=128,
    response_length=1920,
    num_epochs=1,
    num_minibatches=1,
)
# For --lengths lognormal --mean 0.22: packing shortens rows much, and starts cost most.
MEDIUM = Workload(
    name="medium",
    num_layers=6,
    hidden_size=384,
    num_heads=6,
    vocab_size=4096,
    max_positions=64,
    num_prompts=16,
    prompt_length=24,
    response_length=40,
    num_epochs=4,
    num_minibatches=2,
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        GPT2_SMALL,
        dataclasses.replace(GPT2_SMALL, name="gpt2-small-4-epochs", num_epochs=4),
        MEDIUM,
        SMALL,
        TINY,
        LONG,
    )
}
