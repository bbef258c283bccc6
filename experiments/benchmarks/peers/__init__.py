"""One program per participant, each run in its own environment."""
