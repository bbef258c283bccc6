"""The server of --watch: local access only, two paths, and updated data."""

import http.client
import json

import pytest
import toy_page
from toy_runs import run

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document, watching
from rlhf_jax.train import report


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(server, folder of the run)."""
    monkeypatch.setattr(document, "plotly", lambda: "/* plotly */")
    folder = run(tmp_path / "a", steps=3, done=False)
    options = report.Config(runs=(folder,), watch=True, port=0)
    source = watching.Source(options.runs, load=lambda: report.load(options))
    with toy_page.serving(source) as server:
        yield server, folder


def fetched(server, path, *, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_it_listens_on_this_machine_alone(served):
    server, _ = served
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_port}/"


def test_the_page_and_its_data_and_nothing_else(served):
    server, _ = served
    status, body, headers = fetched(server, "/")
    assert status == 200
    assert b"const LIVE = true;" in body
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    status, body, _ = fetched(server, "/data.json")
    assert status == 200
    assert json.loads(body)["runs"][0]["steps"] == 3
    for path in ("/metrics.jsonl", "/../config.json", "/data.json/x"):
        assert fetched(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE"):
        assert fetched(server, "/", method=method)[0] == 501, method


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:1", "127.0.0.1"])
def test_another_name_for_this_address_is_not_answered(host, served):
    """Otherwise a site whose name resolves to this address could read the runs."""
    server, _ = served
    assert fetched(server, "/data.json", Host=host)[0] == 403


def test_new_rows_are_new_data_and_old_data_are_not_sent_again(served):
    server, folder = served
    _, _, headers = fetched(server, "/data.json")
    tag = headers["ETag"]
    assert fetched(server, "/data.json", If_None_Match=tag)[:2] == (304, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 3, "objective/scores": 1.0}\n{"sta')
    status, body, headers = fetched(server, "/data.json", If_None_Match=tag)
    assert status == 200
    assert json.loads(body)["runs"][0]["steps"] == 4
    assert headers["ETag"] != tag


def test_a_file_that_cannot_be_read_leaves_the_last_data(served, capsys):
    server, folder = served
    (folder / "metrics.jsonl").write_text("no row\n")
    status, body, _ = fetched(server, "/data.json")
    assert status == 200
    assert json.loads(body)["runs"][0]["steps"] == 3
    assert "not read again yet" in capsys.readouterr().err


def test_a_port_that_is_taken(served):
    server, _ = served
    with pytest.raises(InputError, match=r"expected a free port"):
        watching.Server(server.source, port=server.server_port)
