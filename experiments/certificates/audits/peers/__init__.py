"""One program for each library: its KL penalties as losses of an `audit.Batch`."""
