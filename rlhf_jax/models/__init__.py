"""Networks as functions of their parameters.

Invalid sizes and options raise an InputError (a ValueError) at trace time or earlier.
Arrays whose shapes do not match raise a ValueError, and wrong dtypes a TypeError.
"""
