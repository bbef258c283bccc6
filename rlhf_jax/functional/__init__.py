"""Pure array maths: arrays in, arrays out, no models.

Functions check their arguments at trace time (`checks`). They raise ValueError where
shapes do not match, TypeError where floats are not float32, ids not int32 or a mask not
bool, and InputError, a ValueError, where an option is outside its documented range. A
section `Raises` lists only errors beyond these.

Signatures state dtypes and shapes. Log-probs, entropies and KLs are in nats; scores,
rewards, values and advantages are in reward units. `mask` is True at response tokens,
EOS included; entries outside it are never read. `temperature` divides the logits of
every model. The direction "reverse" is KL(π ‖ π_ref), "forward" is KL(π_ref ‖ π). A
group is `group_size` G >= 2 neighbouring rows, and G divides the number of rows.

Options that are one number (`checks.Scalar`) may be a traced f32[]: `jax.vmap` over β
or a clip range runs an ablation in one program. Python and NumPy numbers are checked.

A gradient reaches what a model computes (logits, hidden states and heads, log-probs,
values, entropies, scores) and the options that a formula differentiates: a temperature
may be learned. No gradient reaches what stays fixed while a model learns:

    the reference            ref_*: it is frozen
    the record of a sample   old_*, sampler_logprobs, importance weights
    targets and labels       advantages and returns in a loss, margins,
                             label_smoothing, KTO's z0
    statistics, counts       (sum, weight) pairs, num_*, loss_scale_factor

`Returns` states where the gradient reaches fewer arguments, or none.
`tests/functional/test_gradient_contract.py` tests this for every function.
"""
