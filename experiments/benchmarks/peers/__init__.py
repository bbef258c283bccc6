"""One program for each participant, run in an environment of its own."""
