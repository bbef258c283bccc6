"""The effect of learning from the responses of an older policy."""
