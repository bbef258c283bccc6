"""The data receipt, printed before a run: what is read, left out, cut and learned.

receipts = Receipts()
data = receipts.source("--data", "demos.jsonl")
rows = files.read_demonstrations("demos.jsonl", receipt=data)
examples = encoding.encode_demonstrations(tokenizer, rows, max_length=64, receipt=data)
data.use("training", items.of_texts(examples))
run.Run(options, num_steps=..., data=receipts.to_json(decode=...))
"""

from rlhf_jax.data.receipts.receipt import Receipt, Receipts

__all__ = ["Receipt", "Receipts"]
