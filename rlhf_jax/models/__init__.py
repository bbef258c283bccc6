"""Networks as functions of their parameters.

Sizes and options that cannot be are refused with an InputError, a ValueError, when a
program is traced or earlier; arrays that do not belong together are a ValueError, and
wrong dtypes a TypeError.
"""
