"""Measures gradients and optima through the library's code and compares with claims."""
