"""The data and models of the study of several turns, as its sweeps read them."""

import contextlib
import json
import statistics

import places
import pytest
import toy_files
from studies.finished import Finished
from studies.turns import figures, preparation

from rlhf_jax.data import tokenization
from rlhf_jax.environments.protocol import Started, Turn
from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train.config.models import Start
from rlhf_jax.train.config.prompts import Batch, Prompts
from rlhf_jax.train.config.rewards import Rewards
from rlhf_jax.train.config.sampler import Episodes, Sampling
from rlhf_jax.train.config.watch import Watch
from rlhf_jax.train.methods import grpo

WORDS = ["go", "left", "right", "key", "door", "hall"]


class Twice:
    """At most two turns; the first earns what the row says, whatever the response."""

    def reset(self, row):
        return Started(row["start"], (row["worth"], 0))

    def step(self, state, response):
        worth, turn = state
        return Turn("door", worth * (1 - turn), turn == 1, (worth, 1))


def test_every_character_of_the_environments_is_a_token():
    tokenizer = preparation.characters()
    text = "calc: 12*(3+4)-5\n= 7. higher\nGuess"
    [ids] = tokenization.encode(tokenizer, [text], special=False)
    assert len(ids) == len(text)
    assert tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_the_sweeps_are_of_options_that_there_are(name, tmp_path):
    file = places.EXPERIMENTS / "studies" / "turns" / f"{name}.toml"
    runs = planned.runs_of(declaration.read(file), out=tmp_path)
    assert len(runs) == 6
    for run in runs:
        model = f"--model=runs/turns/sft/{name}/seed_{run.seed}/model"
        assert model in run.arguments()
        assert any(f"--environment={name}," in word for word in run.arguments())


@pytest.mark.slow
def test_the_preparation_at_toy_size(tmp_path):
    preparation.main(
        preparation.Options(
            out=tmp_path, seeds=(4,), calculator_steps=2, guessing_steps=2
        )
    )
    for name in ("calculator", "guessing"):
        data = tmp_path / "data" / name
        lines = (data / "demonstrations.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert all(len(row["turns"]) % 2 for row in rows)
        assert (tmp_path / "sft" / name / "seed_4" / "model" / "config.json").exists()
    calculated = (data.parent / "calculator" / "demonstrations.jsonl").read_text()
    assert '"answer: ' in calculated


@pytest.mark.slow
def test_what_is_played_on_held_out_rows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    policy, reference = (
        str(toy_files.checkpoint(tmp_path / name, words=WORDS, seed=seed))
        for seed, name in enumerate(("policy", "reference"))
    )
    worth = (0.0, 0.5, 1.0, 0.5)
    rows = [{"start": "left", "worth": worth_of_row} for worth_of_row in worth]
    toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    config = grpo.Config(
        start=Start(model=reference),
        data=Prompts(prompts=f"{tmp_path}/other.jsonl"),
        rewards=Rewards(num_workers=1),
        batch=Batch(max_new_tokens=14),
        sampler=Sampling(environment=Episodes("test_turns_study:Twice")),
        watch=Watch(held_out=f"{tmp_path}/rows.jsonl"),
        out=tmp_path / "run",
    )
    with contextlib.ExitStack() as stack:
        player = figures.Player(config, stack=stack, batch=8)
        own = player.play(policy, reference=policy, episodes=8)
        played = player.play(policy, reference=reference, episodes=16)
    assert own["success"] == played["success"] == 0.75
    assert own["score"] == played["score"] == 0.5
    assert 1 <= own["turns"] <= 2
    assert abs(own["kl"]) < 1e-4 > own["kl_k3"]
    assert played["kl_k3"] > 0.01
    assert played["kl"] == pytest.approx(played["kl_k3"], rel=1.0)


@pytest.fixture
def measured():
    """Measurements of three seeds and two β."""

    def of(*shares):
        rest = {"turns": 3.0, "score": 0.5, "kl": 1.0, "kl_k3": 1.0}
        return {str(seed): {"success": s} | rest for seed, s in enumerate(shares)}

    return {
        "before": of(0.3, 0.4, 0.5),
        "after": {"0": of(0.9, 0.9, 0.9), "0.1": of(0.6, 0.7, 0.8)},
    }


def test_how_much_the_success_rises(measured, capsys):
    summary = figures.summarise(measured)
    rise = summary["rise_of_success"]
    assert rise["0"]["least"] == pytest.approx(0.4)
    assert rise["0"]["mean"] == pytest.approx(0.5)
    # t(0.975, 2) = 4.303, the standard deviation of 0.4, 0.5 and 0.6 is 0.1
    half = 4.303 * 0.1 / 3**0.5
    assert rise["0"]["interval"] == pytest.approx([0.5 - half, 0.5 + half], abs=1e-3)
    assert rise["0.1"]["interval"] == pytest.approx([0.3, 0.3])
    figures.tell(summary)
    printed = capsys.readouterr().out
    assert "0.40 (0.30 to 0.50)" in printed
    assert "β = 0: success rises by 0.50 (95% interval 0.25 to 0.75)" in printed


def test_curves_have_a_line_for_each_run(tmp_path):
    runs = []
    for cell in ("kl_coef=0", "kl_coef=0.1"):
        for seed in (0, 1):
            folder = tmp_path / cell / f"seed_{seed}"
            folder.mkdir(parents=True)
            row = {"stage": "grpo", "objective/scores": 0.5}
            row |= {"response/turns": 2, "objective/kl": 0.1}
            toy_files.jsonl(
                folder / "metrics.jsonl", *[row | {"step": n} for n in range(3)]
            )
            runs.append(Finished(cell, seed, {}, {}, folder))
    for axis in figures.draw(runs).axes:
        assert len(axis.lines) == 4
    legend = figures.draw(runs).axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["β = 0", "β = 0.1"]


def recorded(*names):
    return json.loads(places.RECORDED.joinpath("turns", *names).read_text())


def mean_and_range(values):
    values = [*values]
    mean, least, most = statistics.mean(values), min(values), max(values)
    return f"{mean:.2f} ({least:.2f} to {most:.2f})"


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_the_table_is_what_was_recorded(name):
    text = (places.EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    [_, after] = text.split(f"| {name}: success |")
    cells = [
        [cell.strip() for cell in line.split("|")[-4:-1]]
        for line in after.splitlines()[:2]
    ]
    figures_of, greedy = recorded(name, "figures.json"), recorded("record.json")
    columns = [
        figures_of["before"],
        figures_of["after"]["0"],
        figures_of["after"]["0.1"],
    ]
    expected = [
        [mean_and_range(seed[key] for seed in of.values()) for of in columns]
        for key in ("success", "kl")
    ]
    expected[1][0] = "0"
    assert cells == expected
    of_betas = greedy["greedy_score"][name]
    assert of_betas["0"]["before"] == of_betas["0.1"]["before"]
    assert "greedy episodes gain 0.03 to 0.06 on average" in text
    for scores in of_betas.values():
        before, after = (
            statistics.mean(scores[when].values()) for when in ("before", "after")
        )
        assert 0.025 < after - before < 0.065


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_what_is_claimed_holds_in_what_was_recorded(name):
    figures_of = recorded(name, "figures.json")
    again = figures.summarise({key: figures_of[key] for key in ("before", "after")})
    rises = again["rise_of_success"]
    for kl_coef, rise in figures_of["rise_of_success"].items():
        assert rises[kl_coef]["mean"] == pytest.approx(rise["mean"])
        assert rises[kl_coef]["interval"] == pytest.approx(rise["interval"])
    for kl_coef, after in figures_of["after"].items():
        assert rises[kl_coef]["least"] > 0.28
        assert rises[kl_coef]["interval"][0] > 0.2
        assert set(after) == set(figures_of["before"]) == {"0", "1", "2"}
    for seed, penalised in figures_of["after"]["0.1"].items():
        assert penalised["kl"] < figures_of["after"]["0"][seed]["kl"]
    assert {one["answer"] for one in recorded(name, "claims.json").values()} == {"yes"}
    if name == "guessing":
        for after in figures_of["after"].values():
            for seed, policy in after.items():
                assert policy["turns"] < figures_of["before"][seed]["turns"] - 0.4
