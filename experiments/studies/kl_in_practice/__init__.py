"""What the choice of the KL does: two sweeps, and the answers that they give."""
