"""What a run of PPO responds to: prompts of a file, or an environment's."""

from __future__ import annotations

import contextlib

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.environment.opened import EpisodeDraw, OpenedEnvironment
from rlhf_jax.train.environment.rows import BegunRows
from rlhf_jax.train.ppo.models import Models
from rlhf_jax.train.ppo.options import Config
from rlhf_jax.train.rollouts.queue import Draw


def encode_prompts(
    options: Config,
    rows: list[Row],
    *,
    policy: Pretrained,
    context: int,
    receipt: Receipt | None = None,
) -> tuple[list[Row], list[Tokens]]:
    """The rows whose prompts leave room for a response, and their tokens."""
    room, more = options.room(
        policy.room(max_new_tokens=options.max_new_tokens, context=context),
        max_new_tokens=options.max_new_tokens,
    )
    if max(options.buckets or (0,)) > room:
        raise InputError(
            f"--buckets: expected at most {room} tokens, the context of {context} less "
            f"--max-new-tokens, got {max(options.buckets or ())}; lower either"
        )
    return encoding.encode_prompts(
        policy.tokenizer,
        rows,
        max_length=room,
        field=options.prompt_field,
        stop_ids=policy.stop_ids,
        overlong=options.overlong,
        widest=None if options.buckets is None else max(options.buckets, default=0),
        more=more,
        receipt=receipt,
    )


def begin_episodes(
    options: Config,
    models: Models,
    *,
    policy: Pretrained,
    stack: contextlib.ExitStack,
    receipt: Receipt | None = None,
) -> tuple[BegunRows, Draw]:
    """The rows of --prompts as the environment begins with them, and its episodes.

    Args:
      policy: whose tokenizer encodes and decodes.
      stack: that ends the processes of the environment.
      receipt: is told of every row, and of those that are left out.

    Raises:
      InputError: there is no such environment, it cannot begin with a row, or no
        prompt fits.
    """
    opened = OpenedEnvironment(
        options,
        max_new_tokens=options.max_new_tokens,
        start=policy,
        mesh=options.placement.sampler.mesh_beside(models.mesh),
        stack=stack,
    )
    room, more = options.room(
        policy.room(max_new_tokens=options.max_new_tokens),
        max_new_tokens=options.max_new_tokens,
    )
    begun = opened.read(
        options.prompts,
        room=room,
        more=more,
        overlong=options.overlong,
        receipt=receipt,
    )
    sampler = opened.sampler(
        models.algorithm, begun=begun, rows=options.batch_size, base=models.base
    )
    return begun, EpisodeDraw(sampler, begun=begun, mesh=models.mesh)
