"""Small tokenizers with the traits that have caused lost text."""

from typing import NamedTuple

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ġ", "4"), ("Ċ", "Ċ"), ("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("b", "a")]
LETTERS = [chr(code) for code in range(33, 127)]
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n'"
    " }}{% endif %}{% for d in documents or [] %}{{ '<|im_start|>document\n' + d.text"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As Qwen3's: what an earlier turn thought is left out.
THINKING = CHATML.replace(
    "m.content +",
    "(m.content if loop.last or m.role != 'assistant' else"
    " m.content.split('</think>')[-1].lstrip('\n')) +",
)
CHAT = ("<|im_start|>", "<|im_end|>")


class Trait(NamedTuple):
    """A tokenizer and its stop tokens."""

    tokenizer: transformers.PreTrainedTokenizerFast
    stops: tuple[str, ...]

    @property
    def stop_ids(self) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids([*self.stops])


def finished(backend, *, single=None, added=(), plain=(), template=None, **special):
    """Adds special and ordinary tokens, a post-processor and a chat template."""
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in added]
    )
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in plain]
    )
    if single is not None:
        tokens = [token for token in single.split() if token != "$A"]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=single,
            special_tokens=[(token, backend.token_to_id(token)) for token in tokens],
        )
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    reader.chat_template = template
    return reader


def byte_level():
    """One token per byte, and a few merges, some with a leading blank."""
    merged = [one + other for one, other in MERGES]
    vocabulary = {text: i for i, text in enumerate([*ALPHABET, *merged])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def prefix_space(*, metaspace=False):
    """Like Llama 2's: a leading blank in every text, and bytes for unknown letters."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    names += [f"▁{letter}" for letter in LETTERS]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(
        vocabulary,
        [("▁", letter) for letter in LETTERS],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def zoo():
    """{trait: tokenizer}."""
    eos, bos = "<|eos|>", "<|bos|>"
    ends = {"added": (eos,), "eos_token": eos}
    llama = {"added": ("<s>", "</s>"), "bos_token": "<s>", "eos_token": "</s>"}
    chat = {"added": (*CHAT, eos), "eos_token": "<|im_end|>", "template": CHATML}
    return {
        "byte level": Trait(finished(byte_level(), **ends), (eos,)),
        "prefix space": Trait(finished(prefix_space(), **llama), ("</s>",)),
        "prefix space and BOS": Trait(
            finished(prefix_space(), single="<s> $A", **llama), ("</s>",)
        ),
        "metaspace": Trait(finished(prefix_space(metaspace=True), **llama), ("</s>",)),
        "closes with EOS": Trait(
            finished(byte_level(), single=f"$A {eos}", **ends), (eos,)
        ),
        "BOS and EOS": Trait(
            finished(
                byte_level(),
                single=f"{bos} $A {eos}",
                added=(bos, eos),
                bos_token=bos,
                eos_token=eos,
            ),
            (eos,),
        ),
        "BOS is EOS": Trait(
            finished(byte_level(), single=f"{eos} $A", bos_token=eos, **ends), (eos,)
        ),
        "EOS is padding": Trait(finished(byte_level(), pad_token=eos, **ends), (eos,)),
        "tags": Trait(
            finished(byte_level(), added=(eos, "<think>", "</think>"), eos_token=eos),
            (eos,),
        ),
        "a stop token that is not special": Trait(
            finished(byte_level(), plain=("<|end|>",), **ends), ("<|end|>", eos)
        ),
        "chat": Trait(finished(byte_level(), **chat), ("<|im_end|>", eos)),
        "chat with a prefix space": Trait(
            finished(prefix_space(), **chat), ("<|im_end|>", eos)
        ),
        "thinking": Trait(
            finished(
                byte_level(),
                plain=("<think>", "</think>"),
                **chat | {"template": THINKING},
            ),
            ("<|im_end|>", eos),
        ),
    }
