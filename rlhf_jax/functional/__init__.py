"""Pure array maths: arrays in, arrays out, no models."""
