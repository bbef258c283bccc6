"""The PyTorch side of `benchmarks.logprobs`, which starts it; needs torch and NumPy.

It computes log_softmax, gather and the entropy, and the gradients in hidden states and
head by autograd.
"""

import json
import sys

import torch  # pyright: ignore[reportMissingImports]

from benchmarks import resident


def main(shape: dict[str, int], repeats: int) -> None:
    arrays = {name: torch.from_numpy(x) for name, x in resident.inputs(**shape).items()}
    hidden, head = arrays["hidden"], arrays["head"]
    tokens, weights = arrays["tokens"].long(), arrays["weights"]
    hidden.requires_grad_()
    head.requires_grad_()

    def step() -> list[torch.Tensor]:
        logits = hidden[:, :-1] @ head.T
        logprobs = torch.log_softmax(logits, dim=-1)
        picked = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = (weights[0, :, 1:] * picked + weights[1, :, 1:] * entropy).sum()
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, head))]

    measured = resident.measure(step, repeats=repeats)
    print(json.dumps({**measured, "version": torch.__version__}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
