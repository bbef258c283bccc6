"""The commands of the library."""
