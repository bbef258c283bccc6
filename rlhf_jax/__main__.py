"""`python -m rlhf_jax` is the console script `rlhf-jax`."""

from rlhf_jax.train.main import main

if __name__ == "__main__":
    main()
