"""What a batch becomes, from prompts to the next training state."""
