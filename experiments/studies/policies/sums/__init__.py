"""How a small decoder learns to add, and how well it does."""
