"""The file: no text ends its HTML element, and nothing is loaded from a network."""

import json
import os
import re

import pytest
from toy_runs import run

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document
from rlhf_jax.train import main, report

TEXTS = ["</script><script>alert(1)</script>", "<!--", "a & b", "\u2028", "${STYLE}"]


@pytest.fixture
def without_library(monkeypatch):
    """Replaces the plotting library of 4.8 MB by a short text."""
    monkeypatch.setattr(document, "plotly", lambda: "/* plotly */")


def data_in(page):
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cannot_end_the_script_that_it_is_in(text, without_library):
    page = document.page({"title": text, "text": text})
    assert data_in(page) == {"title": text, "text": text}
    assert text not in document.as_script({"text": text}).replace("${STYLE}", "")


def test_the_title_is_escaped(without_library):
    page = document.page({"title": "<b>&</b>"})
    assert "<title>&lt;b&gt;&amp;&lt;/b&gt;</title>" in page


def test_every_part_is_filled_in_and_every_script_is_there(without_library):
    page = document.page({"title": "x"})
    assert not re.search(r"\{\{[A-Z]+\}\}", page)
    for name in document.SCRIPTS:
        assert document._file(name) in page


@pytest.mark.parametrize(("live", "connect"), [(False, "'none'"), (True, "'self'")])
def test_a_page_on_disk_may_ask_nothing_and_a_served_one_its_server(
    live, connect, without_library
):
    page = document.page({"title": "x"}, live=live)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    assert f"connect-src {connect};" in policy
    assert policy.startswith("default-src 'none';")
    assert f"const LIVE = {str(live).lower()};" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'rlhf-jax\[report\]'"):
        document.page({"title": "x"})


def test_the_command_writes_the_page_and_says_its_size(
    tmp_path, capsys, without_library
):
    folder, html = run(tmp_path / "a"), tmp_path / "a.html"
    main.main(["report", str(folder), "--html", str(html), "--title", "My runs"])
    assert data_in(html.read_text())["title"] == "My runs"
    assert capsys.readouterr().out == f"1 run, 0.1 MB, in {html}\n"


def test_a_text_with_half_a_character_is_written(tmp_path, without_library):
    page = document.page({"title": "x", "text": "\ud800 a"})
    assert data_in(page.encode().decode())["text"] == "? a"


def test_only_a_page_of_ours_is_replaced(tmp_path, capsys, without_library):
    folder, html = run(tmp_path / "a"), tmp_path / "notes.html"
    html.write_text("<p>mine</p>")
    with pytest.raises(SystemExit):
        main.main(["report", str(folder), "--html", str(html)])
    assert "got another" in capsys.readouterr().err
    assert html.read_text() == "<p>mine</p>"
    html.unlink()
    for _ in range(2):
        main.main(["report", str(folder), "--html", str(html)])
    assert data_in(html.read_text())["title"] == "a"


def test_watch_without_the_library_ends_before_it_serves(tmp_path, monkeypatch, capsys):
    folder = run(tmp_path / "a")

    def missing():
        raise InputError("needs the package plotly")

    monkeypatch.setattr(document, "plotly", missing)
    with pytest.raises(SystemExit) as exit_:
        main.main(["report", str(folder), "--watch", "--port", "0"])
    assert exit_.value.code == 2
    assert "plotly" in capsys.readouterr().err


def test_all_that_a_report_lacks_is_named_at_once():
    message = r"expected the folder of a run, .*\nexpected --html FILE, to write"
    with pytest.raises(InputError, match=message):
        report.Config(runs=()).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["RUN"], "expected --html FILE, to write the page, or --watch"),
        (["RUN", "--html", "no/such/folder/x.html"], "a folder that exists"),
        (["RUN", "--html", "."], "report, got a folder"),
        (["RUN", "--html", f"{'x' * 300}.html"], "File name too long"),
        (["x" * 300, "--html", "x.html"], "File name too long"),
        (["RUN", "--html", "pipe"], "got no regular file"),
        (["none", "--html", "x.html"], "expected the folder of a run"),
        (["RUN", "--html", "x.html", "--metrics", "kl"], "got kl, which no run has"),
        (
            ["RUN", "--watch", "--port", "70000"],
            "--port: expected a number of at least 0 and of at most 65535",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    options, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "RUN")
    os.mkfifo("pipe")
    with pytest.raises(SystemExit) as exit_:
        main.main(["report", *options])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "x.html").exists()
