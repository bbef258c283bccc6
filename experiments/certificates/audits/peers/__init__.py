"""One program per library: its KL penalties as losses of an `audit.Batch`."""
