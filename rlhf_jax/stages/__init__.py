"""What a batch becomes on its way from prompts to an updated state."""
