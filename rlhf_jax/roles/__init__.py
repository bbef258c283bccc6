"""Whose forward pass it is: policy, critic, reference, reward model.

Arguments that mean the same in every function here are explained once: `tokens` is
i32[B, S], padded on either side; `mask` is bool[B, S], True at tokens; columns before
`first_column` are not computed and are 0, so that the prompt's width gives the response
alone; `temperature` divides the logits, and is the same in every role; `model` is
static; `key` draws what is fresh; `base` and `lora` come with adapters, else they are
None, and one without the other, or adapters that do not fit, are an InputError.
"""
