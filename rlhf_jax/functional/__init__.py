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
"""
