"""The steps that all policy gradients share, from prompts to scores."""
