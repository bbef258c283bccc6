"""Human preferences on a real model: pairs, their split, sweeps and figures."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import places
import pytest
import tokenizer_zoo
import toy_files
from studies.preferences import (
    accuracy,
    dialogues,
    evaluation,
    figures,
    frontier,
    preparation,
    results,
    texts,
)

from rlhf_jax import config, hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train.evaluate.options import Config as Evaluation
from rlhf_jax.train.main import TRAINERS

STUDY = places.EXPERIMENTS / "studies" / "preferences"
SWEEPS = ("sweep", "dpo", "smallest", "smallest_dpo")

# --- pairs ------------------------------------------------------------------------


def row(prompt, chosen="Yes.", rejected="No."):
    return {
        side: f"{prompt}\n\nAssistant:{response}"
        for side, response in (("chosen", chosen), ("rejected", rejected))
    }


def test_a_dialogue_becomes_messages():
    one = dialogues.pair(
        row("\n\nHuman: Hi \n\nAssistant: Hello\n\nHuman: Why?", " A\n\nB ", " No. ")
    )
    assert one == {
        "prompt": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Why?"},
        ],
        "chosen": "A\n\nB",
        "rejected": "No.",
    }


def test_a_speaker_within_a_turn_is_what_somebody_wrote():
    written = "You said Human: yes.\nHuman: and\n\nHumans: no"
    one = dialogues.pair(row(f"\n\nHuman: {written}", " Assistant: ok", " Human: no"))
    assert one == {
        "prompt": [{"role": "user", "content": written}],
        "chosen": "Assistant: ok",
        "rejected": "Human: no",
    }


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (row("\n\nHuman: Hi\n\nAssistant: A\n\nAssistant: B"), "take turns"),
        (row("\n\nHuman: Hi\n\nAssistant: A"), "take turns"),
        (row("\n\nHuman: Hi\n\nHuman: Ho"), "take turns"),
        (row("\n\nAssistant: Hi\n\nHuman: Ho"), "take turns"),
        (row("before\n\nHuman: Hi"), "take turns"),
        (row("\n\nHuman: Hi\n\nAssistant: \n\nHuman: Ho"), "a turn is blank"),
        (row("\n\nHuman: Hi", " A\n\nHuman: B"), "another turn"),
        (row("\n\nHuman: Hi", " \n "), "response is blank"),
        (row("\n\nHuman: Hi", " Yes. ", "Yes."), "equal"),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b",
                "rejected": "\n\nHuman: c\n\nAssistant: b",
            },
            "differ before",
        ),
    ],
)
def test_what_is_no_pair_is_left_out_and_counted(wrong, why):
    assert why in dialogues.pair(wrong)
    read, left_out = dialogues.pairs([wrong, row("\n\nHuman: Hi"), wrong])
    assert len(read) == 1
    [(reason, count)] = left_out.items()
    assert why in reason
    assert count == 2


def prompted(*turns, number=0):
    roles = itertools.cycle(("user", "assistant"))
    prompt = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    return {"prompt": prompt, "chosen": f"c{number}", "rejected": f"r{number}"}


def test_parts_share_no_prompt():
    kept = [prompted(f"question {i % 70}", number=i) for i in range(100)]
    kept += [prompted(f"Question  {i}", "more", "and?") for i in range(70)]
    parts = dialogues.split(kept)
    assert list(parts) == ["proxy", "judge", "held_out"]
    openings = [{dialogues.opening(one) for one in part} for part in parts.values()]
    for ours, theirs in itertools.combinations(openings, 2):
        assert not ours & theirs
    assert [len(of) for of in openings] == [32, 24, 14]  # 0.45, 0.35, 0.2 of 70
    assert sum(map(len, parts.values())) == len(kept)
    assert dialogues.split(kept) == parts
    assert dialogues.split(kept, seed=1) != parts
    # Within a part the order is that of the file.
    places_of = [kept.index(one) for one in parts["proxy"]]
    assert places_of == sorted(places_of)


def test_each_prompt_once():
    kept = [prompted("a"), prompted("b"), prompted("a", number=1), prompted("a", "b")]
    rows = dialogues.prompts(kept)
    assert [one["prompt"][-1]["content"] for one in rows] == ["a", "b", "b"]


# --- texts ------------------------------------------------------------------------


def test_speeches_and_worked_answers():
    long = "x " * 100
    play = f"First Citizen:\nNo.\n\nAll:\n{long}\n{long}\n\nKING:\n{long}"
    speeches = texts.shakespeare(play, rows=5)
    assert [speech["prompt"] for speech in speeches] == ["All:\n", "KING:\n"]
    assert speeches[1]["response"] == long.strip()
    assert texts.shakespeare(play, rows=1) == speeches[1:]
    questions = [{"question": "1+1?", "answer": "#### 2"}] * 3
    assert texts.gsm8k(questions, rows=2) == 2 * [
        {"prompt": "1+1?\n", "response": "#### 2"}
    ]


# --- accuracy ---------------------------------------------------------------------


def test_accuracy_and_agreement_by_hand(capsys):
    leads = {"proxy": np.array([1.0, 2, -1, -2]), "judge": np.array([1.0, -1, -2, 3])}
    measured = accuracy.summarise(leads)
    assert measured["pairs"] == 4
    assert [of["mean"] for of in measured["accuracy"].values()] == [0.5, 0.5]
    assert measured["agreement"]["mean"] == 0.5
    assert measured["expected_agreement"] == 0.5
    low, high = (measured["agreement"][end] for end in ("low", "high"))
    assert 0.1 < low < 0.2 < 0.8 < high < 0.9  # Wilson's of 2 of 4
    expected = np.corrcoef(np.stack([*leads.values()]))[0, 1]
    assert measured["correlation"] == pytest.approx(expected)
    accuracy.tell(measured)
    assert "accuracy of the judge" in capsys.readouterr().out
    constant = accuracy.summarise({"proxy": np.zeros(4), "judge": leads["judge"]})
    assert constant["correlation"] is None
    assert constant["accuracy"]["proxy"]["mean"] == 0  # a tie is not right


# --- runs -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_cells_differ_in_what_is_asked_alone(name, tmp_path):
    sweep = declaration.read(STUDY / f"{name}.toml")
    configs = []
    for run in planned.runs_of(sweep, out=tmp_path):
        [trainer] = run.program
        configs.append(
            command_line.parse(
                TRAINERS[trainer].load().Config, description=None, argv=run.options
            )
        )
    flat = [dataclasses.asdict(config) for config in configs]
    differ = {key for one in flat for key in one if one[key] != flat[0][key]}
    expected = {"out", "seed", "kl", "optimizer", "start"}
    assert differ <= expected if "dpo" not in name else differ <= expected - {"kl"}
    assert {config.start.lora is None for config in configs} == {True, False}
    if "dpo" not in name:
        betas = {0.1} if name == "smallest" else {0.0, 0.02, 0.1}
        assert {config.kl.kl_coef for config in configs} == betas
        for config in configs:
            proxy, judge = config.rewards.rewards
            assert (proxy.weight, judge.weight) == (1.0, 0.0)
            assert not set(proxy.source.paths) & set(judge.source.paths)


def test_the_smallest_sweeps_are_the_whole_ones_cut_short():
    for small, whole in (("smallest", "sweep"), ("smallest_dpo", "dpo")):
        [ours, theirs] = (declaration.read(STUDY / f"{n}.toml") for n in (small, whole))
        assert ours.trainer == theirs.trainer
        assert ours.options.keys() - theirs.options.keys() <= {"num_steps"}
        assert ours.measures.keys() == theirs.measures.keys()
        assert len(ours.seeds) == 1


@pytest.mark.parametrize("scorer", evaluation.TEXTS)
@pytest.mark.parametrize("name", ["reference", "ppo/kl_coef=0,parameters=lora"])
def test_the_commands_of_evaluations_parse(name, scorer, tmp_path):
    options = evaluation.Options(study=tmp_path)
    policy = evaluation.Policy(name, 2, "runs/model")
    argv = evaluation.command_line(options, policy, scorer=scorer)
    config = command_line.parse(Evaluation, description=None, argv=argv)
    assert config.seed == 2
    assert (config.reference is None) == (name == "reference" or scorer == "judge")
    assert config.num_samples == (8 if name == "reference" else 2)
    assert not config.resume
    config.out.mkdir(parents=True)
    (config.out / "config.json").write_text("{}")
    assert "--resume" in evaluation.command_line(options, policy, scorer=scorer)


# --- figures ----------------------------------------------------------------------


def sample(number, prompt, score, *, response="ok", decoding="sampled", length=4):
    return {
        "stage": "evaluate",
        "step": 0,
        "model": "policy",
        "decoding": decoding,
        "row": prompt,
        "sample": number,
        "prompt": [{"role": "user", "content": "a | b"}],
        "response": response,
        "length": length,
        "ended": number != 3,
        "score": score,
        "logprob": -2.0 * length,
    }


def write(study, policy, seed, scorer, *, score, loss, samples):
    place = study / "evaluation" / policy / f"seed_{seed}" / scorer
    place.mkdir(parents=True)
    sampled = {"score": {"mean": score}, "length": {"mean": 5.0}}
    if policy != "reference" and scorer == "proxy":
        sampled |= {"kl": {"mean": 2.25}, "log_perplexity": {"mean": math.log(3)}}
    figures_of = {
        "num_samples": 4 if policy == "reference" else 3,
        "policy": {"sampled": sampled},
        "texts": {"policy_loss": loss},
    }
    (place / "results.json").write_text(json.dumps(figures_of))
    (place / "summary.json").write_text("{}")
    lines = [json.dumps(one) + "\n" for one in samples]
    (place / "samples.jsonl").write_text("".join(lines))


@pytest.fixture
def study(tmp_path):
    """Two seeds of the reference and of one policy: two prompts, four samples each."""
    proxy = [[0.0, 3.0, 1.0, 2.0], [1.0, 1.5, 0.5, 0.0]]
    judge = [[0.0, -3.0, 1.0, 5.0], [1.0, 2.0, 3.0, 4.0]]
    for seed in (0, 1):
        for scorer, scores in (("proxy", proxy), ("judge", judge)):
            samples = [
                sample(i, prompt, score, response=f"{prompt} {i}")
                for prompt, of in enumerate(scores)
                for i, score in enumerate(of)
            ]
            samples.append(sample(0, 0, 0.0, decoding="greedy", response="hm"))
            shared = {"score": float(np.mean(scores)), "samples": samples}
            write(tmp_path, "reference", seed, scorer, loss=2.0 + seed, **shared)
            shared = {"score": 2.0 + seed, "loss": 2.5 + seed}
            samples = [sample(0, 0, 2.0, decoding="greedy", response="a | b\nc")]
            samples += [sample(i, 0, 2.0 + seed) for i in range(3)]
            write(tmp_path, "ppo/kl=0", seed, scorer, samples=samples, **shared)
    return tmp_path


def test_rows_by_hand(study):
    evaluated = results.read(study)
    assert [(one["policy"], one["seed"]) for one in evaluated] == [
        *(("reference", 0), ("reference", 1)),
        *(("ppo/kl=0", 0), ("ppo/kl=0", 1)),
    ]
    rows = {(r["policy"], r["seed"]): r for r in frontier.rows_of(evaluated)}
    reference, policy = rows["reference", 0], rows["ppo/kl=0", 1]
    assert reference["perplexity"] == pytest.approx(math.exp(2))
    assert (reference["kl"], reference["shakespeare"]) == (0, 0)
    assert (reference["distinct"], policy["distinct"]) == (1, 0.5)
    assert policy["perplexity"] == pytest.approx(3)
    assert (policy["kl"], policy["proxy"], policy["judge"]) == (2.25, 3, 3)
    assert (policy["shakespeare"], policy["gsm8k"]) == (0.5, 0.5)
    best = rows["best of 4", 0]
    # By the proxy the second sample is the best of either prompt.
    assert (best["proxy"], best["judge"]) == ((3 + 1.5) / 2, (-3 + 2) / 2)
    assert best["kl"] == pytest.approx(math.log(4) - 3 / 4)
    assert best["distinct"] is None
    pairs = [*itertools.combinations(range(4), 2)]
    proxy, judge = [0.0, 3.0, 1.0, 2.0], [0.0, -3.0, 1.0, 5.0]
    first = np.mean([judge[max(pair, key=lambda i: proxy[i])] for pair in pairs])
    proxy, judge = [1.0, 1.5, 0.5, 0.0], [1.0, 2.0, 3.0, 4.0]
    second = np.mean([judge[max(pair, key=lambda i: proxy[i])] for pair in pairs])
    of_two = rows["best of 2", 0]["judge"]
    assert of_two == pytest.approx((first + second) / 2)


def test_the_reward_models_agree_or_not_on_ended_and_on_cut_responses(study):
    agreed = frontier.agreement(results.read(study))
    # Three of four samples of either prompt ended, in both seeds. Their means over the
    # samples of a prompt are 1.5 and 0.75 by the proxy, 0.75 and 2.5 by the judge.
    proxy = [-1.5, 1.5, -0.5, 0.25, 0.75, -0.25] * 2
    judge = [-0.75, -3.75, 0.25, -1.5, -0.5, 0.5] * 2
    assert agreed["ended"]["responses"] == 12
    assert agreed["ended"]["correlation"] == pytest.approx(
        np.corrcoef(proxy, judge)[0, 1]
    )
    # (0.5, 4.25) and (-0.75, 1.5)
    assert agreed["cut"] == {"responses": 4, "correlation": pytest.approx(1.0)}


@pytest.mark.slow
def test_the_table_the_plot_and_the_texts(study, capsys):
    figures.main(figures.Options(study=study, shown=(0,)))
    lines = (study / "table.md").read_text().splitlines()
    assert lines == capsys.readouterr().out.splitlines()[: len(lines)]
    [row_of] = [line for line in lines if line.startswith("| ppo/kl=0 |")]
    cells = [cell.strip() for cell in row_of.split("|")[1:-1]]
    # Over the first three samples of the reference: 2 and 3 less 7/6, and less 2/3.
    assert cells[1] == "2.25 (2.25 to 2.25)"
    assert cells[2].startswith("1.33 (-5.02 to 7.69)")
    assert cells[3].startswith("1.83 (")
    [best] = [line for line in lines if line.startswith("| best of 2 |")]
    assert best.count("|") == lines[0].count("|")
    assert (study / "plots" / "frontier.png").stat().st_size > 10_000
    texts_of = (study / "texts.md").read_text()
    assert r"| ppo/kl=0 | a \| b c |" in texts_of
    assert "| reference | hm |" in texts_of
    assert json.loads((study / "figures.json").read_text())["policies"]
    with pytest.raises(InputError, match="--shown 7"):
        figures.main(figures.Options(study=study, shown=(7,)))


def test_other_responses_or_no_reference_are_refused(study):
    evaluated = results.read(study)
    evaluated[0]["judge"]["samples"][0]["response"] = "another"
    with pytest.raises(InputError, match="expected equal samples"):
        frontier.rows_of(evaluated)
    (study / "evaluation" / "reference" / "seed_1" / "proxy" / "summary.json").unlink()
    with pytest.raises(InputError, match=r"seeds \[0, 1\], got \[0\]"):
        results.read(study)


# --- the whole way ----------------------------------------------------------------


@pytest.fixture
def chat_model(tmp_path):
    """A checkpoint with a byte tokenizer and a chat template."""
    tokenizer = tokenizer_zoo.finished(
        tokenizer_zoo.byte_level(),
        added=tokenizer_zoo.CHAT,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        template=tokenizer_zoo.CHATML,
    )
    model = config.gpt2(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        max_positions=256,
    )
    folder = tmp_path / "model"
    hf.save(folder, model, toy_files.params(model), tokenizer=tokenizer)
    return folder


def test_a_study_goes_on_with_the_options_it_was_begun_with(tmp_path):
    options = preparation.Options(out=tmp_path, max_pairs=4)
    preparation.refuse_others(options)
    preparation.refuse_others(options)
    with pytest.raises(InputError, match=r"expected --max-pairs 4, .* got None; give"):
        preparation.refuse_others(preparation.Options(out=tmp_path))


def test_the_smallest_size_is_what_smallest_toml_asks_for():
    sizes = preparation.Options(out=Path("runs"), **preparation.SMALLEST)
    for name in ("smallest", "smallest_dpo"):
        options = declaration.read(STUDY / f"{name}.toml").options
        assert options["text_rows"] == sizes.num_texts
        assert options.get("max_length", sizes.max_pair) == sizes.max_pair
        assert options["num_steps"] == sizes.max_steps


@pytest.mark.slow
def test_preparation_evaluation_and_figures_at_toy_size(tmp_path, chat_model, capsys):
    rows = [row(f"\n\nHuman: {i}?", f" yes {i}", f" no {i}") for i in range(40)]
    long = row("\n\nHuman: " + "long " * 60)
    pairs = toy_files.jsonl(tmp_path / "pairs.jsonl", *rows, long)
    play = tmp_path / "play.txt"
    play.write_text(f"ALL:\n{'so ' * 60}\n")
    questions = {"question": "1+1?", "answer": "2"}
    study = tmp_path / "study"
    options = preparation.Options(
        out=study,
        model=str(chat_model),
        pairs=pairs,
        shakespeare=play,
        gsm8k=toy_files.jsonl(tmp_path / "gsm8k.jsonl", questions),
        max_prompt=128,
        max_pair=192,
        max_evaluated=3,
        max_steps=1,
        num_normalised=16,
    )
    preparation.main(options)
    counts = json.loads((study / "data" / "counts.json").read_text())
    assert counts["left_out"] == {"longer than the limits": 1}
    assert [counts[name]["pairs"] for name in dialogues.SHARES] == [18, 14, 8]
    assert counts["held_out"]["prompts"] == 3
    measured = json.loads((study / "accuracy.json").read_text())
    assert measured["pairs"] == 8
    preparation.main(options)
    assert "judge: done already" in capsys.readouterr().out
    for sweep in evaluation.SWEEPS:
        run = study / sweep / "runs" / "kl=0" / "seed_0"
        run.mkdir(parents=True)
        (run / "model").symlink_to(chat_model)
        (run / "config.json").write_text('{"config": {}, "versions": {}}')
        (run / "summary.json").write_text("{}")
        (study / sweep / "sweep.json").write_text('{"cells": {"kl=0": {}}}')
    evaluation.main(
        evaluation.Options(
            study=study, model=str(chat_model), max_new_tokens=4, best_of=4
        )
    )
    figures.main(figures.Options(study=study, shown=(2,)))
    of = json.loads((study / "figures.json").read_text())["policies"]
    assert [*of] == ["reference", "dpo/kl=0", "ppo/kl=0", "best of 2", "best of 4"]
    # These policies are the reference, and sample what it does.
    for name in ("ppo/kl=0", "dpo/kl=0"):
        assert of[name]["kl"]["mean"] == pytest.approx(0, abs=1e-5)
        assert of[name]["shakespeare"]["mean"] == pytest.approx(0, abs=1e-5)
        assert of[name]["distinct"] == of["reference"]["distinct"]
    gains = [of[name]["proxy_gain"]["mean"] for name in ("best of 2", "best of 4")]
    assert 0 < gains[0] < gains[1]
