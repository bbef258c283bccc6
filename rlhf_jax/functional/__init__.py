"""Pure array maths: arrays in, arrays out, no models.

Functions check at trace time what they are passed (`checks`): ValueError where their
shapes do not belong together, TypeError where floats are not float32, ids not int32 or
a mask not bool, and InputError, a ValueError, where an option is outside the range that
its argument states. A section `Raises` names what goes beyond that.

Signatures state dtypes and shapes. Log-probs, entropies and KLs are in nats; scores,
rewards, values and advantages are in reward units. `mask` is True at response tokens,
EOS included; what stands outside it is never read. `temperature` divides the logits of
every model. A direction "reverse" is KL(π ‖ π_ref), and "forward" KL(π_ref ‖ π). Groups
of `group_size` G, 2 or more, are neighbouring rows, and G divides the rows.

Options that are one number (`checks.Scalar`) may be f32[], traced: `jax.vmap` over β or
a clip range runs an ablation in one program. Those of Python and NumPy are checked.

A gradient reaches what a model computes (logits, hidden states and heads, log-probs,
values, entropies, scores) and, as the formula has it, options: a temperature may be
learned. None reaches what stays fixed while a model learns, whatever its value says:

    the reference            ref_*: it is frozen, and one that moved with the policy
                             would be no reference
    the record of a sample   old_*, sampler_logprobs, importance weights
    targets and labels       advantages and returns in a loss, margins,
                             label_smoothing, KTO's z0
    statistics, counts       (sum, weight) pairs, num_*, loss_scale_factor

`Returns` names what a gradient reaches where that is less, or none. The test
`tests/functional/test_gradient_contract.py` has a row for every function.
"""
