"""`--sampler`: responses that something outside of the trainer's programs draws."""
