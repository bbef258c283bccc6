"""What the KL penalty buys, and three failures that come without it."""
