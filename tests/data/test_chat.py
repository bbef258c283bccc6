"""Messages to tokens: the template's text, the end of an answer, and one BOS."""

import functools
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import toy_files
import transformers
from test_trainers import TOY_PPO, play

import rlhf_jax.train.supervised.sft
from rlhf_jax import config, sft
from rlhf_jax.data import batches, encoding, files, packing, tokenization
from rlhf_jax.data.examples import Example, Pair
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.data.text import TextContract, chat, templates
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.roles.rewards.text import read
from rlhf_jax.runs import metrics
from rlhf_jax.train.methods import ppo

CHATML = (  # as Qwen's
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind."
    "<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if date_string is defined %}{{ date_string }}{% endif %}"
    "{% for message in messages %}{{ '<|head|>' + message['role'] + '<|neck|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|neck|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == "
    "'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|head|>"]
SPECIAL += ["<|neck|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
IDS = {token: i for i, token in enumerate(SPECIAL)}
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
IDS |= {letter: i for i, letter in enumerate(LETTERS, start=len(IDS))}
IDS["ĊĊ"] = len(IDS)  # two line ends make one token, as in GPT-2 and those after it


def byte_tokenizer(template=None, *, adds_bos=False, eos="<eos>", pad="<pad>"):
    """A token a byte."""
    model = tokenizers.models.BPE(IDS, [("Ċ", "Ċ")])
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(SPECIAL)
    level = {"add_prefix_space": False, "use_regex": False}
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(**level)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", IDS["<bos>"])]
        )
    special = {"eos_token": eos, "bos_token": "<bos>", "pad_token": pad}
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    reader.chat_template = template
    return reader


def spelt(*pieces):
    """Ids of special tokens, and of texts letter by letter."""
    ids = []
    for piece in pieces:
        letters = piece.replace("\n", "Ċ").replace(" ", "Ġ")
        ids += [IDS[piece]] if piece in IDS else [IDS[letter] for letter in letters]
    return ids


def letters(text):
    """Ids of a text letter by letter, even where it spells a special token."""
    return [IDS[letter] for letter in text.replace("\n", "Ċ").replace(" ", "Ġ")]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


FAMILIES = {
    "chatml": (
        byte_tokenizer(CHATML, eos="<|im_end|>"),
        spelt("<|im_start|>", "system\nBe kind.", "<|im_end|>", "\n", "<|im_start|>")
        + spelt("user\nHi", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"),
        spelt("Yes", "<|im_end|>"),
    ),
    "llama": (
        byte_tokenizer(LLAMA, adds_bos=True, eos="<|eot_id|>"),
        spelt("<bos>", "26 Jul 2024", "<|head|>", "user", "<|neck|>", "ĊĊ", "Hi")
        + spelt("<|eot_id|>", "<|head|>", "assistant", "<|neck|>", "ĊĊ"),
        spelt("Yes", "<|eot_id|>"),
    ),
    "gemma": (
        byte_tokenizer(GEMMA, adds_bos=True, eos="<end_of_turn>"),
        spelt("<bos>", "<start_of_turn>", "user\nHi", "<end_of_turn>", "\n")
        + spelt("<start_of_turn>", "model\n"),
        spelt("Yes", "<end_of_turn>"),
    ),
}
for_each_family = pytest.mark.parametrize(
    ("reader", "prompt", "answer"), FAMILIES.values(), ids=FAMILIES
)
QWEN = FAMILIES["chatml"][0]


def demonstrate(reader, *rows, stop_ids=None):
    contract = TextContract(reader, stop_ids=stop_ids)
    return encoding.encode_demonstrations(contract, rows, limits=Limits(200))


@for_each_family
def test_a_demonstration_is_what_the_template_writes(reader, prompt, answer):
    conversation = [user("Hi")]
    rows = [
        {"prompt": conversation, "response": "Yes"},
        {"prompt": conversation, "response": [assistant("Yes")]},
    ]
    examples = demonstrate(reader, *rows)
    assert examples == [Example(prompt, answer)] * 2
    assert encoding.encode_prompts(TextContract(reader), rows, limits=Limits(99)) == (
        rows,
        [prompt] * 2,
    )
    whole = reader.apply_chat_template(
        [user("Hi"), assistant("Yes")], tokenize=False, date_string="26 Jul 2024"
    )
    # But for the line end that begins the next turn, which no model writes.
    assert reader.decode([*prompt, *answer]) == whole.rstrip("\n")
    batch = batches.sequences_in_order(examples, batch_size=2, pad_id=0)[0]
    np.testing.assert_array_equal(batch.tokens, [[*prompt, *answer]] * 2)
    read = [False] * len(prompt) + [True] * len(answer)
    np.testing.assert_array_equal(batch.response_mask, [read] * 2)


@for_each_family
def test_pairs_are_texts_or_messages(reader, prompt, answer):
    """TRL's formats: the prompt in its own field, or at the start of both sides."""
    conversation, no = [user("Hi")], [*spelt("No"), answer[-1]]
    rows = [
        {"prompt": conversation, "chosen": "Yes", "rejected": "No"},
        {"prompt": conversation, "chosen": [assistant("Yes")], "rejected": "No"},
    ]
    pairs = encoding.encode_preferences(TextContract(reader), rows, limits=Limits(200))
    assert pairs == [Pair(prompt, answer, no)] * 2


def test_gpt2s_tokens(shared_data):
    reader = tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")
    reader.add_special_tokens(
        {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    )
    reader.chat_template = CHATML
    row = {"prompt": [{"role": "system", "content": "Count."}, user("Hello, how are")]}
    start, end = 50257, 50258
    prompt = [start, 10057, 198, 12332, 13, end, 198, start, 7220, 198, 15496, 11, 703]
    prompt += [389, end, 198, start, 562, 10167, 198]
    row["response"] = "Hello, you"
    [example] = demonstrate(reader, row, stop_ids=(50256, end))
    assert example == Example(prompt, [15496, 11, 345, end])


def test_bos_is_never_doubled():
    """The template, the text or the tokenizer writes it, but only one of them."""
    rows = [{"prompt": [user("Hi")]}, {"prompt": "<bos>Hi"}, {"prompt": "Hi"}]
    bos, hi = IDS["<bos>"], spelt("Hi")
    for template, written in ((GEMMA, 1), (CHATML, 0)):
        for adds in (True, False):
            reader = byte_tokenizer(template, adds_bos=adds)
            _, tokens = encoding.encode_prompts(
                TextContract(reader), rows, limits=Limits(99)
            )
            assert tokens[0].count(bos) == written
            assert tokens[0][written] in spelt("<start_of_turn>", "<|im_start|>")
            assert tokens[1:] == [[bos, *hi], [bos, *hi] if adds else hi]


def test_a_second_bos_is_text():
    _, [tokens] = encoding.encode_prompts(
        TextContract(byte_tokenizer()), [{"prompt": "<bos><bos>Hi"}], limits=Limits(99)
    )
    assert tokens == [IDS["<bos>"], *letters("<bos>Hi")]


def test_a_prompt_is_the_same_on_another_day():
    reader = byte_tokenizer("{{ strftime_now('%d %B %Y') }}" + CHATML)
    row = {"prompt": [user("Hi")]}
    _, [tokens] = encoding.encode_prompts(
        TextContract(reader), [row], limits=Limits(99)
    )
    assert tokens[:11] == spelt("26 Jul 2024")


def test_an_answer_ends_once_with_any_of_the_stop_ids():
    stop_ids = spelt("<eos>", "<|im_end|>")
    texts = ["Yes", "Yes<|im_end|>", "Yes<eos>", "", "<|im_end|>Yes"]
    plain = demonstrate(
        byte_tokenizer(),
        *({"prompt": "Hi", "response": text} for text in texts),
        stop_ids=stop_ids,
    )
    yes, eos, end = spelt("Yes"), *([i] for i in stop_ids)
    assert [example.response for example in plain] == [
        *([*yes, *eos], [*yes, *end], [*yes, *eos], eos),
        [*letters("<|im_end|>Yes"), *eos],  # text, as it is not at the end
    ]
    # By hand in front of the template's; the tokenizer's own EOS is another one.
    row = {"prompt": [user("Hi")], "response": "Yes<|im_end|>"}
    [example] = demonstrate(byte_tokenizer(CHATML), row, stop_ids=stop_ids)
    assert example.response == [*yes, *end]


@for_each_family
def test_prompts_whose_responses_never_end_are_noted(reader, prompt, answer):
    def notes(**stops):
        receipt = Receipts().source("--prompts", "p.jsonl")
        rows = [{"prompt": "a text"}, {"prompt": [user("Hi")]}, {"prompt": [user("a")]}]
        contract = TextContract(reader, receipt=receipt, **stops)
        encoding.encode_prompts(contract, rows, limits=Limits(99))
        return receipt.to_json()["notes"]

    assert notes() == notes(stop_ids=[IDS["<eos>"], answer[-1]]) == {}
    [note] = notes(stop_ids=[IDS["<eos>"]])  # as of a tokenizer with another EOS
    assert note.startswith("the chat template ends a response with no stop token of")


OVER = "<|im_end|>Over.<|im_end|>"
MESSY = {"prompt": [user("Hi")], "response": "Yes"}


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        (
            byte_tokenizer(),
            MESSY,
            r"row 1 \(from 0\): expected a tokenizer with a chat template, .* save the",
        ),
        (
            FAMILIES["gemma"][0],
            MESSY | {"prompt": [{"role": "system", "content": "Be"}, user("Hi")]},
            r"row 1 .*, got the roles system, user, assistant, of which it says: S"
            "ystem role not supported; change the messages",
        ),
        (
            byte_tokenizer(CHATML.replace("assistant\n", "model\n"), eos="<|im_end|>"),
            MESSY,
            r"row 1 .* begin as its prompt does, got 'assistant\\nYes<\|im_end\|>\\n' "
            r"where the chat template asks for a response with 'model\\n'; use a",
        ),
        (
            byte_tokenizer(CHATML),
            MESSY,
            r"row 1 .* stop ids, '<eos>' \(1\), got 'es<\|im_end\|>\\n' at the end",
        ),
        (
            byte_tokenizer(
                CHATML.replace(
                    "'<|im_end|>\n' }}{% endfor", f"'{OVER}\n' }}}}{{% endfor"
                ),
                eos="<|im_end|>",
            ),
            MESSY,
            r"row 1 .* got '<\|im_end\|>' \(4\) before 'Over.\\n'; remove it",
        ),
        (
            byte_tokenizer(
                CHATML.replace(
                    "message['content']", "message['content'].split('</t>')[-1]"
                ),
                eos="<|im_end|>",
            ),
            MESSY | {"response": "Let me see</t>Yes"},
            r"row 1 .* leaves out a part of 'Let me see</t>Yes'; use a template that",
        ),
    ],
)
def test_conversations_that_a_template_does_not_take(reader, row, message):
    plain = {"prompt": "Hi", "response": "Yes"}
    with pytest.raises(InputError, match=message):
        demonstrate(reader, plain, row)


def test_masks_come_from_lengths_where_the_padding_is_a_real_token():
    """The padding token is EOS, or the first token of every prompt."""
    rows = [MESSY, MESSY | {"response": "No, never"}, MESSY | {"prompt": [user("I")]}]
    examples = demonstrate(QWEN, *rows)
    pairs = [Pair(p, r, [*spelt("No"), r[-1]]) for p, r in examples]
    prompts = [example.prompt for example in examples]

    def made(pad_id):
        stream = {"seed": 0, "pad_id": pad_id}
        rows = packing.pack(pairs, width=200)
        texts = packing.pack_examples(examples, width=120)
        sides = batches.preference_batches(pairs, batch_size=3, **stream)[0]
        return [
            batches.prompt_batches(prompts, batch_size=3, **stream)[0],
            batches.sequence_batches(examples, batch_size=3, **stream)[0],
            packing.sequence_batches(texts, batch_size=len(texts), **stream)[0],
            packing.packed_batches(rows, batch_size=len(rows), **stream)[0],
            *(sides.chosen, sides.rejected),
        ]

    by_eos, by_start, apart = map(made, spelt("<|im_end|>", "<|im_start|>", "<pad>"))
    for spoilt in (by_eos, by_start):
        for one, other in zip(spoilt, apart, strict=True):
            np.testing.assert_array_equal(one.mask, other.mask)
            np.testing.assert_array_equal(one.tokens[one.mask], other.tokens[one.mask])
            assert not one.mask.all()
    for one, other in zip(by_eos[1:], apart[1:], strict=True):
        np.testing.assert_array_equal(one.response_mask, other.response_mask)
        ends = one.tokens[one.response_mask] == QWEN.eos_token_id
        assert ends.sum() in (len(pairs), 2 * len(pairs)), "an end for every answer"
    reader = byte_tokenizer(CHATML, eos="<|im_end|>", pad="<|im_end|>")
    assert tokenization.pad_token_id(reader) == tokenization.eos_token_id(reader)


@pytest.mark.slow
def test_a_packed_conversation_has_the_loss_of_one_alone():
    """So is the gradient; without segments it would attend to its neighbours."""
    answers = ["Yes", "No, never", "So", "Why not?"]
    examples = demonstrate(QWEN, *(MESSY | {"response": text} for text in answers))
    # Of a text without a prompt nothing predicts the first token, not even a neighbour.
    examples += [Example((), spelt(text)) for text in ("a block", "of text")]
    stream = {"seed": 0, "pad_id": 0}
    rows = packing.pack_examples(examples, width=100)
    assert [row.places for row in rows] == [(0, 1, 4), (2, 3, 5)]
    packed = packing.sequence_batches(rows, batch_size=len(rows), **stream)[0]
    alone = batches.sequence_batches(examples, batch_size=6, **stream)[0]
    assert packed.response_mask.sum() == alone.response_mask.sum()
    model = config.gpt2(
        vocab_size=len(IDS), hidden_size=8, num_layers=1, num_heads=2, max_positions=64
    )
    params = toy_files.params(model)
    loss = functools.partial(sft.loss, model=model, num_tokens=jnp.float32(1))
    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (loss_of_packed, stats), gradient = loss(params, packed)
    (expected, others), slope = loss(params, alone)
    np.testing.assert_allclose(loss_of_packed, expected, rtol=1e-5)
    assert stats["loss/language_model"][1] == others["loss/language_model"][1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        *(gradient, slope),
    )


def test_a_python_reward_gets_the_messages_and_a_readable_text():
    row = {"prompt": [user("Hi")], "wanted": "Yes"}
    rows, [prompt] = encoding.encode_prompts(
        TextContract(QWEN), [row], limits=Limits(99)
    )
    assert rows == [row]
    answer = spelt("Yes", "<|im_end|>")
    tokens = jnp.asarray([[*prompt, *answer, IDS["<|im_end|>"]]])
    place = jnp.arange(tokens.shape[1])[None]
    mask = place < len(prompt) + len(answer)
    answered = types.SimpleNamespace(
        tokens=tokens,
        mask=mask,
        response_mask=mask & (place >= len(prompt)),
        index=jnp.zeros(1, jnp.int32),
    )

    def decode(ids):
        return tokenization.spoken(QWEN, ids, stop_ids=spelt("<|im_end|>"))

    texts = read(answered, decode=decode, rows=rows, prompts=[row["prompt"]])
    got = texts.prompts, texts.responses, texts.rows
    assert got == ([[user("Hi")]], ["Yes"], [row])
    shown = (
        "<|im_start|>system\nBe kind.\n<|im_start|>user\nHi\n<|im_start|>assistant\n"
    )
    assert transcripts.texts(answered, decode=decode) == [(shown, "Yes")]


def written(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


PROMPT = [{"role": "system", "content": "Be"}, user("Hi"), assistant("Yes"), user("So")]


def test_whole_conversations_are_cut_before_their_last_turn(tmp_path):
    chosen, rejected = [assistant("a")], [assistant("b")]
    file = written(tmp_path, {"messages": [*PROMPT, *chosen], "id": 1})
    [row] = files.read_demonstrations(file, prompt="q", response="a")
    assert (row["q"], row["a"], row["id"]) == (PROMPT, chosen, 1)
    file = written(
        tmp_path,
        {"chosen": [*PROMPT, *chosen], "rejected": [*PROMPT, *rejected]},
        {"prompt": PROMPT, "chosen": chosen, "rejected": [assistant(" ")]},
    )
    cut = {"prompt": PROMPT, "chosen": chosen, "rejected": rejected}
    assert files.read_preferences(file, blank="drop") == [cut]


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (
            files.read_prompts,
            {"prompt": [{"role": "user"}]},
            r'as {"role": "user", "content": "Hi"} in \'prompt\', got .* whose content',
        ),
        (
            files.read_prompts,
            {"prompt": [{"role": "user", "content": [{"type": "text"}]}]},
            "whose content is not a text",
        ),
        (files.read_prompts, {"prompt": []}, "in 'prompt', got an empty list; remove"),
        (
            files.read_prompts,
            {"prompt": [user(" ")]},
            "a prompt in 'prompt', got an em",
        ),
        (
            files.read_prompts,
            {"prompt": [user("Hi"), assistant("Yes")]},
            "messages that wait for the assistant in 'prompt', got its turn as the las",
        ),
        (
            files.read_demonstrations,
            {"prompt": [user("Hi")], "response": assistant("Yes")},
            "text or messages in 'response', got dict .*; make it a text, or a list",
        ),
        (
            files.read_demonstrations,
            {"messages": [user("Hi")]},
            "a conversation in 'messages' that ends .* the roles user; cut it after",
        ),
        (
            files.read_demonstrations,
            {"messages": [user("Hi"), assistant("Yes"), user("So")]},
            "a conversation in 'messages' .* got the roles user, assistant, user; cut",
        ),
        (
            files.read_preferences,
            {"prompt": [user("Hi")]}
            | {"chosen": [user("Hi"), assistant("a")], "rejected": [assistant("b")]},
            "one message of the assistant in 'chosen', got user, assistant; its earl",
        ),
        (
            files.read_preferences,
            {"prompt": "Hi", "chosen": [assistant("a")], "rejected": [assistant("b")]},
            "text in 'chosen', as its prompt is one, got messages; give both",
        ),
        (
            files.read_preferences,
            {"chosen": [user("Hi"), assistant("a")]}
            | {"rejected": [user("Ho"), assistant("b")]},
            "conversations that differ in their last turn alone, .* cut them where",
        ),
        (
            files.read_preferences,
            {"chosen": [user("Hi"), assistant("a")], "rejected": "b"},
            "a conversation as messages in 'rejected', got the text 'b'; give that",
        ),
    ],
)
def test_messages_that_are_no_prompt_or_no_answer(tmp_path, read, row, message):
    with pytest.raises(InputError, match=f"rows.jsonl:1: expected .*{message}"):
        read(written(tmp_path, row))


TURNS = {"the cat": "sat", "a dog": "ran so"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(a small model after SFT on packed conversations, its output)."""
    folder = tmp_path_factory.mktemp("chat")
    model = toy_files.checkpoint(folder / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '? ' if m.role == 'user' else '. ' }}{{ m.content }}"
        "{{ ' <eos> ' }}{% endfor %}{% if add_generation_prompt %}{{ '. ' }}{% endif %}"
    )
    turns = [{"messages": [user(q), assistant(a)]} for q, a in TURNS.items()]
    summary = play(
        *(
            rlhf_jax.train.supervised.sft,
            folder / "run",
            "--model",
            model,
            "--row-width=24",
        ),
        *("--data", toy_files.jsonl(folder / "data.jsonl", *turns * 8)),
        *("--batch-size=4", "--micro-batch-size=2", "--num-steps=100"),
        "--held-out-by=row",  # there are two prompts
        "--learning-rate=3e-2",
    )
    return folder / "run" / "model", summary


@pytest.mark.slow
def test_sft_learns_packed_conversations(tuned):
    folder, summary = tuned
    assert summary["held_out_loss"] < 0.02 < summary["held_out_loss_before"]
    reader = tokenization.load_tokenizer(folder)  # its template went along
    rows = [{"prompt": [user("a dog")], "response": "ran so"}]
    assert demonstrate(reader, *rows) == [
        Example(
            reader("? a dog<eos>.")["input_ids"], reader("ran so<eos>")["input_ids"]
        )
    ]


@pytest.mark.slow
def test_ppo_asks_with_messages(tuned, tmp_path, monkeypatch):
    """The reward reads them too."""
    (tmp_path / "judging.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    assert prompts == [row['prompt'] for row in rows]\n"
        "    asked = [messages[-1]['content'] for messages in prompts]\n"
        "    return [len(a) + len(r) / 100 for a, r in zip(asked, responses)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = [{"prompt": [user(question)]} for question in TURNS]
    out = tmp_path / "ppo"
    play(
        *(ppo, out, "--model", tuned[0], *TOY_PPO),
        *("--prompts", toy_files.jsonl(tmp_path / "prompts.jsonl", *prompts)),
        *("--reward=judging:score", "--num-steps=1"),
    )
    samples = metrics.read(out / "samples.jsonl")
    assert {row["prompt"][0]["content"] for row in samples} == {*TURNS}
    for row in samples:  # what it has learned, and where it ends
        [message] = row["prompt"]
        question = message["content"]
        assert row["response"] == TURNS[question]
        expected = len(question) + len(row["response"]) / 100
        assert row["score"] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**10 }}", "it takes more than 1024 MiB of memory"),
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for i in range(40) %}"
            "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
            "it takes (longer than 2 s|more than 1024 MiB)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{{ 'a' * 20000000 }}",
            "it writes more than 10000000 characters",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}"
            "{% endfor %}",
            "it takes longer than 2 s",
            id="time",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{{ 10**(10**10) }}",
            "it takes (longer than 2 s|more than 1024 MiB)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "it calls itself without",
            marks=pytest.mark.slow,
        ),
        ("{% if %}", "Expected an expression"),
        pytest.param(
            "{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}",
            "unsafe|no",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_template_has_limits_of_time_and_memory(monkeypatch, template, message):
    monkeypatch.setattr(templates, "SECONDS", 2.0)
    templates.stop()  # its limit is another
    reader = byte_tokenizer(template)
    started = time.perf_counter()
    with pytest.raises(InputError, match=rf"^expected messages .*says: .*{message}"):
        chat.render(reader, [user("Hi")])
    assert time.perf_counter() - started < 30
    # The next one is written as ever.
    whole = byte_tokenizer(CHATML)
    expected = whole.apply_chat_template(
        [user("Hé")], tokenize=False, add_generation_prompt=True
    )
    assert chat.render(whole, [user("Hé")]) == expected
    templates.stop()


@pytest.mark.slow
def test_a_thousand_conversations_are_written_quickly():
    reader = byte_tokenizer(CHATML)
    chat.render(reader, [user("Hi")])  # starts the process
    started = time.perf_counter()
    for number in range(1_000):
        text = chat.render(reader, [user(f"Hi {number}")])
        assert f"Hi {number}" in text
    assert time.perf_counter() - started < 10
