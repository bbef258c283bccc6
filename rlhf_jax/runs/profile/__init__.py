"""Where the time of a few steps goes: their trace, and what it says of each scope."""
