"""Pure array maths: arrays in, arrays out, no models.

Every function checks at trace time what it is passed (`checks`): ValueError where its
shapes do not belong together, TypeError where floats are not float32, ids not int32 or
a mask not bool, and InputError, a ValueError, where an option is outside the range that
its argument states. A section `Raises` names what goes beyond that.
"""
