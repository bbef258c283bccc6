"""Networks: one decoder core, a file per family, cached decoding."""
