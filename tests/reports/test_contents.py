"""Contents of the page: curves, samples, sizes, and bad input in one line."""

import numpy as np
import pytest
from scipy import stats
from toy_runs import lines, run

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import curves, document, glossary, grouping, reading, samples
from rlhf_jax.reports.contents import contents
from rlhf_jax.runs import metrics


def data_of(*folders, **options):
    runs, waiting = reading.read_all(folders)
    return contents(runs, title="Runs", waiting=waiting, **options).data


def rewritten(folder, name, values):
    """The run with a metric replaced by these values; None omits the metric."""
    rows = [
        {"stage": "ppo", "step": step} | ({} if value is None else {name: value})
        for step, value in enumerate(values)
    ]
    lines(folder / "metrics.jsonl", rows)


def test_a_curve_is_the_mean_over_seeds_with_its_range_and_interval(tmp_path):
    values = [[1.0, None, 4.0], [3.0, 5.0, "NaN"], [8.0, None, 6.0]]
    folders = [run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    for folder, values_of_run in zip(folders, values, strict=True):
        rewritten(folder, "objective/kl", values_of_run)
    drawn = data_of(*folders)["curves"]
    curve = drawn["metrics"]["objective/kl"]["0"]
    assert drawn["steps"][curve["x"]] == [0, 1, 2]
    assert (curve["n"], curve["y"]) == (3, [4.0, 5.0, 5.0])
    assert (curve["lo"], curve["hi"]) == ([1.0, 5.0, 4.0], [8.0, 5.0, 6.0])
    low, _ = stats.t.interval(0.95, 2, loc=4.0, scale=stats.sem([1.0, 3.0, 8.0]))
    assert curve["t"][0] == pytest.approx(4.0 - low, rel=1e-3)
    assert curve["t"][1] is None  # one seed
    assert curve["t"][2] == pytest.approx(12.706, rel=1e-3)  # of 4 and 6


def test_numbers_that_are_not_finite_are_told_and_no_earlier_one_is_shown(tmp_path):
    """A mean over the seeds that survived is not the mean over all."""
    values = [[1.0, 2.0, 3.0], [1.0, "NaN", "Infinity"], [1.0, "-Infinity", 7.0]]
    folders = [run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    for folder, values_of_run in zip(folders, values, strict=True):
        rewritten(folder, "objective/kl", values_of_run)
    data = data_of(*folders)
    lasts = [one["last"]["objective/kl"] for one in data["runs"]]
    assert lasts == [3.0, None, 7.0]
    (note,) = [note for note in data["notes"] if "not finite" in note]
    assert note.startswith("2 of 3 runs have numbers that are not finite, for example ")
    assert " 1 in objective/kl from step 1: " in note
    assert not any("not finite" in one for one in data_of(folders[0])["notes"])


def test_a_single_run_has_no_band(tmp_path):
    data = data_of(run(tmp_path / "a", steps=5))
    curve = data["curves"]["metrics"]["objective/kl"]["0"]
    assert curve.keys() == {"stage", "x", "n", "y"}
    assert len(curve["y"]) == 5


def test_stages_are_apart(tmp_path):
    folder = run(tmp_path / "a", steps=3)
    text = (folder / "metrics.jsonl").read_text()
    first = '{"stage": "sft", "step": 0, "loss/language_model": 2.5}\n'
    (folder / "metrics.jsonl").write_text(first + text)
    data = data_of(folder)
    of_metrics = data["curves"]["metrics"]
    assert of_metrics["loss/language_model"]["0"]["stage"] == "sft"
    assert of_metrics["objective/scores"]["0"]["stage"] == "ppo"
    assert data["runs"][0]["stage"] == "ppo"
    assert data["first"][0] == "objective/scores"


@pytest.mark.parametrize(("count", "points"), [(3, 5), (5, 5), (200, 50), (7, 2)])
def test_thinning_keeps_both_ends(count, points):
    columns = curves.thinned(count, points=points)
    assert len(columns) == min(count, points)
    assert (columns[0], columns[-1]) == (0, count - 1)
    assert max(np.diff(columns)) <= 2 * count / points


def test_the_tokens_with_the_most_kl_are_of_the_newest_steps():
    def row(step, tokens, k1):
        return {
            "step": step,
            "tokens": tokens,
            "logprobs": [-1.0] * len(k1),
            "ref_logprobs": [-1.0 - x for x in k1],
        }

    rows = [row(step, ["old"], [9.0]) for step in range(6)]
    rows += [row(6, [" so", "so ", "!"], [1.0, 2.0, 2.5]), row(7, ["no"], [-4.0])]
    assert samples.common_tokens(rows) == [
        {"text": "so", "count": 2, "kl": 3.0},
        {"text": "!", "count": 1, "kl": 2.5},
    ]


def test_a_row_has_the_kl_that_its_tokens_sum_to(tmp_path):
    folder = run(tmp_path / "a", hacked=True)
    recorded = metrics.read(folder / "samples.jsonl")
    rows = data_of(folder)["runs"][0]["samples"]
    for row, source in zip(rows, recorded, strict=True):
        k1 = np.subtract(source["logprobs"], source["ref_logprobs"])
        assert row["kl"] == pytest.approx(k1.sum(), abs=1e-3)
        assert row["response"] == source["response"]
        assert row["length"] == len(source["tokens"])


def test_what_was_observed_counts_neither_as_length_nor_as_kl(tmp_path):
    folder = run(tmp_path / "a", steps=2)
    (row, *_) = metrics.read(folder / "samples.jsonl")
    row |= {"tokens": ["4", "higher", "6"], "response": "4⟦higher⟧6"}
    row |= {"logprobs": [-1.0, None, -0.5], "ref_logprobs": [-2.0, None, -3.0]}
    row |= {"observed": [False, True, False]}
    lines(folder / "samples.jsonl", [row])
    data = data_of(folder)
    ((only,), tokens) = data["runs"][0]["samples"], data["runs"][0]["tokens"]
    assert (only["length"], only["read"], only["kl"]) == (2, 1, 3.5)
    assert only["observed"] == [False, True, False]
    assert [token["text"] for token in tokens] == ["6", "4"]


def test_a_run_that_diverged_has_a_page(tmp_path):
    folder = run(tmp_path / "a", steps=2)
    (row, *_) = metrics.read(folder / "samples.jsonl")
    row |= {"tokens": ["a", "b", "c"], "logprobs": ["NaN", -1.0, -0.5]}
    row |= {"ref_logprobs": [-2.0, None, -3.0], "score": float("nan")}
    row["alternatives"] = [[["x", "-Infinity", -1.0]], [["y", -1.0, None]], []]
    lines(folder / "samples.jsonl", [row])
    timed = {"stage": "ppo", "step": 0, "seconds": "NaN", "phases": {"learn": "NaN"}}
    lines(folder / "timings.jsonl", [timed])
    data = data_of(folder)
    document.as_script(data)  # takes no NaN
    ((only,), tokens) = data["runs"][0]["samples"], data["runs"][0]["tokens"]
    assert only["logprobs"] == [None, -1.0, -0.5]
    assert only["ref_logprobs"] == [-2.0, None, -3.0]
    assert only["alternatives"] == [[["x", None, -1.0]], [["y", -1.0, None]], []]
    assert (only["kl"], tokens) == (2.5, [{"text": "c", "count": 1, "kl": 2.5}])
    assert "score" not in only
    assert data["runs"][0]["phases"] == {"learn": 0.0, "other": 0.0}


def test_numbers_beyond_all_floats_are_left_out(tmp_path):
    folders = [run(tmp_path / str(seed), seed=seed, steps=2) for seed in range(2)]
    for folder in folders:
        rewritten(folder, "objective/kl", [10**400, 1.7e308])
    drawn = data_of(*folders)["curves"]
    curve = drawn["metrics"]["objective/kl"]["0"]
    assert (drawn["steps"][curve["x"]], curve["y"]) == ([1], [None])
    assert curve["hi"] == [1.7e308]


def test_questions_and_answers_are_prompts_and_responses(tmp_path):
    folder = run(tmp_path / "a")
    row = {"stage": "ppo", "step": 0, "question": "2+2?", "answer": "4", "score": 1.0}
    lines(folder / "samples.jsonl", [row, {"stage": "ppo", "step": 0, "seed": 3}])
    (only,) = data_of(folder)["runs"][0]["samples"]
    assert (only["prompt"], only["response"], only["score"]) == ("2+2?", "4", 1.0)


def test_samples_are_left_out_first_and_the_page_says_so(tmp_path):
    folders = [
        run(tmp_path / str(seed), seed=seed, steps=100, shown=8) for seed in range(3)
    ]
    whole = data_of(*folders)
    assert not whole["notes"]
    size = document.written(whole) - 90_000
    data = data_of(*folders, size=size)
    assert document.written(data) <= size + 300  # the note
    assert data["curves"] == whole["curves"]
    (note,) = data["notes"]
    shown = sum(len(recorded["samples"]) for recorded in data["runs"])
    assert note.startswith(f"{shown} of 240 recorded responses")
    for before, after in zip(whole["runs"], data["runs"], strict=True):
        assert 0 < len(after["samples"]) < len(before["samples"])
        assert after["sampled"] == 80
        for name in ("kl", "score", "length"):
            for extreme in (min, max):
                assert extreme(row[name] for row in after["samples"]) == extreme(
                    row[name] for row in before["samples"]
                )
        assert {0, 90} <= {row["step"] for row in after["samples"]}


def test_of_more_configs_than_fit_some_have_curves_and_samples(tmp_path, monkeypatch):
    """Hacked configs come first; the table has every config."""
    monkeypatch.setattr("rlhf_jax.reports.contents.LEAST", 10_000)
    folders = [
        run(tmp_path / str(n), kl_coef=float(n), steps=40, hacked=n == 7, further=20)
        for n in range(12)
    ]
    whole = data_of(*folders)
    size = 60_000
    data = data_of(*folders, size=size)
    assert document.written(data) < 2 * size < document.written(whole)
    drawn = {group for of in data["curves"]["metrics"].values() for group in of}
    hacked = data["runs"][7]
    assert hacked["verdict"]["kind"] == "hacked"
    assert {"0", str(hacked["group"]), "11"} <= drawn
    assert 2 < len(drawn) < 12
    told = [note for note in data["notes"] if note.startswith("Curves are of")]
    assert told[0].startswith(f"Curves are of {len(drawn)} of 12 configs")
    shown = [n for n, record in enumerate(data["runs"]) if record["samples"]]
    assert 7 in shown
    assert len(shown) < 12
    assert [record["sampled"] for record in data["runs"]] == [12] * 12


def test_damaged_and_unproven_runs_are_told(tmp_path):
    whole, cut, old = (run(tmp_path / name, seed=n) for n, name in enumerate("abc"))
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text.replace('"step": 0', '"step": 1', 1))
    (old / "summary.json").write_text('{"alarms": []}')
    data = data_of(whole, cut, old)
    damaged, unproven = data["notes"]
    assert damaged.startswith("b IS DAMAGED")
    assert "metrics.jsonl: SHA-256" in damaged
    assert unproven.startswith(
        "Files of 1 of 3 runs are not proven, for example of c: written"
    )
    assert [record["damaged"] for record in data["runs"]] == [False, True, False]


def test_tokens_of_markup_count_as_what_the_page_writes(tmp_path):
    """The page writes `<` as six bytes."""
    folder = run(tmp_path / "a", steps=100, shown=8)
    rows = metrics.read(folder / "samples.jsonl")
    for row in rows:
        row["tokens"] = ["<td></td>&"] * len(row["tokens"])
        row["response"] = "".join(row["tokens"])
    lines(folder / "samples.jsonl", rows)
    whole = document.written(data_of(folder))
    data = data_of(folder, size=whole - 50_000)
    assert document.written(data) <= whole - 50_000 + 300  # the note
    assert 0 < len(data["runs"][0]["samples"]) < len(rows)


def test_of_many_steps_curves_are_thinned(tmp_path):
    data = data_of(run(tmp_path / "a", steps=300, further=20), size=60_000)
    of_ppo, steps = data["curves"]["metrics"], data["curves"]["steps"]
    counts = {name: len(curve["0"]["y"]) for name, curve in of_ppo.items()}
    assert counts["reward/part_3"] < 300
    assert counts["objective/kl"] == min(300, 4 * counts["reward/part_3"])
    for curve in of_ppo.values():
        at = steps[curve["0"]["x"]]
        assert (at[0], at[-1]) == (0, 299)
    assert any("steps" in note for note in data["notes"])


def test_reward_and_kl_have_the_judges_steps_too(tmp_path):
    folder = run(tmp_path / "a", steps=300)
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows:
        if row["step"] % 7:
            del row["judge/score"]
    lines(folder / "metrics.jsonl", rows)
    runs, _ = reading.read_all([folder])
    tables = curves.tables(runs, grouping.grouped(runs).groups)
    drawn = curves.curves(tables, points=5, fine=("judge/score",))
    of_ppo = drawn["metrics"]
    at = {
        name: set(drawn["steps"][curve["0"]["x"]])
        for name, curve in of_ppo.items()
        if name in ("judge/score", "objective/scores", "objective/kl")
    }
    assert len(at["judge/score"]) == 20
    assert at["judge/score"] <= at["objective/scores"] == at["objective/kl"]
    assert len(at["objective/kl"]) <= 25


def test_two_folders_of_one_config_and_seed_are_told(tmp_path):
    folders = [run(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3))]
    (note,) = data_of(*folders)["notes"]
    assert note.startswith("a, b have one config and seed 3")
    assert not data_of(folders[0], run(tmp_path / "c", seed=4))["notes"]


def test_phases_are_means_without_the_step_that_compiles(tmp_path):
    folder = run(tmp_path / "a", steps=3)
    rows = [
        {"stage": "ppo", "step": n, "seconds": s, "phases": {"sample": p}}
        for n, (s, p) in enumerate([(90.0, 80.0), (4.0, 1.0), (6.0, 2.0)])
    ]
    lines(folder / "timings.jsonl", rows)
    record = data_of(folder)["runs"][0]
    assert record["phases"] == {"sample": 1.5, "other": 3.5}
    assert record["seconds"] == 100.0


def test_the_metrics_that_are_asked_for_are_open_first(tmp_path):
    folder = run(tmp_path / "a")
    data = data_of(folder, metrics=["drift/relative", "objective/kl"])
    assert data["first"] == ["drift/relative", "objective/kl"]
    rewritten(folder, "objective/kl", ["NaN", "NaN"])
    rows = metrics.read(folder / "metrics.jsonl")
    lines(folder / "metrics.jsonl", [row | {"loss/policy": 1.0} for row in rows])
    with pytest.raises(InputError, match=r"got objective/kl, which no run has"):
        data_of(folder, metrics=["objective/kl"])
    with pytest.raises(InputError, match=r"got kl/objective, which no run has; choose"):
        data_of(folder, metrics=["kl/objective"])


def test_a_metric_has_the_unit_of_the_glossary(tmp_path):
    entries = glossary.read()
    assert entries["objective/kl"].unit == "nats per response"
    assert [entries[f"pairwise/{name}"].unit for name in ("accuracy", "lead")] == [
        "share",
        "reward units",
    ]
    assert entries["value/clipfrac"].unit == "share of tokens"
    assert len(entries) > 80
    of_part = glossary.entry_of("reward/helpful", entries=entries)
    assert of_part.unit == "the part's units per response"
    for metric, of in {
        "reward/tests/failed": "reward/failed",
        "reward/tests/deep/helpful": "reward/NAME",
        "reward/member_11": "reward/member_NAME",
        "reward/model/member_0": "reward/member_NAME",
        "eval/code_nll": "eval/NAME_nll",
        "trust/distance_prompt_4": "trust/distance_prompt_1",
    }.items():
        assert glossary.entry_of(metric, entries=entries) == entries[of], metric
    assert glossary.entry_of("mine/own", entries=entries) == ("", "")
    of_page = data_of(run(tmp_path / "a"))["glossary"]
    assert of_page["judge/score"]["unit"] == "the judge's units per response"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), r"expected the folder of a run.* got nothing"),
        (lambda path: None, r"expected the folder of a run.* got no folder"),
        (
            lambda path: (path / "plots").mkdir(parents=True),
            r"expected the folder of a run.* got plots",
        ),
    ],
)
def test_a_folder_that_is_no_run(make, message, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(InputError, match=message):
        reading.read_all([tmp_path / "x"])


def test_runs_that_share_no_metric(tmp_path):
    folders = [run(tmp_path / "ppo"), run(tmp_path / "dpo")]
    rows = [{"stage": "dpo", "step": 0, "loss/dpo": 0.7}]
    lines(folders[1] / "metrics.jsonl", rows)
    with pytest.raises(InputError, match=r"ppo \(stage ppo\) and .*dpo \(stage dpo\)"):
        reading.read_all(folders)


def test_each_group_is_drawn_from_its_own_last_stage_with_the_metric(tmp_path):
    """Also where another run has its stages in another order."""
    later = run(tmp_path / "later", steps=3, kl_coef=0.0)
    for folder, stages in ((run(tmp_path / "a", steps=3), "ab"), (later, "ba")):
        rows = [
            {"stage": stage, "step": 0, "objective/kl": float(number)}
            for number, stage in enumerate(stages)
        ]
        lines(folder / "metrics.jsonl", rows)
    curves_of = data_of(tmp_path / "a", later)["curves"]["metrics"]["objective/kl"]
    assert [(c["stage"], c["y"]) for c in curves_of.values()] == [
        ("b", [1.0]),
        ("a", [1.0]),
    ]


def saved_model(folder):
    """A folder as transformers writes it; its config.json is not a run's."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    return folder / "model"


def test_the_model_that_a_run_saved_is_no_run(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for seed in range(2):
        saved_model(run(tmp_path / "runs" / "cell" / f"seed_{seed}", seed=seed))
    runs, waiting = reading.read_all([tmp_path])
    assert ([member.name for member in runs], waiting) == (["seed_0", "seed_1"], [])
    model = tmp_path / "runs" / "cell" / "seed_0" / "model"
    with pytest.raises(InputError, match=r"expected the config.json of a run"):
        reading.read_all([model])


def test_a_page_is_named_for_its_question_and_no_seed(tmp_path):
    sweep = tmp_path / "frontier"
    folders = [
        run(sweep / "runs" / cell / f"seed_{seed}", seed=seed)
        for cell in ("kl_coef=0.0", "kl_coef=0.2")
        for seed in range(5)
    ]
    assert reading.title(folders) == "kl_coef=0.0, kl_coef=0.2"
    (sweep / "sweep.json").write_text("{}")
    assert reading.title([sweep]) == reading.title(folders) == "frontier"
    (sweep / "results.json").write_text('{"question": "What does β buy?"}')
    assert reading.title([sweep]) == reading.title(folders) == "What does β buy?"
    own = run(tmp_path / "mine")
    assert reading.title([sweep, own]) == "frontier, mine"


def test_runs_of_which_none_has_begun(tmp_path):
    folder = run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"got none yet; wait for the first step"):
        reading.read_all([folder])
