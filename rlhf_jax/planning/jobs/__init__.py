"""The jobs that are planned, one algorithm or several to a file."""
