"""Pure array maths: f32 in, f32 out, no randomness, no parameters."""
