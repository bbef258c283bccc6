"""What a batch becomes, from prompts to the next training state.

Arguments that mean the same in every function here are explained once: `recipe`,
`model`, `optimizer` and `lora` are static; `state` is donated by the caller's `jit`;
`frozen` is read for the base under adapters, and for its references where the KL is
exact or a mixture is sampled; `packing` is how the models read these rows packed, and
None reads them padded; `kl_coef` is β, f32[], reward units per nat; `max_new_tokens` is
R, the number of response columns; `temperature` divides the logits in every role.
Records (`batch`) state their shapes.
"""
