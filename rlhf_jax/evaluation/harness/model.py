"""The policy as a model of lm-eval, which takes texts.

    policy = Policy("runs/ppo/model", batch_size=16)
    lm_eval.simple_evaluate(policy, tasks=["hellaswag"])

Texts are handled as by lm-eval's own `hf` model: special tokens, the prefix of an empty
context, windows of long texts, and where `until` ends a response.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhf_jax.checkpoints.pretrained import load
from rlhf_jax.data import tokenization
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.text import TextContract
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.evaluation.harness.programs import Draw, Likelihood, Programs
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import Attention
from rlhf_jax.models.generation.sampling import Shaping

try:
    from lm_eval import utils  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]
except ImportError as error:
    raise InputError(
        "rlhf_jax.evaluation.harness needs the package lm_eval, which is not "
        "installed; pip install 'rlhf-jax[lm-eval]'"
    ) from error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@register_model("rlhf_jax")
class Policy(TemplateLM):
    """A checkpoint in Hugging Face's layout, run by this package's decoder."""

    def __init__(
        self,
        pretrained: str,
        *,
        tokenizer: str | None = None,
        batch_size: int | str = 8,
        dtype: str = "float32",
        attention: Attention = "auto",
        mesh: str = "data=1",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Loads the checkpoint and its tokenizer.

        Args:
          pretrained, tokenizer: folder or hub id; a tokenizer of None is the one in
            `pretrained`.
          batch_size: rows per batch, a multiple of the mesh's row devices.
          dtype: dtype of activations; parameters are float32.
          attention: engine of the attention.
          mesh: device mesh, such as data=2,tensor=4; data=1 is the first device.
          max_length: largest number of tokens that the policy reads; None is its
            context.
          max_gen_toks: largest number of response tokens, unless the task sets it.
          add_bos_token: whether texts begin with BOS, even if the tokenizer adds none;
            None leaves it to the tokenizer.
          seed: seed of sampled responses.
          max_batch_size, device: ignored; lm-eval's command gives them to every model.
            JAX_PLATFORMS chooses the backend.

        Raises:
          InputError: the checkpoint, its tokenizer or the mesh does not fit, or an
            option has another value than these.
        """
        super().__init__()
        del max_batch_size, device
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(
                f"batch_size: expected rows at a time, at least 1, got {batch_size!r}; "
                f"give a number"
            )
        made = MeshShape.parse(mesh).make()
        self._start = load(
            pretrained,
            tokenizer=tokenizer,
            dtype=dtype,
            attention=attention,
            sharding=functools.partial(sharding.shardings, mesh=made),
        )
        if add_bos_token and self.tokenizer.bos_token_id is None:
            raise InputError(
                "add_bos_token: expected a tokenizer with a BOS token, got one "
                "without; leave it out"
            )
        self._name, self._max_gen_toks = pretrained, int(max_gen_toks)
        self._add_bos_token = add_bos_token
        self.batch_size = int(batch_size)
        self.max_length = self._start.limit(max_length)
        self._programs = Programs(
            self._start,
            mesh=made,
            batch_size=self.batch_size,
            max_length=self.max_length,
            seed=seed,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        return self._start.tokenizer

    @functools.cached_property
    def _contract(self) -> TextContract:
        return self._start.contract()

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's caches."""
        return self._name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The id of EOS.

        Raises:
          InputError: the tokenizer has no EOS.
        """
        return tokenization.eos_token_id(self.tokenizer)

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without a context: BOS, or else EOS."""
        bos = cast("int | None", self.tokenizer.bos_token_id)
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unread: Any
    ) -> Tokens:
        """Returns the token ids of a text.

        If `add_special_tokens` is None, the tokenizer and `add_bos_token` decide; a
        text that begins with BOS gets none. Further arguments of lm-eval are ignored.
        """
        del unread
        special = add_special_tokens
        if special is None:
            prefix = tokenization.decode(self.tokenizer, [self.prefix_token_id])
            special = self._add_bos_token is not False and not string.startswith(prefix)
        tokens = self._contract.written(string, special=special)
        bos = cast("int | None", self.tokenizer.bos_token_id)
        if special and self._add_bos_token and bos is not None and tokens[:1] != [bos]:
            return [bos, *tokens]
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders messages as one text, by the tokenizer's chat template.

        Without a generation prompt the last message is continued.
        """
        return self._contract.rendered(
            chat_history, continued=not add_generation_prompt
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Computes log π of whole texts, nats, with each token predicted once.

        A text longer than the model's context is read in windows, all of them full.
        """
        windows: list[tuple[Tokens, Tokens]] = []
        of_text: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(utils.make_disjoint_window(window))
                of_text.append(number)
        totals = [0.0] * len(requests)
        likelihoods = self._likelihoods(windows, disable_tqdm=disable_tqdm)
        for number, likelihood in zip(of_text, likelihoods, strict=True):
            totals[number] += likelihood.logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Generates responses, each cut before the first of its `until` texts.

        A response ends at EOS, at any other stop token of the checkpoint, and at a
        token whose own text contains one of `until`. If an `until` spans several
        tokens, further tokens are generated and then cut off.

        Args:
          requests: requests of lm-eval, each with a context and generation options:
            until, max_gen_toks, do_sample, temperature, top_k, top_p and min_p.

        Raises:
          InputError: there are other options, or the context has no room for responses.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="responses") as bar:
            for options, numbers in groups.items():
                until, draw = self._draw(json.loads(options))
                contexts = [
                    self.tok_encode(requests[number].args[0]) or [self.prefix_token_id]
                    for number in numbers
                ]
                for number, tokens in self._programs.responses(
                    contexts, numbers=numbers, draw=draw
                ):
                    text = self._start.decode([*tokens])
                    texts[number] = postprocess_generated_text(text, [*until], None)
                    bar.update()
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Tokens, Tokens]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        for (context, continuation), _, tokens in requests:
            if not tokens:  # its probability would be 1, above all others
                raise InputError(
                    f"continuation {continuation!r:.60} of {context[-40:]!r}: expected "
                    f"a token of its own, got none, as the tokenizer has none or joins "
                    f"it to the context; begin continuations with a space"
                )
        # lm-eval moves spaces at a context's end, perhaps all of it, to continuations.
        pairs = [
            (context or [self.prefix_token_id], continuation)
            for _, context, continuation in requests
        ]
        likelihoods = self._likelihoods(pairs, disable_tqdm=disable_tqdm)
        for (texts, _, _), likelihood in zip(requests, likelihoods, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(likelihood))
        return [(likelihood.logprob, likelihood.greedy) for likelihood in likelihoods]

    def _likelihoods(
        self, pairs: Sequence[tuple[Tokens, Tokens]], *, disable_tqdm: bool
    ) -> list[Likelihood]:
        computed = self._programs.likelihoods(pairs)
        answers = dict(
            tqdm(computed, total=len(pairs), disable=disable_tqdm, desc="likelihoods")
        )
        return [answers[number] for number in range(len(pairs))]

    def _draw(self, options: dict[str, Any]) -> tuple[list[str], Draw]:
        """Returns the texts that end a response, and how it is sampled."""
        kwargs = dict(normalize_gen_kwargs(options, self._max_gen_toks))
        until = [text for text in kwargs.pop("until") if text]
        max_new_tokens = kwargs.pop("max_gen_toks")
        sampled, temperature = kwargs.pop("do_sample"), kwargs.pop("temperature", 1.0)
        shaping = {name: kwargs.pop(name, None) for name in ("top_k", "top_p", "min_p")}
        for name in ("top_k", "min_p"):  # 0 is off in tasks, as in transformers
            shaping[name] = shaping[name] or None
        wrong = dict(kwargs)
        if max_new_tokens < 1:
            wrong["max_gen_toks"] = max_new_tokens
        if sampled and not temperature > 0:
            wrong["temperature"] = temperature
        if wrong:
            got = ", ".join(f"{name}={value!r:.80}" for name, value in wrong.items())
            raise InputError(
                f"gen_kwargs: expected until, max_gen_toks of at least 1, do_sample, a "
                f"temperature above 0 with it, top_k, top_p and min_p, got {got}; "
                f"correct them, or leave them out"
            )
        return until, Draw(
            max_new_tokens=max_new_tokens,
            stop_ids=tuple(sorted({*self._start.stop_ids, *self._ending(until)})),
            temperature=float(temperature) if sampled else 1.0,
            shaping=Shaping(**shaping) if sampled else Shaping(greedy=True),
        )

    def _ending(self, until: Sequence[str]) -> set[int]:
        return {
            token
            for token, text in self._token_texts.items()
            if any(end in text for end in until)
        }

    @functools.cached_property
    def _token_texts(self) -> dict[int, str]:
        ids = sorted(self.tokenizer.get_vocab().values())
        return {token: tokenization.decode(self.tokenizer, [token]) for token in ids}
