"""What a queue of rollouts saves where sampling waits for the host."""
