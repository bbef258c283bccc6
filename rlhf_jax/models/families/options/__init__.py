"""Options of a `config.json` that several families have."""
