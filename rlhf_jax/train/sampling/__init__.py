"""Sampling on the devices of a trainer: on which, in which dtype, with which cache."""
