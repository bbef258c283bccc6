"""What the losses of other libraries penalise."""
