"""Makes `python -m rlhf_jax` the same as the console script `rlhf-jax`."""

from rlhf_jax.train.main import main

if __name__ == "__main__":
    main()
