"""From scored responses to the figures of an evaluation, with their intervals."""
