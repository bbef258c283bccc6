"""The roles of models: policy, critic, reference, reward model.

These arguments mean the same in every function: `tokens` is i32[B, S], padded on either
side; `mask` is bool[B, S], True at tokens; columns before `first_column` are not
computed and are 0, so that the prompt's width gives the response alone; `temperature`
divides the logits, and is the same in every role; `model` is static; `key` draws new
parameters; `base` and `lora` are given with adapters and None without: one without the
other, or adapters that do not fit, raise an InputError; `fetch` reads an array on the
host, and is `processes.whole` where other processes may have it.
"""
