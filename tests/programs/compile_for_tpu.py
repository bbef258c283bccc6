"""Compiles the scoring of a rollout for an absent TPU; JSON on stdout.

Run by test_host_memory.py in its own process: JAX chooses its platforms only once.
"""

import functools
import json

import jax
import jax.numpy as jnp

from rlhf_jax import batch, config, critic, decoder, frozen
from rlhf_jax.algorithms.flow import score
from rlhf_jax.planning import compiled
from rlhf_jax.roles.reference import storage

MODEL = config.gpt2(
    vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12, max_positions=1024
)
ROWS, PROMPT, RESPONSE = 8, 64, 64


def main():
    device = compiled.target("v5e:2x2")
    score_rollout = functools.partial(
        score.score,
        model=MODEL,
        max_new_tokens=RESPONSE,
        temperature=0.7,
    )

    def program(rollout, scores, reference, critic):
        values = score.response_values(
            critic,
            rollout=rollout,
            model=MODEL,
            max_new_tokens=RESPONSE,
            after_stop=False,
        )
        return score_rollout(rollout, scores=scores, reference=reference, values=values)

    per_token = jnp.zeros((ROWS, PROMPT + RESPONSE), jnp.float32)
    per_row = jnp.zeros(ROWS, jnp.int32)
    rollout = batch.Rollout(
        tokens=per_token.astype(jnp.int32),
        mask=per_token > 0,
        response_mask=per_token > 0,
        old_logprobs=per_token,
        entropy=per_token,
        index=per_row,
        sample=per_row,
    )
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=MODEL))
    valued = jax.eval_shape(functools.partial(critic.from_policy, model=MODEL), params)
    measured = {}
    for way in ("none", "copy", "int8", "host", "host-int8"):
        reference = None
        if way != "none":
            freeze = functools.partial(frozen.freeze, **storage.WAYS[way])
            reference = jax.eval_shape(freeze, params)
        memory = compiled.memory(
            program, rollout, per_row * 1.0, reference, valued, device=device
        )
        measured[way] = {
            "argument": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "host_argument": memory.host_argument_size_in_bytes,
        }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
