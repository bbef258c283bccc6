"""Options of a `config.json` that many families share, read and written."""
