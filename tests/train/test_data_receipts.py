"""data.json of every command and its printed form, before the first step."""

import json

import pytest
import toy_files

from rlhf_jax.environments.protocol import Started, Turn
from rlhf_jax.runs import receipt
from rlhf_jax.train import evaluate
from rlhf_jax.train.methods import distill, grpo, ppo
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = pytest.mark.usefixtures("quick_compilation")
slow = pytest.mark.slow
WORDS = [*toy_files.WORDS, "1"]
LONG = " ".join(["very"] * 30)  # of 16 tokens of context


class OneTurn:
    """Ends after one response."""

    def reset(self, row):
        return Started(row["prompt"], None)

    def step(self, state, response):
        return Turn("", float(len(response)), True, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model", words=WORDS, model=MODEL)
    pair = {"chosen": "sat .", "rejected": "ran", "by": "me"}
    toy_files.jsonl(
        folder / "pairs.jsonl",
        *({"prompt": word, **pair} for word in WORDS[:10]),
        {"prompt": LONG, **pair},
    )
    toy_files.jsonl(
        folder / "demos.jsonl",
        *({"prompt": word, "response": "sat .", "by": "me"} for word in WORDS[:10]),
        {"prompt": "a dog", "response": LONG},
    )
    questions = [
        {"prompt": word, "question": word, "answer": "#### 1", "by": "me"}
        for word in WORDS[:10]
    ]
    questions += [{**questions[0], "prompt": LONG, "question": LONG}] * 3
    toy_files.jsonl(folder / "questions.jsonl", *questions)
    (folder / "book.txt").write_text("the cat sat . " * 20)
    (folder / "shortness.py").write_text(
        "def score(prompts, responses, rows):\n    return [1.0] * len(prompts)\n"
    )
    return folder


MODEL = toy_files.config.gpt2(
    vocab_size=len(WORDS) + 2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    max_positions=16,
)


class Printed(Exception):
    """Raised once the run has printed its data, instead of beginning."""


@pytest.fixture
def begin(files, tmp_path, monkeypatch, capsys):
    """Runs a command until its first step: data.json by source, and its output."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    monkeypatch.syspath_prepend(files)
    tell = receipt.tell

    def stop(data):
        tell(data)
        raise Printed

    monkeypatch.setattr(receipt, "tell", stop)

    def run(command, *options):
        argv = [f"--model={files}/model", f"--out={tmp_path}/run", "--no-progress"]
        with pytest.raises(Printed):
            command.command([*argv, *(option.format(files) for option in options)])
        data = json.loads((tmp_path / "run" / "data.json").read_text())
        return (
            {source["name"]: source for source in data["sources"]},
            data,
            capsys.readouterr(),
        )

    return run


def check(source, file, *, read, left_out, uses, read_fields, unread=("by",)):
    """Counts of a source; `left_out` is {reason: (count, line)}."""
    assert source["read"] == read
    assert source["left_out"] == {
        reason: {"count": count, "first": f"{file}:{line}"}
        for reason, (count, line) in left_out.items()
    }
    assert {use: of["rows"] for use, of in source["uses"].items()} == uses
    assert source["fields"]["read"] == list(read_fields)
    assert tuple(source["fields"]["unread"]) == unread


@pytest.mark.slow
def test_sft(begin, files):
    sources, data, out = begin(
        *(sft, "--data={}/demos.jsonl", "--overlong=drop", "--held-out=0.2"),
        "--batch-size=2",
    )
    check(
        *(sources["--data"], files / "demos.jsonl"),
        read=11,
        left_out={"longer than 16 tokens": (1, 11)},
        uses={"training": 8, "held out": 2},
        read_fields=("prompt", "response"),
    )
    assert data["prompts_shared_with_training"] == {
        "--data, held out": {"shared": 0, "rows": 2}
    }
    assert sources["--data"]["uses"]["training"]["tokens_learned"] == 8 * 3
    assert "11 rows read, 10 used, 1 left out" in out.out
    assert "⟪ sat . <eos>⟫" in out.out


@pytest.mark.slow
def test_sft_of_plain_text(begin):
    sources, *_ = begin(sft, "--data={}/book.txt", "--batch-size=2")
    source = sources["--data"]
    assert source["called"] == "blocks of text"
    assert source["read"] == 6  # 80 tokens, 15 new ones in each
    assert sum(of["tokens_learned"] for of in source["uses"].values()) == 79


@pytest.mark.slow
def test_dpo(begin, files):
    sources, *_ = begin(
        *(dpo, "--data={}/pairs.jsonl", "--overlong=drop", "--held-out=0.2"),
        "--batch-size=2",
    )
    check(
        *(sources["--data"], files / "pairs.jsonl"),
        read=11,
        left_out={"longer than 16 tokens": (1, 11)},
        uses={"training": 8, "held out": 2},
        read_fields=("prompt", "chosen", "rejected"),
    )


@pytest.mark.slow
def test_kto(begin, files):
    sources, *_ = begin(
        *(dpo, "--kind=kto", "--data={}/pairs.jsonl", "--overlong=drop"),
        *("--held-out=0.2", "--batch-size=2"),
    )
    check(
        *(sources["--data"], files / "pairs.jsonl"),
        read=22,
        left_out={"longer than 16 tokens": (2, 11)},
        uses={"training": 16, "held out": 4},
        read_fields=("prompt", "chosen", "rejected"),
    )


@pytest.mark.slow
def test_a_reward_model_on_demonstrations(begin, files):
    sources, *_ = begin(
        *(reward_model, "--data={}/pairs.jsonl", "--overlong=drop", "--batch-size=2"),
        "--normalise=demonstrations,source={}/demos.jsonl",
    )
    check(
        *(sources["--data"], files / "pairs.jsonl"),
        read=11,
        left_out={"longer than 16 tokens": (1, 11)},
        uses={"training": 9, "held out": 1},
        read_fields=("prompt", "chosen", "rejected"),
    )
    check(
        *(sources["--normalise demonstrations"], files / "demos.jsonl"),
        read=11,
        left_out={"longer than 16 tokens": (1, 11)},
        uses={"normalised on": 10},
        read_fields=("prompt", "response"),
    )


@pytest.mark.slow
def test_a_reward_model_on_samples(begin, files, tmp_path):
    """A pair is trained on even if its prompt leaves no room for a sample."""
    near = {"prompt": "the cat sat on the dog", "chosen": "so", "rejected": "it"}
    rows = [{**near, "prompt": "the cat"}, near, {**near, "prompt": "a dog"}]
    toy_files.jsonl(tmp_path / "pairs.jsonl", *rows)
    sources, *_ = begin(
        *(reward_model, f"--data={tmp_path}/pairs.jsonl", "--batch-size=2"),
        *("--normalise=samples,max_new_tokens=12", "--held-out=0"),
    )
    assert sources["--data"]["uses"]["training"]["rows"] == 3
    check(
        *(sources["--data, to sample from"], tmp_path / "pairs.jsonl"),
        read=3,
        left_out={"no room for a response of 12 tokens": (1, 2)},
        uses={"normalised on": 2},
        read_fields=(),
        unread=(),
    )


def evaluated(begin, *options):
    return begin(
        *(evaluate, "--prompts={}/questions.jsonl", "--overlong=drop"),
        *("--max-new-tokens=4", *options),
    )


def test_evaluate(begin, files):
    sources, data, out = evaluated(
        *(begin, "--prompt-field=question", "--verifier=gsm8k"),
        *("--texts={}/demos.jsonl", "--num-texts=4"),
    )
    check(
        *(sources["--prompts"], files / "questions.jsonl"),
        read=13,
        left_out={"longer than 12 tokens": (3, 11)},
        uses={"evaluated": 10},
        read_fields=("question", "answer"),
        unread=("prompt", "by"),
    )
    check(
        *(sources["--texts"], files / "demos.jsonl"),
        read=11,
        left_out={
            "longer than 16 tokens": (1, 11),
            "after the first 4 asked for": (6, 5),
        },
        uses={"watched": 4},
        read_fields=("prompt", "response"),
    )
    assert data["prompts_shared_with_training"] == {}  # nothing is trained on
    assert "nothing of it is learned" in out.out


@pytest.mark.slow
def test_evaluate_gives_rows_to_a_reward(begin):
    sources, *_ = evaluated(begin, "--reward=shortness:score")
    fields = sources["--prompts"]["fields"]
    assert fields["whole_rows_given_to"] == ["--reward shortness:score"]
    assert fields["unread"] == {}


@slow
def test_evaluate_in_an_environment(begin):
    of_module = "test_data_receipts:OneTurn"
    sources, *_ = evaluated(begin, f"--environment={of_module}", "--num-workers=1")
    source = sources["--prompts"]
    assert (source["read"], source["used"]) == (13, 10)
    readers = source["fields"]["whole_rows_given_to"]
    assert readers == [f"--environment {of_module}"]


@slow
def test_ppo(begin, files):
    sources, data, _ = begin(
        *(ppo, "--prompts={}/questions.jsonl", "--overlong=drop"),
        *("--reward=shortness:score", "--texts=own={}/demos.jsonl", "--text-rows=3"),
        *("--ptx={}/demos.jsonl", "--ptx-coef=0.1", "--ptx-batch-size=2"),
        *("--batch-size=4", "--max-new-tokens=4", "--num-minibatches=1"),
    )
    check(
        *(sources["--prompts"], files / "questions.jsonl"),
        read=13,
        left_out={"longer than 12 tokens": (3, 11)},
        uses={"training": 10},
        read_fields=("prompt",),
        unread=(),
    )
    assert sources["--texts own"]["uses"]["watched"]["rows"] == 3
    assert sources["--ptx"]["uses"]["training"]["rows"] == 10
    assert data["prompts_shared_with_training"] == {
        "--texts own, watched": {"shared": 3, "rows": 3}
    }


@slow
@pytest.mark.parametrize("environment", [None, "test_data_receipts:OneTurn"])
def test_grpo(begin, files, environment):
    task = ("--held-out={}/questions.jsonl", "--held-out-rows=4", "--num-workers=1")
    if environment is None:
        task = (*task, "--prompt-field=question", "--verifier=gsm8k")
    else:
        task = (*task, f"--environment={environment},max_turns=1")
    sources, data, _ = begin(
        *(grpo, "--prompts={}/questions.jsonl", "--batch-size=4", "--group-size=2"),
        *("--max-new-tokens=4", "--num-steps=1", "--overlong=drop", *task),
    )
    too_long = {"longer than 12 tokens": (3, 11)}
    expected_fields = {"read_fields": (), "unread": ()}
    if environment is None:
        expected_fields = {
            "read_fields": ("question", "answer"),
            "unread": ("prompt", "by"),
        }
    check(
        *(sources["--prompts"], files / "questions.jsonl"),
        read=13,
        left_out=too_long,
        uses={"training": 10},
        **expected_fields,
    )
    check(
        *(sources["--held-out"], files / "questions.jsonl"),
        read=13,
        left_out=too_long | {"after the first 4 (--held-out-rows)": (6, 5)},
        uses={"held out": 4},
        **expected_fields,
    )
    assert data["prompts_shared_with_training"] == {
        "--held-out, held out": {"shared": 4, "rows": 4}
    }


@slow
def test_distill(begin, files):
    sources, *_ = begin(
        *(distill, "--reference={}/model", "--prompts={}/questions.jsonl"),
        *("--overlong=drop", "--batch-size=4", "--max-new-tokens=4", "--num-steps=1"),
    )
    check(
        *(sources["--prompts"], files / "questions.jsonl"),
        read=13,
        left_out={"longer than 12 tokens": (3, 11)},
        uses={"training": 10},
        read_fields=("prompt",),
        unread=("question", "answer", "by"),
    )
