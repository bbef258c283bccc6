"""Devices, disk and terminal: the only code that is not a pure function."""
