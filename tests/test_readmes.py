"""The documents: names in a README exist, and its examples run."""

import functools
import json
import re
import shlex
import statistics
import tomllib
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from places import EXPERIMENTS, PROGRAMS, RECORDED, ROOT, TESTS

import rlhf_jax
from rlhf_jax.runs import alarms
from rlhf_jax.train import main, trainer

PACKAGE = ROOT / "rlhf_jax"
TOP = ROOT / "README.md"
CHANGELOG = PACKAGE / "CHANGELOG.md"
DOCUMENTS = [
    TOP,
    *sorted(
        file
        for folder in (PACKAGE, EXPERIMENTS, TESTS)
        for name in ("README.md", "CHANGELOG.md")
        for file in folder.rglob(name)
    ),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Metrics are named by a group and a name; other strings with a slash are not of these.
GROUPS = (
    *("objective", "policy", "loss", "value", "response", "drift", "update", "critic"),
    *("penalty", "pairwise", "dpo", "kto", "pair", "group", "eval", "judge", "reward"),
    "trust",
)

POLICY_GRADIENTS = ("ppo", "grpo", "reinforce", "online-dpo", "nash-md", "distill")
# Of tyro, pytest, JAX, XLA and vLLM.
OTHERS_OPTIONS = {"help", "help-all", "dist", "xla", "logdir", "project", "tasks"}
OTHERS_OPTIONS |= {"generation-config", "load-format", "logprobs-mode", "no-deps"}
OTHERS_OPTIONS |= {"nbmake", "short"}


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, info: str) -> list[str]:
    """The code blocks whose first line is ```info."""
    pattern = rf"^```{re.escape(info)}\n(.*?)^```"
    return re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE):
        slug = "".join(
            char
            for char in heading.lower()
            if char in " -_" or unicodedata.category(char)[0] in "LN"
        )
        names.add(slug.replace(" ", "-"))
    return names


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links to missing files or missing headings of documents."""
    broken = []
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = folder / path if path else None
        if target is not None and not target.exists():
            broken.append(link)
        elif anchor:
            target_text = text if target is None else text_of(target)
            broken += [] if anchor in anchors(target_text) else [link]
    return broken


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_every_relative_link_leads_somewhere(file):
    assert not broken_links(text_of(file), file.parent)


def test_a_broken_link_is_found():
    text = (
        "# A title: here\n[a](none.py) [b](README.md) [c](#a-title-here) [d](#gone)\n"
        "[e](https://jax.dev/none)\n```text\n[f](none.md)\n```\n"
    )
    assert broken_links(text, ROOT) == ["none.py", "#gone"]
    assert broken_links("[a](README.md#no-such-heading)", ROOT)


def test_the_top_readme_is_short():
    assert len(text_of(TOP).splitlines()) <= 150


def test_every_folder_that_the_top_readme_names_a_package_for_is_one():
    """The README also names every package."""
    named = set(re.findall(r"\]\(rlhf_jax/(\w+)(?:/README\.md)?\)", text_of(TOP)))
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert named == folders


@pytest.mark.parametrize(
    "file", [file for file in DOCUMENTS if PACKAGE in file.parents[1:]], ids=relative
)
def test_the_readme_of_a_package_names_every_module_in_its_folder(file):
    text = text_of(file)
    modules = {module.name for module in file.parent.glob("*.py")} - {"__init__.py"}
    assert not [name for name in sorted(modules) if name not in text]


def test_every_test_that_a_readme_names_is_there():
    files = {file.name: file for file in TESTS.rglob("test_*.py")}
    missing, count = [], 0
    for document in DOCUMENTS:
        for file, name in re.findall(r"(test_\w+\.py)::(test_\w+)", text_of(document)):
            count += 1
            if file not in files or f"\ndef {name}(" not in text_of(files[file]):
                missing.append(f"{relative(document)}: {file}::{name}")
    assert count > 50  # of the details of PPO
    assert not missing


def test_every_detail_of_ppo_has_a_test():
    rows = re.findall(
        r"^\| (\d+) \|.*$",
        text_of(PACKAGE / "algorithms" / "README.md"),
        flags=re.MULTILINE,
    )
    assert sorted(set(map(int, rows))) == list(range(1, 22))
    for row in text_of(PACKAGE / "algorithms" / "README.md").splitlines():
        if re.match(r"\| \d+ \|", row):
            assert re.search(r"test_\w+\.py::test_\w+", row), row


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_every_experiment_that_a_readme_runs_is_there(file):
    for name in re.findall(
        r"python experiments ([a-z_]+(?:\.[a-z_0-9]+)+)", text_of(file)
    ):
        assert (EXPERIMENTS / f"{name.replace('.', '/')}.py").is_file(), name
    for path in re.findall(r"python (experiments/\w+\.py)", text_of(file)):
        if file.name == "README.md" and file.parent != EXPERIMENTS:
            assert (ROOT / path).is_file(), path


@pytest.mark.slow  # the eager programs of a new model take seconds to compile
@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_the_python_of_the_readmes_runs(file):
    """Blocks marked ```python run, each in a namespace of its own."""
    code = blocks(text_of(file), "python run")
    assert code or file != TOP
    for block in code:
        exec(compile(block, str(file), "exec"), {})


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_the_python_of_the_readmes_imports_what_there_is(file):
    """Checked also for blocks that only illustrate a call."""
    lines = [
        line
        for info in ("python", "python run")
        for block in blocks(text_of(file), info)
        for line in re.findall(r"^from rlhf_jax.*$", block, flags=re.MULTILINE)
    ]
    for line in lines:
        exec(line, {})


@functools.cache
def fields_of_configs() -> set[str]:
    source = "\n".join(
        text_of(module)
        for folder in (PACKAGE, EXPERIMENTS, PROGRAMS)
        for module in folder.rglob("*.py")
    )
    fields = set(re.findall(r"^ +([a-z]\w*): ", source, flags=re.MULTILINE))
    words = re.findall(r'(?:"--|arg\(name=")([a-z-]+)"', source)
    return fields | {name.replace("-", "_") for name in words}


def old_options():
    """The options that the changelog says are gone; `rlhf-jax sft` still has --data."""
    rows = re.findall(r"^\| `(--[\w.-]+)` \| `.*` \|$", text_of(CHANGELOG), re.M)
    assert len(rows) > 50
    return {*rows} - {"--data"}


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_every_option_that_a_readme_names_is_a_field_of_some_config(file):
    fields = fields_of_configs()
    options = set(re.findall(r"(?<![\w-])--([a-z][a-z.-]*[a-z])", text_of(file)))
    gone = {name[2:] for name in old_options()}
    if file == CHANGELOG:
        options -= gone
    unknown = {
        option
        for option in options - OTHERS_OPTIONS
        for part in option.removeprefix("no-").replace("-", "_").split(".")
        if part not in fields
    }
    assert not unknown | (options & gone)


def test_no_test_runs_with_an_option_that_is_gone():
    """Includes slow tests, but not the tests of messages about removed options."""
    gone = old_options()
    about = {"test_bad_options", "test_choices", "test_evaluate", "test_sweep"}
    about |= {"test_command_line", "test_help_screen"}  # of configs of their own
    used = {
        (file.name, word)
        for file in TESTS.rglob("*.py")
        if file.stem not in about
        for word in re.findall(r'"(--[a-z][a-z.-]*[a-z])', text_of(file))
        if word in gone
    }
    assert not used


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative)
def test_the_commands_of_a_readme_parse(file, monkeypatch):
    """Parses the commands that train, with values in place of "..."."""
    monkeypatch.setattr(trainer, "main", lambda config: None)
    monkeypatch.chdir(file.parent)
    for block in blocks(text_of(file), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["rlhf-jax"] or words[1] not in POLICY_GRADIENTS:
                continue
            if {"--config", "--help", "--coordinator"} & {*words}:
                continue
            _, name, *options = (word for word in words if word != "...")
            needed = {"--model": "m", "--prompts": "p", "--out": "o"}
            options += [f"{k}={v}" for k, v in needed.items() if k not in options]
            rewards = {"--reward", "--reward-model", "--verifier", "--rewards"}
            if not {*rewards, "--environment"} & {*options} and name != "distill":
                options.append("--verifier=exact")
            main.main([name, *options])


def test_every_metric_is_in_the_glossary():
    glossary = text_of(PACKAGE / "runs" / "README.md")
    known = set(re.findall(r"`([a-z_]+/\w+)`", glossary))
    for name, last in re.findall(r"`([a-z_]+/\w+)_1` to `_(\d)`", glossary):
        known |= {f"{name}_{number}" for number in range(1, int(last) + 1)}
    groups = "|".join(GROUPS)
    written = {
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(rf'"((?:{groups})/[a-z_0-9]*[a-z0-9])"', text_of(file))
    }
    recorded = {
        name
        for file in RECORDED.glob("quickstart/*.jsonl")
        for line in text_of(file).splitlines()
        for name in json.loads(line)
        if "/" in name
    }
    assert len(written) > 20
    assert len(recorded) > 20
    assert not (written | recorded) - known


def test_no_metric_of_the_glossary_is_gone():
    """A program contains its name or, for composed names, its last part."""
    text = text_of(PACKAGE / "runs" / "README.md")
    glossary = text.partition("## Metrics")[2].partition("## Alarms")[0]
    source = "\n".join(
        text_of(file) for root in (PACKAGE, EXPERIMENTS) for file in root.rglob("*.py")
    )
    gone = {
        name
        for name in re.findall(r"`([a-z]+/[a-z_0-9]+)`", glossary)
        if f'"{name}"' not in source and f'"{name.partition("/")[2]}"' not in source
    }
    composed = {"trust/distance_position_1", "trust/distance_prompt_1"}
    assert gone == {*composed, "critic/skipped"}


def test_every_alarm_is_in_the_glossary():
    glossary = text_of(PACKAGE / "runs" / "README.md")
    assert not [name for name in alarms.ADVICE if f"`{name}`" not in glossary]


def test_the_changelog_names_where_every_module_is():
    changelog = text_of(PACKAGE / "CHANGELOG.md")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", changelog, flags=re.MULTILINE)
    assert len(rows) > 100
    for old, new in rows:
        for name in re.findall(r"`([\w.]+)`", new):
            path = PACKAGE / name.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), (old, name)


def test_one_version_everywhere():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert all(author.get("name") for author in citation["authors"])
    assert project["authors"] == citation["authors"]
    assert project["keywords"] == citation["keywords"]
    version = rlhf_jax.__version__
    assert version == project["version"] == citation["version"]
    newest = re.search(
        r"^## \[(\S+)\] - (\S+)$", text_of(PACKAGE / "CHANGELOG.md"), re.MULTILINE
    )
    assert newest is not None
    assert newest.groups() == (version, citation["date-released"])


def row_of(text: str, name: str) -> list[str]:
    """The cells of the table's row that begins with `name`, without emphasis."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip().replace("*", "") for cell in row.split("|")]


def mean_and_range(values: list[float]) -> str:
    mean, least, most = statistics.mean(values), min(values), max(values)
    if round(most - least, 2) < 0.01:
        return f"{mean:.2f}"
    return f"{mean:.2f} ({least:.2f} to {most:.2f})"


def test_the_table_of_the_quickstart_is_what_was_recorded():
    record = json.loads(text_of(RECORDED / "quickstart" / "record.json"))["summaries"]
    seeds = [record[f"seed_{seed}"] for seed in range(3)]
    without = record["seed_0_kl_coef_0"]
    for name, key in {
        "gold score": "gold",
        "reward-model score": "score",
        "fluency (share that parses)": "fluency",
    }.items():
        assert row_of(text_of(TOP), name) == [
            mean_and_range([seed[f"{key}_reference"] for seed in seeds]),
            mean_and_range([seed[f"{key}_policy"] for seed in seeds]),
            f"{without[f'{key}_policy']:.2f}",
        ]
    assert row_of(text_of(TOP), "KL to the reference [nats per response]") == [
        "0",
        mean_and_range([seed["kl_policy"] for seed in seeds]),
        f"{without['kl_policy']:.2f}",
    ]


def test_the_table_of_the_frontier_is_what_was_recorded():
    record = json.loads(text_of(RECORDED / "kl_frontier" / "record.json"))["summary"]
    text = text_of(EXPERIMENTS / "README.md")
    for kl_coef, figures in record["kl_coefs"].items():
        cells = row_of(text, f"β = {kl_coef}")
        for column, key in enumerate(("kl", "gold", "score", "fluency", "distinct")):
            digits = 1 if key == "kl" else 2
            values = figures["of_seeds"][key]
            mean, deviation = statistics.mean(values), statistics.pstdev(values)
            shown, _, spread = cells[column].partition(" ± ")
            assert float(shown) == pytest.approx(mean, abs=0.51 * 10**-digits)
            assert float(spread or 0) == pytest.approx(
                deviation, abs=0.51 * 10**-digits
            )
