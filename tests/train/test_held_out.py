"""Every trainer with held-out rows holds them out by prompt."""

import dataclasses
import json
import typing

import pytest
import tokenizers
import toy_files

from rlhf_jax.algorithms.dpo import PreferenceKind
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import digests, splits
from rlhf_jax.train.config.models import Start
from rlhf_jax.train.config.supervised import Rows
from rlhf_jax.train.supervised import (
    demonstrations,
    dpo,
    preferences,
    reward_model,
    sft,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
START = Pretrained(
    model=toy_files.MODEL, params=None, tokenizer=toy_files.tokenizer(), stop_ids=(1,)
)
PROMPTS = toy_files.WORDS[:20]
RESPONSES = (". good", "? .", ". on", "? in")
KINDS = typing.get_args(PreferenceKind)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four pairs and responses per prompt; and a file with one prompt alone."""
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    for name, prompts in (("many", PROMPTS), ("one", ["the cat"])):
        rows = [
            {
                "prompt": prompt,
                "response": response,
                "chosen": response,
                "rejected": f"{response} bad",
            }
            for prompt in prompts
            for response in RESPONSES
        ]
        toy_files.jsonl(folder / f"{name}.jsonl", *rows)
    return folder


READS = {
    sft: demonstrations.Demonstrations,
    reward_model: reward_model.Pairs,
    dpo: preferences.Preferences,
}


def in_folder(command, files, tmp_path, *, data, **options):
    start = sft.Start if command is sft else Start
    return command.Config(
        start=start(model=str(files / "model")),
        data=READS[command](data=str(files / f"{data}.jsonl")),
        out=tmp_path / "run",
        progress=False,
        **options,
    )


def of_kind(kind, files, tmp_path, *, data):
    config = in_folder(dpo, files, tmp_path, data=data)
    loss = {"kind": kind} | ({"label_smoothing": 0.1} if kind == "robust" else {})
    return dataclasses.replace(
        config, method=dataclasses.replace(config.method, **loss)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_of_dpo_is_on_both_sides(kind, files, tmp_path):
    config = of_kind(kind, files, tmp_path, data="many")
    labelled = kind == "kto"
    rows = preferences.read(config.data, labelled=labelled)
    trained, held_out = preferences.encode(rows, config=config, start=START)
    sides = (trained.digested, held_out.digested)
    num_texts = 8 if kind == "kto" else 4
    assert [len(side) for side in sides] == [18 * num_texts, 2 * num_texts]
    assert not set.intersection(*({*map(digests.of_prompt, one)} for one in sides))
    assert len({*splits.numbered(row.prompt for row in held_out.digested)}) == 2


def examples_of(config, start):
    rows = demonstrations.read(config.data)
    return demonstrations.encode(rows, options=config.data, start=start)


def test_no_prompt_of_sft_is_on_both_sides(files, tmp_path):
    config = in_folder(sft, files, tmp_path, data="many")
    examples = examples_of(config, START)
    sides = sft.split(examples, config, START)
    assert sorted([*sides[0], *sides[1]]) == sorted(examples)
    assert [len(side) for side in sides] == [76, 4]
    assert not set.intersection(*({*map(digests.of_prompt, one)} for one in sides))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sft", "reward_model", "dpo"])
def test_rows_of_one_prompt_are_all_trained_on_and_the_receipt_says_so(
    trainer, files, tmp_path, capsys
):
    run, config = {
        "sft": (sft.main, in_folder(sft, files, tmp_path, data="one")),
        "reward_model": (
            reward_model.main,
            in_folder(
                *(reward_model, files, tmp_path),
                data="one",
                method=reward_model.Method(normalise=None),
            ),
        ),
        "dpo": (dpo.main, of_kind("sigmoid", files, tmp_path, data="one")),
    }[trainer]
    run(dataclasses.replace(config, batch=Rows(batch_size=2), num_steps=1))
    data = json.loads((config.out / "data.json").read_text())["sources"][0]
    assert {use: of["rows"] for use, of in data["uses"].items()} == {
        "training": 4,
        "held out": 0,
    }
    (reason,) = data["notes"]
    assert reason.startswith("rows of one prompt, of which none is held out")
    assert ("--held-out-by row" in reason) == (trainer == "sft")
    assert reason in capsys.readouterr().out


def with_bos():
    """The toy tokenizer with BOS before every text."""
    fast = toy_files.tokenizer(["<bos>", *toy_files.WORDS])
    bos = fast.convert_tokens_to_ids("<bos>")
    fast.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    fast.bos_token = "<bos>"
    return fast, bos


def test_rows_without_a_prompt_do_not_share_one(files, tmp_path):
    tokenizer, bos = with_bos()
    assert sft.no_prompt(START) == []
    start = START._replace(tokenizer=tokenizer)
    assert sft.no_prompt(start) == [bos]
    rows = [{"prompt": "", "response": word} for word in toy_files.WORDS]
    data = toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    watch = sft.Watch(held_out=0.5)
    config = in_folder(sft, files, tmp_path, data="many", watch=watch)
    data = demonstrations.Demonstrations(data=str(data))
    config = dataclasses.replace(config, data=data)
    sides = sft.split(examples_of(config, start), config, start)
    assert [len(side) for side in sides] == [11, 11]
