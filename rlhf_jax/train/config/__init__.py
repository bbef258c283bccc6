"""What a user chooses: a tree of option groups, one per concern."""
