"""Six regularisers of 2025 and 2026 against a KL penalty and none: two sweeps."""
