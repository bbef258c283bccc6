"""A reward of one response, for `--verifier my_reward`.

It runs in separate processes, which load no JAX. `row` has all fields of the row.
"""


def verify(prompt, response, row):
    """Returns 1.0 if a response of at most 200 characters contains the row's answer."""
    return float(row["answer"] in response and len(response) <= 200)
