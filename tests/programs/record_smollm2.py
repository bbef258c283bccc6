"""Log-probs of SmolLM2 by transformers, for `tests/experiments/test_smollm2.py`.

    python tests/programs/record_smollm2.py FOLDER tests/fixtures/smollm2.json

FOLDER is what `python experiments pretrained.smollm2` writes. Needs torch, of the extra
`parity`: float32, eager attention.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

CONVERSATIONS = (
    [{"role": "user", "content": "What is 12 + 7?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Japan, in 1,950 A.D.?"},
    ],
)
TEXTS = ("The cat sat on 345 mats — naïve, isn't it? 🙂\n\n    return x[0] + 10",)


def main() -> None:
    """Writes the ids of some texts and the log-prob of each id after the first."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    texts = [
        *TEXTS,
        *(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            for messages in CONVERSATIONS
        ),
    ]
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            table = model(ids).logits.log_softmax(-1)[0, :-1]
        picked = table[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        rows.append(
            {
                "text": text,
                "ids": ids[0].tolist(),
                "logprobs": [round(value, 6) for value in picked.tolist()],
            }
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    out.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
