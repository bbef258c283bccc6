"""The frozen reference: its storage, its fingerprint, its lifecycle."""
