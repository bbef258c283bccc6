"""Plain values that cross the border to a hostile process, by copy."""
