"""The options of commands: a tree of option groups, one per concern."""
