"""Algorithms: what a batch becomes, from prompts to the next training state.

Arguments that mean the same in every function are explained here, once: `recipe`,
`model`, `optimizer` and `lora` are static; `state` is donated by the caller's `jit`;
`frozen` has the base under adapters, and the references, which are read where the KL is
exact or a mixture is sampled; `packing` is the packed layout in which models read the
rows, and None reads them padded; `kl_coef` is β, f32[], reward units per nat;
`max_new_tokens` is R, the number of response columns; `temperature` divides the logits
in every role. Records (`batch`) state their shapes.
"""
