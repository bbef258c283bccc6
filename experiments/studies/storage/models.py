"""A trained reference, a policy trained further from it, and its responses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax import config, decoder, sft, state
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches, digests, encoding, json_lines
from rlhf_jax.data.examples import Example
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import run
from studies.storage.options import Preparation

Params = Any


def blocks(options: Preparation) -> tuple[ModelConfig, Params, list[Example]]:
    """The model before any update, and the text as blocks of its tokens."""
    text = json_lines.read_text(options.text)
    size = options.max_length
    if options.model is not None:
        start = pretrained.load(options.model)
        start.limit(size)
        examples = encoding.encode_text(
            TextContract(start.tokenizer), text, block_size=size
        )
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
    """Trains by next-token prediction on the examples, as the stage `name`."""
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
    options: Preparation, params: Params, *, model: ModelConfig, texts: list[Example]
) -> Rollout:
    """Samples continuations of the beginnings of texts."""
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
