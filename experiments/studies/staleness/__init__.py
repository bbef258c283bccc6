"""What learning from the responses of an older policy does to a policy."""
