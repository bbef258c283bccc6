"""Episodes of several turns beside a loop that runs whole conversations again."""
