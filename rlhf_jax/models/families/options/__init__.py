"""What of a `config.json` many families have alike, read and written."""
