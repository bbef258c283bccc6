"""`rlhf-jax paper`: its files agree with NumPy's figures of the runs."""

import csv
import json
import math
import re

import numpy as np
import pytest
import yaml
from places import ROOT
from scipy import stats

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports.paper import citations, figures, latex, methods, provenance
from rlhf_jax.sweeps import declaration, planned, results
from rlhf_jax.train import main
from rlhf_jax.train.queries import paper

FIELDS = {
    "question": "What does β buy, 100% of it?",
    "trainer": "ppo",
    "seeds": [0, 1, 2],
    "options": {"model": "runs/sft_{seed}/model", "prompts": "p.jsonl", "lam": 0.95},
    "grid": {"kl_coef": [0.0, 0.2], "penalty.value_estimator": ["k1", "k3"]},
    "measures": {
        "score": {"metric": "objective/scores", "last": 2},
        "kl_end": {"summary": "policy.kl"},
    },
    "claims": {
        "β holds the KL": "kl_end(kl_coef=0.2) < kl_end(kl_coef=0.0)",
        "k3_is better": "score(value_estimator='k3') > score(value_estimator='k1')",
    },
}
VERSIONS = {
    "python": "3.11.7",
    "rlhf_jax": "0.2.0 (abcdef012345, changed)",
    "jax": "0.10.2",
    "devices": "8 gpu (NVIDIA H100)",
}


def score_of(cell, seed, step):
    beta, estimator = dict(cell.values).values()
    place = [seed, step, int(10 * beta), int(estimator == "k3")]
    noise = np.random.default_rng(place).normal()
    return 1.0 + beta + 0.1 * (estimator == "k3") + noise / 3


def kl_of(cell, seed):
    beta, estimator = dict(cell.values).values()
    return 80.0 - 300 * beta + seed + 0.25 * seed * (estimator == "k3") * beta


def swept(out, *, left_out=(), config=None, **fields):
    """A sweep's folder as trainers leave it, including runs that have not begun."""
    sweep = declaration.declared(FIELDS | fields, source="file")
    planned.begin(sweep, out=out)
    for run in planned.runs_of(sweep, out=out):
        if run.name not in left_out:
            written(run, config=config or {})
    return sweep


def written(run, *, config):
    cell, seed, place = run.cell, run.seed, run.folder
    beta, estimator = dict(cell.values).values()
    options = {
        "start": {"model": f"runs/sft_{seed}/model", "lora": None},
        "method": {
            "lam": 0.95,
            "penalty": {"value_estimator": estimator, "placement": "reward"},
            "surrogate": {"kind": "clip", "ratio_level": "token"},
        },
        "optimizer": {"optimizer": {"kind": "adam", "eps": 1e-8}},
        "kl": {"kl_coef": beta, "kl_control": {"kind": "fixed"}},
    } | config
    meta = {"config": {}, "data_digest": "12" * 32, "rows": {"metrics": 3}}
    rows = [
        {"stage": "ppo", "step": step, "objective/scores": score_of(cell, seed, step)}
        for step in range(3)
    ]
    times = [{"stage": "ppo", "step": step, "seconds": 60.0} for step in range(3)]
    source = {"name": "--prompts", "source": "p.jsonl", "called": "rows"}
    for name, value in {
        "config.json": {"config": options, "versions": VERSIONS},
        "data.json": {"sources": [source | {"read": 1319, "used": 1253}]},
        "snapshots/ppo/3/meta/metadata": meta,
        "summary.json": {
            "policy": {"kl": kl_of(cell, seed)},
            "reference_fingerprint": f"{seed}" * 32,
        },
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(value))
    for name, lines in {"metrics": rows, "timings": times}.items():
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def published(sweep, out):
    paper.main(paper.Config(sweep=sweep, out=out))
    return out


def rows_of(file):
    return list(csv.DictReader(file.read_text().splitlines()))


def interval(values):
    return stats.t.interval(
        0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )


def cells_of(line):
    return [cell.strip() for cell in line.strip().rstrip("\\").split("&")]


def test_tables_are_the_numbers_of_the_runs(tmp_path):
    sweep = swept(tmp_path / "sweep")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    scores = {
        cell.name: [
            np.mean([score_of(cell, seed, step) for step in (1, 2)])
            for seed in range(3)
        ]
        for cell in sweep.cells
    }
    rows = [r for r in rows_of(out / "tables/results.csv") if r["measure"] == "score"]
    assert [row["kl_coef"] for row in rows] == ["0", "0", "0.2", "0.2"]
    assert [row["value_estimator"] for row in rows] == ["k1", "k3"] * 2
    for row, values in zip(rows, scores.values(), strict=True):
        assert float(row["mean"]) == pytest.approx(np.mean(values), rel=1e-15)
        bounds = [float(row["low"]), float(row["high"])]
        assert bounds == pytest.approx(interval(values), rel=1e-12)
        assert row["seeds"] == "3"
    # Every digit of every seed, so that all can be computed again.
    every = rows_of(out / "tables/values.csv")
    kls = [row["value"] for row in every if row["measure"] == "kl_end"]
    assert kls == [repr(kl_of(cell, seed)) for cell in sweep.cells for seed in range(3)]
    assert len(every) == 2 * 12
    of_runs = [float(row["value"]) for row in every if row["measure"] == "score"]
    assert of_runs == pytest.approx(np.concatenate([*scores.values()]), rel=1e-15)
    less = [r for r in rows_of(out / "tables/differences.csv") if r["seeds"] == "3"]
    first, *others = scores.values()
    of_scores = [row for row in less if row["measure"] == "score"]
    for row, values in zip(of_scores, others, strict=True):
        paired = np.subtract(values, first)
        assert float(row["mean"]) == pytest.approx(np.mean(paired), abs=1e-15)
        bounds = [float(row["low"]), float(row["high"])]
        assert bounds == pytest.approx(interval(paired), rel=1e-9)


@pytest.mark.slow
def test_what_is_shown_is_rounded_by_the_interval(tmp_path):
    sweep = swept(tmp_path / "sweep")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    # Seeds 0, 1 and 2: 80 + seed, t(0.975, 2)/√3 = 2.48414 around 81.
    text = (out / "tables/results.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| 0 | k1"))
    assert line.endswith("| 81.0 ± 2.5 |")
    tex = (out / "tables/results.tex").read_text()
    line = next(line for line in tex.splitlines() if line.strip().startswith("0 & k1"))
    assert cells_of(line)[-1] == r"81.0 $\pm$ 2.5"
    values = [
        np.mean([score_of(sweep.cells[0], s, t) for t in (1, 2)]) for s in (0, 1, 2)
    ]
    half = np.mean(values) - interval(values)[0]
    digits = 1 - math.floor(math.log10(half))
    shown = cells_of(line)[-2].split(r" $\pm$ ")
    assert float(shown[0]) == round(np.mean(values), digits)
    assert float(shown[1]) == round(half, digits)


@pytest.mark.parametrize(
    ("value", "half", "shown"),
    [
        (12345.0, 4500.0, "12300 ± 4500"),
        (-0.0001, 0.31, "0.00 ± 0.31"),
        (0.99999, 0.0999, "1.000 ± 0.100"),
        (1.5, 0.0, "1.5 ± 0"),
        (1.5, 1e-12, "1.5 ± 1e-12"),
    ],
)
def test_numbers_are_rounded(value, half, shown):
    from rlhf_jax.reports.paper.tables import rounded
    from rlhf_jax.sweeps.statistics import Interval

    assert rounded(value, Interval(value - half, value + half)) == shown


@pytest.mark.slow
def test_a_partial_sweep_gives_partial_tables(tmp_path, capsys):
    left_out = [f"kl_coef=0,value_estimator=k3 seed {seed}" for seed in (0, 1, 2)]
    left_out.append("kl_coef=0.2,value_estimator=k3 seed 2")
    swept(tmp_path / "sweep", left_out=left_out)
    out = published(tmp_path / "sweep", tmp_path / "paper")
    assert "8 of 12 runs, 2 measures, 2 claims (2 open)" in capsys.readouterr().out
    for name in ("tables/results.tex", "methods.tex", "figures/score.tex", "README.md"):
        text = " ".join((out / name).read_text().split())
        assert "Partial: 8 of 12 runs are done." in text
    for name in ("methods.tex", "methods.md", "README.md"):
        text = " ".join((out / name).read_text().replace("\\allowbreak{}", "").split())
        names = [
            one.replace("_", r"\_") if name.endswith("tex") else one for one in left_out
        ]
        assert f"Not done: {'; '.join(names)}." in text
    rows = rows_of(out / "tables/results.csv")
    assert [row["seeds"] for row in rows if row["measure"] == "score"] == list("3032")
    assert [row["mean"] == "" for row in rows if row["measure"] == "score"] == [
        *(False, True, False, False)
    ]
    lines = (out / "tables/results.md").read_text().splitlines()
    assert "| 0 | k3 | 0 | — | — |" in lines
    caption = (out / "figures/score.tex").read_text()
    assert "mean over 2 to 3 seeds" in caption
    # And what comes later replaces it.
    swept(tmp_path / "sweep")
    published(tmp_path / "sweep", out)
    assert "Partial" not in (out / "tables/results.md").read_text()


def test_nothing_is_written_of_a_sweep_without_a_run(tmp_path):
    sweep = declaration.declared(FIELDS, source="file")
    planned.begin(sweep, out=tmp_path / "sweep")
    with pytest.raises(InputError, match=r"got 2 measures and 0 of 12 runs done"):
        published(tmp_path / "sweep", tmp_path / "paper")
    assert not (tmp_path / "paper").exists()


@pytest.mark.slow
def test_open_claims_have_the_seeds_that_would_answer_them(tmp_path):
    sweep = swept(tmp_path / "sweep")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    known, open_ = rows_of(out / "tables/claims.csv")
    assert (known["answer"], known["needed"]) == ("yes", "")
    assert open_["answer"] == "not enough seeds"
    cells = {tuple(dict(cell.values).values()): cell for cell in sweep.cells}
    differences = [
        np.mean(
            [
                np.mean([score_of(cells[beta, "k3"], seed, t) for t in (1, 2)])
                - np.mean([score_of(cells[beta, "k1"], seed, t) for t in (1, 2)])
                for beta in (0.0, 0.2)
            ]
        )
        for seed in range(3)
    ]
    mean, deviation = np.mean(differences), np.std(differences, ddof=1)
    count = 2
    while stats.t.ppf(0.975, count - 1) * deviation / math.sqrt(count) >= abs(mean):
        count += 1
    assert int(open_["needed"]) == count
    line = (out / "tables/claims.md").read_text().splitlines()[-1]
    assert line.endswith(f"| {count:,} |")


def balanced(tex):
    """Asserts that braces and environments are closed in order."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", tex):
        depth += {"{": 1, "}": -1}.get(token, 0)
        assert depth >= 0
    assert depth == 0
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{([\w*]+)\}", tex):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    assert tex.replace(r"\$", "").count("$") % 2 == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")  # what the figures' font does not have
def test_latex_is_well_formed(tmp_path):
    """Checks braces, environments, columns and characters, without running LaTeX."""
    grid = {"mode_l": ["a_b & 50% #1", "β=2 ‖x‖ → ∞", "C:\\new^2~{}$x$", "中 é"]}
    claims = {
        "µ<|_{^": "score(mode_l='中 é') > score(mode_l='a_b & 50% #1') - 0.5",
    }
    options = {"options": FIELDS["options"]}
    sweep = declaration.declared(
        FIELDS | options | {"grid": grid, "claims": claims, "trainer": "ppo"},
        source="file",
    )
    planned.begin(sweep, out=tmp_path / "sweep")
    for number, run in enumerate(planned.runs_of(sweep, out=tmp_path / "sweep")):
        place = run.folder
        place.mkdir(parents=True)
        row = {"stage": "ppo", "step": 0, "objective/scores": -float(number)}
        (place / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (place / "summary.json").write_text('{"policy": {"kl": 1.0}}')
        (place / "config.json").write_text("{}")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    for file in out.rglob("*.tex"):
        tex = file.read_text()
        balanced(tex)
        assert all(ord(char) <= 0x17F for char in tex), file
    balanced((out / "references.bib").read_text())
    tex = (out / "tables/results.tex").read_text()
    kinds = re.search(r"\\begin\{tabular\}\{(.*)\}\n", tex)[1]
    lines = [line for line in tex.splitlines() if line.endswith(r" \\")]
    assert len(lines) == 1 + len(grid["mode_l"])
    for line in lines:
        assert len(re.findall(r"(?<!\\)&", line)) == len(kinds) - 1
    assert r"a\_b \& 50\% \#1" in tex
    assert r"$\beta$=2 $\|$x$\|$ $\to$ $\infty$" in tex
    assert r"C:\textbackslash{}new\textasciicircum{}2\textasciitilde{}\{\}\$x\$" in tex
    assert "U+4E2D é" in tex
    assert r"What does $\beta$ buy, 100\% of it?" in tex
    example = (out / "example.tex").read_text()
    for name in re.findall(r"\\input\{(.*?)\}", example):
        assert (out / f"{name}.tex").is_file()
    assert example.count(r"\input") == 7  # methods, three tables, three figures
    for name in re.findall(
        r"includegraphics.*?\{(.*?)\}",
        "".join(file.read_text() for file in out.glob("figures/*.tex")),
    ):
        assert (out / name).is_file()


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("κ_ref − 0.5", r"$\kappa$\_ref $-$ 0.5"),
        ("kl=-0.5, 1e-3, a-b", r"kl=$-$0.5, 1e-3, a-b"),
        ("--kl-coef", "-{}-kl-coef"),
        ("a---b ```", "a-{}--b `{}``"),
        ("λ² ≤ x₁", r"$\lambda$${}^{2}$ $\le$ x${}_{1}$"),
        (
            "Α α ς ε Λ λ ο",
            r"U+0391 $\alpha$ $\varsigma$ $\varepsilon$ $\Lambda$ $\lambda$ $o$",
        ),
        ("e\u0301 \u00b5 “q”", r"é $\mu$ ``q''"),
        ("a\nb\x07", "a bU+0007"),
    ],
)
def test_text_is_escaped(text, tex):
    assert latex.escaped(text) == tex


@pytest.mark.slow
def test_equal_sweeps_give_equal_files(tmp_path):
    for name in ("a", "b"):
        swept(tmp_path / name / "sweep")
        published(tmp_path / name / "sweep", tmp_path / name / "paper")
    files = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name / "paper").rglob("*")
            if path.is_file()
        }
        for name in ("a", "b")
    ]
    assert files[0] == files[1]
    assert {path.suffix for path in files[0]} == {
        *(".csv", ".md", ".tex", ".pdf", ".svg", ".bib")
    }
    assert not [path for path, text in files[0].items() if b"/CreationDate" in text]


def test_methods_say_what_the_runs_recorded(tmp_path):
    swept(tmp_path / "sweep")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    text = (out / "methods.md").read_text()
    for fact in (
        "runs rlhf-jax ppo in 4 cells (kl_coef ∈ {0, 0.2}; value_estimator ∈ {k1, k3})",
        "from seeds 0, 1, 2. Every run has lam = 0.95.",
        "Model: runs/sft_{seed}/model.",
        "Data: p.jsonl (--prompts, 1,253 of 1,319 rows).",
        "SHA-256 of the data as read: ppo data 121212121212.",
        "Fingerprint of the reference: 000000000000 (seed 0); ",
        "rlhf_jax 0.2.0 (abcdef012345, changed) [@rlhf_jax], with python 3.11.7, jax",
        "files differed from it. Hardware: 8 gpu (NVIDIA H100).",
        "Steps took 36 minutes over all runs, at most 3 minutes per run; time outside",
        "Of 2 claims 1 is answered yes, 0 no, and 1 stays open.",
        "By their options, the runs use PPO [@schulman2017ppo], GAE",
    ):
        assert fact in text, fact
    tex = (out / "methods.tex").read_text()
    assert r"PPO~\cite{schulman2017ppo}, GAE~\cite{schulman2015gae}" in tex
    keys = set(re.findall(r"\\cite\{(\w+)\}", tex))
    bib = (out / "references.bib").read_text()
    assert keys == set(re.findall(r"^@\w+\{(\w+),", bib, re.MULTILINE))
    assert "note = {Version 0.2.0}" in bib
    runs = rows_of(out / "tables/runs.csv")
    assert len(runs) == 12
    assert runs[0]["sha256 of ppo data"] == "12" * 32
    assert runs[-1]["rlhf_jax"] == VERSIONS["rlhf_jax"]
    assert runs[-1]["seconds"] == "180.0"


def test_methods_say_what_a_label_stands_for(tmp_path):
    how = [
        {"label": "none", "lam": 1.0, "batch_size": 8},
        {"label": "k1 twice", "lam": 0.9, "batch_size": 8, "num_steps": 4},
    ]
    grid = {"grid": {"kl_coef": [0.0, 0.2], "how": how}, "claims": {}}
    sweep = declaration.declared(
        FIELDS | grid | {"options": {"model": "m"}}, source="file"
    )
    text = methods._design(sweep, [])
    assert (
        "(kl_coef ∈ {0, 0.2}; how ∈ {none, k1 twice}), from seeds 0, 1, 2. none "
        "has lam = 1. k1 twice has lam = 0.9, num_steps = 4. Other options"
    ) in text


@pytest.mark.slow
def test_methods_say_what_is_missing_and_what_differs(tmp_path):
    sweep = swept(tmp_path / "sweep")
    runs = planned.runs_of(sweep, out=tmp_path / "sweep")
    for run in runs:
        (run.folder / "data.json").unlink()
        (run.folder / "timings.jsonl").unlink()
        (run.folder / "snapshots/ppo/3/meta/metadata").unlink()
        config = json.loads((run.folder / "config.json").read_text())
        config["versions"]["rlhf_jax"] = "0.2.0"
        if run.cell == sweep.cells[0]:
            config["versions"]["devices"] = "1 cpu (cpu)"
        if run.seed == 1:
            del config["versions"]["jax"]
        if run.seed == 2:
            config["config"]["start"]["model"] = "another"
        (run.folder / "config.json").write_text(json.dumps(config))
    text = (
        published(tmp_path / "sweep", tmp_path / "paper") / "methods.md"
    ).read_text()
    for fact in (
        "There is no receipt of the data (data.json).",
        "There is no snapshot with a digest of the data.",
        "jax 0.10.2 (seeds 0, 2); ",
        "not recorded (seed 1)",
        "Model: runs/sft_0/model (seed 0); runs/sft_1/model (seed 1); "
        "another (seed 2).",
        "Not every run records a commit.",
        "Hardware: 1 cpu (cpu) (kl_coef=0,value_estimator=k1); 8 gpu (NVIDIA H100) (",
        "No run has timings.",
    ):
        assert fact in text, fact
    for run in runs:  # of a program that writes no config of ours
        (run.folder / "config.json").write_text("[]")
    text = (
        published(tmp_path / "sweep", tmp_path / "paper") / "methods.md"
    ).read_text()
    assert "No config names a model." in text
    assert "No versions are recorded. The hardware is not recorded." in text


@pytest.mark.parametrize(
    ("trainer", "config", "keys"),
    [
        ("grpo", {"baseline": "group"}, {"shao2024deepseekmath"}),
        ("grpo", {"baseline": "leave_one_out"}, {"ahmadian2024rloo"}),
        (
            "grpo",
            {"surrogate": {"kind": "clip", "ratio_level": "sequence"}},
            {"zheng2025gspo"},
        ),
        ("dpo", {"kind": "simpo"}, {"meng2024simpo"}),
        (
            "dpo",
            {"kind": "sigmoid", "label_smoothing": 0.1},
            {"rafailov2023dpo", "mitchell2023cdpo"},
        ),
        ("dpo", {"kind": "sigmoid", "label_smoothing": 0.0}, {"rafailov2023dpo"}),
        ("sft", {"lora": {"rank": 8}}, {"hu2021lora"}),
        ("sft", {"lora": None}, set()),
        (
            "ppo",
            {"penalty": {"placement": None, "value_estimator": "k1"}},
            {"schulman2017ppo", "schulman2015gae"},
        ),
        (
            "ppo",
            {"kl_control": {"kind": "adaptive"}, "optimizer": {"kind": "adamw"}},
            {
                *("schulman2017ppo", "schulman2015gae", "ziegler2019finetuning"),
                "loshchilov2017adamw",
            },
        ),
    ],
)
def test_what_is_cited_is_what_the_config_says(tmp_path, trainer, config, keys):
    fields = FIELDS | {"trainer": trainer}
    sweep = declaration.declared(fields, source="file")
    run = planned.runs_of(sweep, out=tmp_path)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "summary.json").write_text("{}")
    (run.folder / "config.json").write_text(json.dumps({"config": {"method": config}}))
    cited = citations.cited([provenance.read(run)])
    assert {entry.key for entry in cited} == keys | {"rlhf_jax"}
    assert "note = {Version not recorded}" in cited[-1].bibtex


def test_the_bibliography_is_whole():
    entries = citations.entries()
    text = (ROOT / "rlhf_jax/reports/paper/references.bib").read_text()
    assert len(entries) == text.count("\n@") > 20
    assert len({entry.key for entry in entries}) == len(entries)
    for entry in entries:
        balanced(entry.bibtex)
        assert (entry.name == "") == (entry.key == "rlhf_jax")
        assert re.search(r"arXiv:\d{4}\.\d{4,5}\}|\\url|Version", entry.bibtex)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    software = re.sub(r"[{}\\]", "", entries[-1].bibtex)
    assert f"title = {citation['title']}" in software
    assert f"author = {citation['authors'][0]['name']}" in software
    assert f"year = {citation['date-released'][:4]}" in software


def test_a_figure_has_every_seed_and_the_interval(tmp_path):
    sweep = swept(tmp_path / "sweep")
    of = results.collected(sweep, planned.runs_of(sweep, out=tmp_path / "sweep"))
    _, drawn = figures.of_measures(sweep, of, width=3.25)
    assert drawn.name == "kl_end"
    axis = drawn.figure.axes[0]
    assert drawn.figure.get_size_inches()[0] == 3.25
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        *("0, k1", "0, k3", "0.2, k1", "0.2, k3")
    ]
    assert drawn.figure.get_suptitle() == "kl_coef, value_estimator"
    assert axis.lines[0].get_xdata().tolist() == [80.0, 81.0, 82.0]
    ((bar,),) = (part for part in axis.containers[0][2:] if part)
    low, high = bar.get_segments()[0][:, 0]
    assert (low, high) == pytest.approx(interval([80.0, 81.0, 82.0]))
    assert drawn.caption == (
        "kl_end, policy.kl of summary.json, of each cell (kl_coef, value_estimator): "
        "the mean over 3 seeds with its 95% Student's t interval; small dots are seeds."
    )


@pytest.mark.parametrize(
    ("name", "is_kl"),
    [
        *((name, True) for name in ("objective/kl", "policy.kl", "eval/kl")),
        *((name, True) for name in ("held_out_kl_after", "objective/kl_exact", "kl")),
        *((name, False) for name in ("objective/kl_coef", "loss/kl_clipfrac")),
        *((name, False) for name in ("policy/approxkl", "kl_every", "end.score")),
    ],
)
def test_a_measure_is_a_kl_by_its_metric(name, is_kl):
    assert bool(figures.KL.search(name)) == is_kl


def test_a_frontier_is_a_measure_against_the_kl(tmp_path):
    left_out = ["kl_coef=0,value_estimator=k1 seed 2"]
    sweep = swept(tmp_path / "sweep", left_out=left_out)
    of = results.collected(sweep, planned.runs_of(sweep, out=tmp_path / "sweep"))
    of.values["score"][sweep.cells[1]].pop(0)  # a seed with one measure alone
    [drawn] = figures.of_frontiers(sweep, of, width=3.25)
    assert drawn.name == "score_against_kl_end"
    assert drawn.caption == (
        "score, objective/scores, mean of the last 2 rows, against kl_end, policy.kl "
        "of summary.json: means over seeds of each cell (kl_coef, value_estimator) "
        "with 95% Student's t intervals of both; small dots are seeds."
    )
    axis = drawn.figure.axes[0]
    assert axis.get_xlabel() == "kl_end"
    for cell, seeds, bars in zip(
        sweep.cells,
        [[0, 1], [1, 2], [0, 1, 2], [0, 1, 2]],
        axis.containers,
        strict=True,
    ):
        kl = [kl_of(cell, seed) for seed in seeds]
        score = [
            np.mean([score_of(cell, seed, step) for step in (1, 2)]) for seed in seeds
        ]
        across, upright = (part.get_segments()[0] for part in bars[2])
        assert bars[0].get_xydata()[0] == pytest.approx([np.mean(kl), np.mean(score)])
        assert across[:, 0] == pytest.approx(interval(kl))
        assert upright[:, 1] == pytest.approx(interval(score))
    [legend] = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("0, k1", "0, k3", "0.2, k1", "0.2, k3")
    ]


def test_a_sweep_without_a_kl_has_no_frontier(tmp_path):
    sweep = swept(
        tmp_path / "sweep", measures={"a": {"metric": "objective/scores"}}, claims={}
    )
    of = results.collected(sweep, planned.runs_of(sweep, out=tmp_path / "sweep"))
    assert figures.of_frontiers(sweep, of, width=3.25) == []


@pytest.mark.slow
def test_nothing_is_cut_off_a_figure(tmp_path):
    """Names and labels lie within the figure, also long ones and ones with $."""
    how = [f"the {n}th label of many words that says what it is $x$" for n in range(3)]
    grid = {"an_option_with_a_long_name": how, "another_option_of_the_grid": [0.25]}
    fields = FIELDS | {"grid": grid, "claims": {}, "trainer": "ppo"}
    sweep = declaration.declared(fields, source="file")
    numbers = {cell: {0: 1.0, 1: 3.0} for cell in sweep.cells}
    of = results.Results({"score": numbers, "kl_end": {}}, [], {})
    [drawn] = figures.of_measures(sweep, of, width=3.25)
    drawn.save(tmp_path)
    figure, axis = drawn.figure, drawn.figure.axes[0]
    for text in (*axis.get_yticklabels(), axis.xaxis.label, *figure.texts):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    assert axis.get_position().width > 0.3
    of = results.Results({"score": numbers, "kl_end": numbers}, [], {})
    [drawn] = figures.of_frontiers(sweep, of, width=3.25)
    drawn.save(tmp_path)
    box = drawn.figure.legends[0].get_window_extent()
    assert drawn.figure.bbox.x0 <= box.x0 <= box.x1 <= drawn.figure.bbox.x1
    assert drawn.figure.bbox.y0 <= box.y0
    assert drawn.figure.axes[0].get_position().height > 0.3
    boxes = sorted(text.get_window_extent().y0 for text in axis.get_yticklabels())
    heights = [text.get_window_extent().height for text in axis.get_yticklabels()]
    assert min(np.diff(boxes)) > max(heights)  # labels do not overlap


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["none"],
            "none/sweep.json: expected the sweep.json of a sweep, got a file that",
        ),
        (["old"], "got those of an older version, which kept none; give the command"),
        (["bad"], "of a sweep, got one without trainer"),
        (["sweep", "--out=full"], "an earlier paper, got notes.txt; give another"),
        (["sweep", "--out=sweep"], "an earlier paper, got runs, sweep.json; give"),
        (["sweep", "--out=other"], "an earlier paper, got README.md; give another"),
        (["sweep", "--out=full/notes.txt"], "earlier paper, got a file; give another"),
        (["sweep", "--width=0"], "--width: expected a number of at least 1 and of at"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    swept(tmp_path / "sweep")
    for name, text in (
        ("old", '{"trainer": null, "program": [], "options": {}}'),
        ("bad", '{"asked": {"question": 1}}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/README.md").write_text("# Mine")
    out = [] if "--out" in "".join(argv) else ["--out=paper"]
    with pytest.raises(SystemExit) as exit_:
        main.main(["paper", *argv, *out])
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert (tmp_path / "full/notes.txt").read_text() == "mine"
    assert not (tmp_path / "paper").exists()


@pytest.mark.slow
def test_an_earlier_paper_is_replaced_and_other_files_stay(tmp_path, capsys):
    swept(tmp_path / "sweep")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    (out / "example.log").write_text("of pdflatex")
    fewer = {"measures": {"score": "objective/scores"}, "claims": {}}
    swept(tmp_path / "sweep", **fewer)
    capsys.readouterr()
    published(tmp_path / "sweep", out)
    printed = capsys.readouterr().out
    assert "12 of 12 runs, 1 measure, 0 claims (0 open)" in printed
    assert "not replaced: figures/kl_end.pdf, figures/kl_end.svg, figures/k" in printed
    assert (out / "example.log").exists()
    assert "kl_end" not in (out / "example.tex").read_text()


def test_a_sweep_of_one_cell_and_one_seed_promises_no_interval(tmp_path):
    fields = {"grid": {}, "seeds": [0], "measures": {"score": "objective/scores"}}
    fields["claims"] = {"good": "score() > 0.5"}
    sweep = declaration.declared(FIELDS | fields, source="file")
    planned.begin(sweep, out=tmp_path / "sweep")
    [run] = planned.runs_of(sweep, out=tmp_path / "sweep")
    run.folder.mkdir(parents=True)
    row = {"stage": "ppo", "step": 0, "objective/scores": 2.0}
    (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run.folder / "summary.json").write_text("{}")
    out = published(tmp_path / "sweep", tmp_path / "paper")
    assert "| all | 1 | 2 |" in (out / "tables/results.md").read_text()
    claim = (out / "tables/claims.md").read_text().splitlines()[-1]
    assert claim == "| good | not enough seeds | 1 | 1.5 | not known |"
    assert "One seed alone has no interval." in (out / "figures/score.tex").read_text()
    assert not (out / "tables/differences.md").exists()
    assert "in 1 cell, from seeds 0." in (out / "methods.md").read_text()


def test_citations_become_cite():
    assert methods.as_latex("PPO [@a1], 5% [@b].") == r"PPO~\cite{a1}, 5\%~\cite{b}."
