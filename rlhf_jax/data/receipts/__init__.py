"""The data receipt, printed before a run: what is read, left out, cut and learned.

receipts = Receipts()
data = receipts.source("--data", "demos.jsonl")
rows = files.read_demonstrations("demos.jsonl", receipt=data)
contract = TextContract(tokenizer, receipt=data)
examples = encoding.encode_demonstrations(contract, rows, limits=Limits(64))
data.use("training", items.of_texts(examples))
run.Run(options, num_steps=..., data=receipts.to_json(decode=...))
"""

from rlhf_jax.data.receipts.receipt import Receipt, Receipts

__all__ = ["Receipt", "Receipts"]
