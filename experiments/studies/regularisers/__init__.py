"""Two sweeps that compare six regularisers with a KL penalty and with none."""
