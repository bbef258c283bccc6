"""The site: one command builds all of it, and every link has a target."""

import functools
import html.parser
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from places import ROOT

import rlhf_jax

SITE = ROOT / ".ci" / "site"
PACKAGE = ROOT / "rlhf_jax"
MAX_BYTES = 12_000_000
MODULES = [
    file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.name != "__main__.py" and "templates" not in file.parts
]
pytestmark = pytest.mark.slow


def python(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = python(SITE, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """(anchors of a page, addresses of its links and images)."""

    def __init__(self, file):
        super().__init__()
        self.names, self.addresses = {"", "__top"}, []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.names.add(named.get("id"))
        for key in ("href", "src"):
            if key in named and tag != "link":
                self.addresses.append(named[key])


def text_of(file):
    return file.read_text(encoding="utf-8")


def page_of(site, file):
    """The address of a module's reference."""
    within = file.relative_to(PACKAGE)
    name = "index" if file.name == "__init__.py" else file.stem
    return site / "reference" / within.with_name(f"{name}.html")


def test_every_module_has_a_page_and_every_package_leads_to_its_own(site):
    assert len(MODULES) > 400
    for file in MODULES:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        assert f"id={name.removesuffix('.__init__')}>" in text_of(page_of(site, file))
    front = text_of(site / "reference" / "index.html")
    for name in (*rlhf_jax.PACKAGES, *rlhf_jax.__all__):
        assert re.search(rf"href=[^>]*><?(code>)?(rlhf_jax\.)?{name}<", front), name
    losses = text_of(site / "reference" / "functional" / "losses.html")
    assert "id=rlhf_jax.functional.losses.policy_loss" in losses
    # The comment of a field, and a doctest.
    batch = text_of(site / "reference" / "algorithms" / "batch.html")
    assert "<p>True at tokens, False at padding" in batch
    assert "<span class=gp>>>> </span>old_logprobs" in losses


def test_every_link_leads_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    count, broken = 0, []
    for file, page in pages.items():
        for address in page.addresses:
            path, anchor = urldefrag(address)
            if urlsplit(path).scheme:
                assert path.startswith("https://"), address
                continue
            count += 1
            target = (file.parent / unquote(path)).resolve() if path else file
            names = pages[target].names if target in pages else {unquote(anchor)}
            if not target.is_file() or unquote(anchor) not in names:
                broken.append(f"{file.relative_to(site)}: {address}")
    assert count > 10_000
    assert not broken


def test_it_is_small(site):
    assert sum(one.stat().st_size for one in site.rglob("*")) < MAX_BYTES


def test_the_papers_are_those_of_docstrings_and_bibliography(site):
    papers = text_of(site / "papers.html")
    bibliography = PACKAGE / "reports" / "paper" / "references.bib"
    cited = re.findall(r"arXiv:([\d.]+\d)", text_of(bibliography))
    functional = [file for file in MODULES if "functional" in file.parts]
    cited += re.findall(
        r"arXiv:([\d.]+\d)", "\n".join(text_of(file) for file in functional)
    )
    assert len(set(cited)) >= 40
    for number in cited:
        assert f"https://arxiv.org/abs/{number}" in papers
    (ppo,) = re.findall(r"id=schulman-et-al-2017>.*?<h2", papers, flags=re.DOTALL)
    assert "Proximal Policy Optimization Algorithms" in ppo
    assert (
        "reference/functional/losses.html#rlhf_jax.functional.losses.policy_loss" in ppo
    )
    for source in ("Kong 1992", "Cover and Thomas, Elements of Information Theory"):
        assert source in papers


@pytest.fixture(scope="module")
def browser(site):
    webdriver = pytest.importorskip("selenium.webdriver", reason="of the extra test")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    switches = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage")
    for switch in (*switches, "window-size=1400,1000"):
        options.add_argument(f"--{switch}")
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service = webdriver.ChromeService(driver)
    with server, webdriver.Chrome(options=options, service=service) as chrome:
        chrome.get(f"http://127.0.0.1:{server.server_port}/index.html")
        yield chrome
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format, *args):
        pass


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("gradient of k3", "kl/index.html#what-is-the-gradient-of-my-choice"),
        ("how to resume", "runs/index.html#how-do-i-stop-a-run-and-resume-it"),
        ("how to write a verifier", "rewards/index.html#how-do-i-add-a-verifier"),
        ("policy_loss", "losses.html#rlhf_jax.functional.losses.policy_loss"),
    ],
)
def test_the_search_answers_a_question_within_three_pages(browser, question, answer):
    box = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("arguments[0].click()", box)
    box.clear()
    box.send_keys(question)
    first = "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
    links = "one => [...one.querySelectorAll('a')].map(link => link.href)"
    ends, found = time.monotonic() + 60, []
    while not any(re.sub(r"\?h=[^#]*", "", one).endswith(answer) for one in found):
        assert time.monotonic() < ends, found
        time.sleep(0.2)
        found = browser.execute_script(f"return {first}.flatMap({links})")


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize(
    "page",
    [
        *("index", "papers", "experiments/index", "rlhf_jax/algorithms/index"),
        *("rlhf_jax/runs/index", "reference/index", "reference/functional/losses"),
    ],
)
def test_a_page_is_as_wide_as_the_screen_and_shows_its_images(browser, width, page):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1}
    size["mobile"] = width < 500
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    root = "/".join(browser.current_url.split("/")[:3])
    browser.get(f"{root}/{page}.html")
    whole = "return document.documentElement.scrollWidth"
    assert browser.execute_script(whole) <= width
    missing = "[...document.images].filter(one => !one.naturalWidth)"
    assert browser.execute_script(f"return {missing}.map(one => one.src)") == []


@pytest.fixture
def checkout(tmp_path):
    """The smallest sources of a site."""
    shutil.copytree(SITE, tmp_path / ".ci" / "site")
    for name in ("", "experiments", "tests", "rlhf_jax", "rlhf_jax/reports"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "README.md").write_text("# Title\n", "utf-8")
    (tmp_path / "rlhf_jax" / "README.md").rename(tmp_path / "rlhf_jax" / "CHANGELOG.md")
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "rlhf_jax")
    return tmp_path


def test_a_folder_with_other_files_is_refused(tmp_path):
    """MkDocs would empty the folder."""
    pytest.importorskip("mkdocs", reason="the extra docs")
    (tmp_path / "mine").touch()
    done = python(SITE, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "name another folder" in done.stderr
    assert (tmp_path / "mine").is_file()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a](tests/README.md#title) [b](.ci/site) [c](#title)", ""),
        ("[a](none.md)", "README.md: the link none.md leads to nothing"),
        ("[a](tests/README.md#none)", "does not contain an anchor '#none'"),
        ("[a][none.such]", "Could not find cross-reference target 'none.such'"),
    ],
)
def test_a_broken_link_in_a_document_fails_the_build(checkout, text, told):
    pytest.importorskip("mkdocs", reason="the extra docs")
    (checkout / "README.md").write_text(f"# Title\n\n{text}\n", "utf-8")
    done = python(checkout / ".ci" / "site", checkout / "built")
    assert done.returncode == (1 if told else 0), done.stderr
    assert told in done.stderr
