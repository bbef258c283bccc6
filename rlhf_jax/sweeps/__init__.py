"""Many runs as one question: a grid of options, seeds, and what the answer is."""
