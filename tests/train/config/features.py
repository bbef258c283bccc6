"""Options of every method as users write them, and the front page's matrix."""

METHODS = ("ppo", "grpo", "reinforce", "online-dpo", "nash-md", "distill")
OPTIONS = {
    "reward models, ensembles": "--reward-model a+b,combine=minimum",
    "Python function": "--reward my:score",
    "verifier": "--verifier gsm8k",
    "weighted lists of rewards": "--rewards a=verifier:exact b=length,weight=-0.01",
    "LoRA": "--lora 16",
    "storage of the reference": "--reference-storage.dtype int8",
    "reference that moves": "--lifecycle.move reset,every=10",
    "another reference": "--reference other",
    "further references": "--references other=o,weight=0.5",
    "reference on devices of its own": "--placement.reference last:data=1",
    "KL control": "--kl-control adaptive,target=6,unit=response",
    "optimizer, schedule": "--optimizer adamw,weight_decay=0.1 --schedule cosine",
    "texts mixed in (PTX)": "--ptx t --ptx-coef 1",
    "environment": "--environment rooms",
    "sampler in another dtype": "--sampler here,dtype=int8",
    "sampler in a process": "--sampler process",
    "sampler on a server": "--sampler http://localhost:1,model=m",
    "stale sampler": "--max-staleness 2",
    "groups of equal rewards drawn again": "--max-redraws 2",
    "packing, token budget": "--packing auto,max_tokens_per_device=4096",
    "mesh": "--placement.policy fsdp=4,tensor=2",
    "held-out evaluation": "--held-out h --held-out-every 10 --held-out-samples 4",
    "perplexity on your texts": "--texts code=c",
    "judge": "--judge my:judge",
    "samples beside the reference's": "--sample-reference --num-alternatives 3",
    "alarms that stop": "--alarms.stop kl",
}


def matrix(refused):
    """The Markdown table of options that some method refuses; numbers are reasons.

    Args:
      refused: (method, options) -> the reasons of a refusal.
    """
    reasons, lines = [], []
    for feature, options in OPTIONS.items():
        cells = []
        for name in METHODS:
            why = refused(name, options)
            reasons += [reason for reason in why if reason not in reasons]
            numbers = [str(reasons.index(reason) + 1) for reason in why]
            cells.append(", ".join(numbers) or "✓")
        if set(cells) != {"✓"}:
            lines.append(f"| {feature} | {' | '.join(cells)} |")
    notes = " ".join(f"{i}: {reason}." for i, reason in enumerate(reasons, start=1))
    header = [f"| | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    return "\n".join([*header, *lines, "", notes])
