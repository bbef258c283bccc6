"""The step of the algorithm that a plan is of."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import histogram, run_shape
from rlhf_jax.planning.jobs import policy_gradient, supervised
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.planning.plan_options import Options
from rlhf_jax.planning.workload import Workload


def workload_of(options: Options, *, lengths: Sequence[int] | None) -> Workload:
    """The step that is planned.

    Args:
      options: the algorithm with its sizes and storages.
      lengths: of responses in rising order, tokens; None fills all columns.

    Raises:
      InputError: sizes that do not fit, or a length above --max-new-tokens.
    """
    texts = 2 if options.algorithm in ("reward-model", "dpo") else 1  # of a pair
    responses = (options.max_new_tokens,) * (texts * options.batch_size)
    if lengths is not None:
        if lengths[-1] > options.max_new_tokens:
            raise InputError(
                f"--lengths: expected responses of at most {options.max_new_tokens} "
                f"tokens (--max-new-tokens), got one of {lengths[-1]}; raise "
                f"--max-new-tokens"
            )
        responses = histogram.spread(lengths, rows=texts * options.batch_size)
    batch = Texts(options.prompt_length, responses)
    match options.algorithm:
        case "ppo":
            recipe = run_shape.ppo(options, num_epochs=options.epochs)
            return policy_gradient.workload_of(options, recipe=recipe, texts=batch)
        case "grpo":
            recipe = run_shape.grpo(
                options, num_epochs=options.epochs, group_size=options.group_size
            )
            return policy_gradient.workload_of(options, recipe=recipe, texts=batch)
        case "sft":
            return supervised.sft_workload(options, texts=batch)
        case "reward-model":
            return supervised.reward_model_workload(options, texts=batch)
        case "dpo":
            return supervised.dpo_workload(options, texts=batch)
