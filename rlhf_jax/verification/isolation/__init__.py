"""A process for code that is not trusted: its limits, files and system calls."""
