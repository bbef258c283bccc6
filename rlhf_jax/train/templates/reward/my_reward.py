"""A reward of one response, as `--verifier my_reward`.

It runs in processes of its own, which load no JAX. `row` has all fields of the row.
"""


def verify(prompt, response, row):
    """1.0 where the row's answer stands in the response, in at most 200 characters."""
    return float(row["answer"] in response and len(response) <= 200)
