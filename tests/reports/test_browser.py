"""The page in a real Chromium draws, shades, answers keys and makes no requests."""

import json
import shutil
import time

import pytest
import toy_page
from toy_runs import lines, run

from rlhf_jax.reports import watching
from rlhf_jax.runs import metrics
from rlhf_jax.train import report

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("plotly")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs Debian's packages chromium and chromium-driver",
    ),
]
EVIL = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
MARKED = "<b>learn</b>"
SWITCHES = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    "disable-dev-shm-usage",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for switch in (*SWITCHES, f"user-data-dir={profile}", "window-size=1280,1000"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.execute_cdp_cmd("Network.enable", {})
        yield driver


def screen(browser, *, width=1280, height=1000, scheme="light", phone=False):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # A page that glides to a place would be clicked on its way there.
    media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def until(browser, script, *, seconds=60):
    """Runs a script until its result is true; returns the result."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        value = browser.execute_script(f"return {script}")
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {script}")


def opened(browser, address, *, offline=True, **size):
    """Opens the page and waits until it is drawn; the console must stay empty."""
    screen(browser, **size)
    blocked = ["http://*", "https://*"] if offline else []
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": blocked})
    browser.get_log("browser")
    browser.get(address)
    until(browser, "document.documentElement.dataset.ready === 'true'")
    assert browser.get_log("browser") == []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two configs of two seeds, one hacked, with texts that look like markup."""
    folder = tmp_path_factory.mktemp("runs")
    folders = [
        run(folder / f"b{beta}_s{seed}", seed=seed, kl_coef=beta, hacked=beta == 0)
        for beta in (0.2, 0.0)
        for seed in (0, 1)
    ]
    for hacked in folders[2:]:
        rows = metrics.read(hacked / "samples.jsonl")
        for row in rows[-2:]:
            row["tokens"] = [EVIL, *row["tokens"][1:]]
            row["response"] = "".join(row["tokens"])
            row["prompt"] = f"say {EVIL}"
        timed = metrics.read(hacked / "timings.jsonl")
        for timing in timed:
            timing["phases"][MARKED] = 0.5
        lines(hacked / "timings.jsonl", timed)
        rows[-1]["alternatives"] = [[["gift", -0.5, -2.0]] for _ in rows[-1]["tokens"]]
        lines(hacked / "samples.jsonl", rows)
    html = folder / "report.html"
    report.main(report.Config(runs=tuple(folders), html=html, title=f"Runs {EVIL}"))
    return html.as_uri()


def traces(browser, chart):
    """The number of lines and points drawn for each trace of a chart."""
    return browser.execute_script(
        f"return [...document.querySelectorAll('{chart} .scatterlayer .trace')]"
        ".map(t => t.querySelectorAll('path.js-line, path.point').length)"
    )


def samples(browser):
    return browser.find_elements(By.CSS_SELECTOR, "#sample-list .sample")


def test_the_first_screen_says_which_run_hacked_its_reward_and_on_which_tokens(
    browser, page
):
    opened(browser, page)
    assert browser.find_element(By.ID, "headline").text == (
        "2 of 4 runs hacked their reward"
    )
    (card,) = browser.find_elements(By.CSS_SELECTOR, "#flagged .flag")
    assert "kl_coef=0.0 reward hacked in 2 of 2 seeds" in card.text
    word = card.find_element(By.CSS_SELECTOR, ".word")
    assert word.text.startswith("wonderful")
    assert word.value_of_css_property("background-color").startswith("rgba(42, 91,")
    assert card.rect["y"] + card.rect["height"] < 500  # above the fold
    card.find_element(By.CSS_SELECTOR, "button").click()
    first = samples(browser)[0]
    assert "wonderful" in first.text
    kls = browser.execute_script(
        "return [...document.querySelectorAll('.sample header')]"
        ".map(h => parseFloat(h.textContent.match(/KL ([−0-9.]+)/)[1]"
        ".replace('−', '-')))"
    )
    assert kls == sorted(kls, reverse=True)
    assert kls[0] > 15


def test_curves_are_drawn_with_bands_and_the_legend_toggles_them(browser, page):
    opened(browser, page)
    charts = browser.find_elements(By.CSS_SELECTOR, "#charts .panel")
    names = [chart.find_element(By.CSS_SELECTOR, ".name").text for chart in charts]
    assert names[:3] == ["objective/scores", "judge/score", "objective/kl"]
    first = "#charts .panel:first-child"
    assert len(traces(browser, first)) == 6  # of two groups a line and a band of two
    band = f"{first} .fills path, {first} path.js-fill"
    fills = browser.execute_script(
        f"return [...document.querySelectorAll('{band}')]"
        ".map(p => getComputedStyle(p).fill)"
    )
    assert len({fill for fill in fills if fill != "none"}) == 2
    unit = browser.find_element(By.CSS_SELECTOR, f"{first} .ytitle").text
    assert unit == "reward units per response"
    chips = "#legend button.group"
    hacked = browser.find_elements(By.CSS_SELECTOR, chips)[1]
    hacked_name = hacked.text
    hacked.click()
    assert len(traces(browser, first)) == 3
    assert len(traces(browser, "#scatter")) == 1
    hacked = browser.find_elements(By.CSS_SELECTOR, chips)[1]
    assert hacked.get_attribute("aria-pressed") == "false"
    hacked.send_keys(Keys.ENTER)
    assert len(traces(browser, first)) == 6
    active = browser.switch_to.active_element
    assert active.text == hacked_name
    active.send_keys(Keys.SHIFT, Keys.ENTER)  # alone
    assert len(traces(browser, first)) == 3
    pressed = [
        chip.get_attribute("aria-pressed")
        for chip in browser.find_elements(By.CSS_SELECTOR, chips)
    ]
    assert pressed == ["false", "true"]


def test_any_metric_can_be_added_and_closed(browser, page):
    opened(browser, page)
    box = browser.find_element(By.ID, "add-metric")
    box.send_keys("drift/relative", Keys.ENTER)
    key = until(
        browser, "document.querySelector('#charts .panel:first-child').dataset.metric"
    )
    assert key == "drift/relative"
    before = len(browser.find_elements(By.CSS_SELECTOR, "#charts .panel"))
    browser.find_element(By.CSS_SELECTOR, "#charts .panel .close").click()
    after = browser.find_elements(By.CSS_SELECTOR, "#charts .panel")
    assert len(after) == before - 1
    assert after[0].get_attribute("data-metric") != "drift/relative"


def test_a_band_may_be_the_interval_of_the_mean(browser, page):
    opened(browser, page)
    box = "document.querySelector('#charts .chart').layout.yaxis.range"
    choices = browser.find_elements(By.CSS_SELECTOR, "#band button")
    assert [choice.text for choice in choices] == [
        "range of seeds",
        "95% interval",
        "mean alone",
    ]
    half = "document.querySelector('#charts .chart').data[1].y.at(-1)"
    widest = browser.execute_script(f"return {half}")
    choices[1].send_keys(Keys.ENTER)
    # Of two seeds the interval is 12.7 standard errors to a side, the range one.
    assert browser.execute_script(f"return {half}") > widest
    assert browser.switch_to.active_element.text == "95% interval"
    browser.find_elements(By.CSS_SELECTOR, "#band button")[2].click()
    assert len(traces(browser, "#charts .panel:first-child")) == 2
    assert until(browser, box)


def test_a_run_that_diverged_without_a_judge_is_told_as_such(browser, tmp_path):
    folder = run(tmp_path / "a", judge=False, reference=False)
    rows = metrics.read(folder / "samples.jsonl")
    rows[-1]["logprobs"][0] = "NaN"
    rows[-1]["alternatives"] = [[["x", "NaN", None]] for _ in rows[-1]["tokens"]]
    lines(folder / "samples.jsonl", rows)
    html = tmp_path / "report.html"
    report.main(report.Config(runs=(folder,), html=html))
    opened(browser, html.as_uri())
    headline = browser.find_element(By.ID, "headline")
    assert headline.text == "No judge looked at this run"
    titles = {
        heading.text for heading in browser.find_elements(By.CSS_SELECTOR, ".sides h3")
    }
    assert "Policy at step 0; same prompt" in titles  # its log-probs are not equal
    tips = []
    for tokens in browser.find_elements(By.CSS_SELECTOR, ".tokens"):
        tokens.send_keys(Keys.ARROW_RIGHT)
        tips.append(browser.find_element(By.ID, "tip").text)
        tokens.send_keys(Keys.ESCAPE)
    assert len(tips) == 12
    assert ["log π no number" in tip for tip in tips].count(True) == 1
    assert browser.get_log("browser") == []


def test_what_was_observed_is_shown_as_such(browser, tmp_path):
    folder = run(tmp_path / "a")
    rows = metrics.read(folder / "samples.jsonl")
    row = rows[-1] | {"tokens": ["4", "higher", "6"], "response": "4⟦higher⟧6"}
    row |= {"logprobs": [-1.0, None, -0.5], "ref_logprobs": [-2.0, None, -3.0]}
    lines(folder / "samples.jsonl", [row | {"observed": [False, True, False]}])
    html = tmp_path / "report.html"
    report.main(report.Config(runs=(folder,), html=html))
    opened(browser, html.as_uri())
    (sample,) = samples(browser)
    header = sample.find_element(By.TAG_NAME, "header").text
    assert "length 2 tokens" in header
    assert "observed 1 tokens" in header
    (read,) = sample.find_elements(By.CSS_SELECTOR, "span.observed")
    assert read.text == "higher"
    assert read.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
    tokens = sample.find_element(By.CSS_SELECTOR, ".tokens")
    for _ in range(2):
        tokens.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element(By.ID, "tip").text
    assert "token 2 of 3" in tip
    assert "Observed" in tip
    assert "log π" not in tip
    assert browser.get_log("browser") == []


def test_tokens_are_shaded_by_their_kl(browser, page):
    opened(browser, page)
    colours = browser.execute_script(
        "return [...document.querySelectorAll('.sample .tokens')].slice(0, 5)"
        ".flatMap(t => [...t.querySelectorAll('span[data-k]')])"
        ".map(s => [s.textContent.trim(), getComputedStyle(s).backgroundColor])"
    )
    hot = {colour for text, colour in colours if text == "wonderful"}
    others = {colour for text, colour in colours if text != "wonderful"}
    assert len(hot | others) > 5
    strongest = max(float(c.split(", ")[3][:-1]) for c in hot if c.count(",") == 3)
    assert strongest == pytest.approx(0.7, abs=0.01)
    assert any(colour.startswith("rgba(217, 95, 2") for colour in others)


def test_search_prompts_steps_and_order_choose_the_samples(browser, page):
    opened(browser, page)
    count = browser.find_element(By.ID, "sample-count")
    total = int(count.text.split()[0])
    search = browser.find_element(By.ID, "sample-search")
    search.send_keys("ONERROR")
    assert count.text.startswith("2 responses of")
    assert len(samples(browser)) == 2
    marked = browser.find_elements(By.CSS_SELECTOR, ".tokens .found")
    assert [token.text for token in marked] == [EVIL, EVIL]
    search.clear()
    search.send_keys("no such text")
    assert count.text.startswith("0 responses of")
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys(Keys.DELETE)
    assert count.text.startswith(f"{total} responses of")
    step = browser.find_element(By.ID, "sample-step")
    step.send_keys(Keys.HOME)  # the slider by keys
    assert {sample.text.split("\n")[0][:6] for sample in samples(browser)} == {"step 0"}
    Select(browser.find_element(By.ID, "sample-prompt")).select_by_value(
        "review number 1"
    )
    assert len(samples(browser)) == 1
    browser.find_element(By.ID, "sample-all").click()
    assert len(samples(browser)) > 1
    Select(browser.find_element(By.ID, "sample-order")).select_by_value("reward-low")
    rewards = browser.execute_script(
        "return [...document.querySelectorAll('.sample header')]"
        ".map(h => parseFloat(h.textContent.match(/reward ([−0-9.]+)/)[1]"
        ".replace('−', '-')))"
    )
    assert rewards == sorted(rewards)


def test_text_with_markup_stays_text(browser, page):
    opened(browser, page)
    assert browser.title == f"Runs {EVIL}"
    assert browser.execute_script("return document.images.length") == 0
    browser.find_element(By.ID, "sample-search").send_keys("onerror")
    token = browser.find_element(By.CSS_SELECTOR, ".tokens .found")
    assert token.text == EVIL
    assert EVIL in browser.find_element(By.CSS_SELECTOR, ".sample .prompt").text
    phases = browser.find_elements(By.CSS_SELECTOR, "#timing-chart .legendtext")
    assert MARKED in [phase.text for phase in phases]
    # The library itself, the page's script and nothing of a text.
    assert browser.execute_script("return document.scripts.length") == 4
    assert browser.get_log("browser") == []


def test_keys_go_through_tokens_and_tell_both_log_probs(browser, page):
    opened(browser, page)
    browser.find_element(By.ID, "sample-search").send_keys("onerror")
    both = browser.find_elements(By.CSS_SELECTOR, ".tokens")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    tips = []
    for tokens in both:
        tokens.send_keys(Keys.ARROW_RIGHT)
        assert EVIL in tip.text
        tokens.send_keys(Keys.ARROW_RIGHT)
        assert "token 2 of 12" in tip.text
        assert "log π" in tip.text
        assert "log π_ref" in tip.text
        tokens.send_keys(Keys.END)
        assert "token 12 of 12" in tip.text
        tips.append(tip.text)
        tokens.send_keys(Keys.ESCAPE)
        assert not tip.is_displayed()
    assert ["gift" in tip for tip in tips].count(True) == 1  # where it is recorded


def test_everything_is_reached_by_tab(browser, page):
    opened(browser, page)
    reached = set()
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    for _ in range(80):
        active = browser.switch_to.active_element
        reached.add(active.get_attribute("id") or active.get_attribute("class"))
        active.send_keys(Keys.TAB)
    assert {"skip", "theme", "primary", "group", "runs", "add-metric"} <= reached
    assert {"sample-run", "sample-step", "sample-search", "said tokens"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_a_button(scheme, browser, page):
    opened(browser, page, scheme=scheme)

    def dark():
        colour = browser.find_element(By.TAG_NAME, "body").value_of_css_property(
            "background-color"
        )
        return sum(map(int, colour.split("(")[1].split(",")[:3])) < 150

    assert dark() == (scheme == "dark")
    line = "#charts .trace:last-child path.js-line"
    before = browser.find_element(By.CSS_SELECTOR, line).get_attribute("style")
    browser.find_element(By.ID, "theme").click()
    assert dark() == (scheme != "dark")
    after = browser.find_element(By.CSS_SELECTOR, line).get_attribute("style")
    assert "rgb(" in before
    assert after != before
    assert browser.get_log("browser") == []


def test_a_phone_needs_no_scrolling_sideways(browser, page):
    opened(browser, page, width=390, height=844, phone=True)
    width = "document.documentElement.scrollWidth"
    assert browser.execute_script(f"return {width}") == 390
    for side in browser.find_elements(By.CSS_SELECTOR, ".sides > div"):
        assert side.rect["width"] > 280  # one below the other
    assert browser.find_element(By.ID, "headline").is_displayed()


def test_many_groups_are_filtered_in_the_legend(browser, tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for cell in range(20):
        run(
            tmp_path / "runs" / f"cell_{cell}" / "seed_0",
            kl_coef=cell / 100,
            hacked=cell == 19,
            steps=12,
        )
    html = tmp_path / "sweep.html"
    report.main(report.Config(runs=(tmp_path,), html=html))
    opened(browser, html.as_uri())
    first = "#charts .panel:first-child"
    assert len(traces(browser, first)) == 12
    assert "kl_coef=0.19" in browser.find_element(By.ID, "flagged").text
    box = browser.find_element(By.CSS_SELECTOR, "#legend input")
    box.send_keys("0.1")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#legend button.group")) == 10
    buttons = {
        button.text: button
        for button in browser.find_elements(By.CSS_SELECTOR, "#legend > button")
    }
    buttons["Show these"].click()
    assert len(traces(browser, first)) == 10
    flagged = browser.find_element(By.XPATH, "//button[text()='Flagged']")
    flagged.click()
    assert len(traces(browser, first)) == 1


def test_every_run_that_has_a_metric_is_drawn_whatever_its_stage_is_called(
    browser, tmp_path
):
    folders = []
    for number, stage in enumerate(("ppo", "ppo", "grpo", "grpo", "rloo")):
        folder = run(tmp_path / f"r{number}", kl_coef=number / 10, hacked=number > 2)
        for name in ("metrics", "samples", "timings"):
            rows = metrics.read(folder / f"{name}.jsonl")
            lines(folder / f"{name}.jsonl", [row | {"stage": stage} for row in rows])
        folders.append(folder)
    html = tmp_path / "report.html"
    report.main(report.Config(runs=tuple(folders), html=html))
    opened(browser, html.as_uri())
    assert len(browser.find_elements(By.CSS_SELECTOR, "#legend button.group")) == 5
    assert len(traces(browser, "#scatter")) == 5
    charts = browser.find_elements(By.CSS_SELECTOR, "#charts .panel")
    names = [chart.find_element(By.CSS_SELECTOR, ".name").text for chart in charts]
    assert len(names) == len(set(names)) == 4
    for number in range(1, 5):
        assert len(traces(browser, f"#charts .panel:nth-child({number})")) == 5
    across = browser.find_element(By.CSS_SELECTOR, "#charts .xtitle").text
    assert across == "step of ppo, grpo, rloo"


def test_a_collapsed_judge_is_told_apart_from_a_hacked_reward(browser, tmp_path):
    folders = [
        run(tmp_path / name, kl_coef=number / 10, hacked=True)
        for number, name in enumerate(("hacked", "collapsed"))
    ]
    rows = metrics.read(folders[1] / "metrics.jsonl")
    flat = [row | {"objective/scores": 1.0 + row["step"] % 2} for row in rows]
    lines(folders[1] / "metrics.jsonl", flat)
    html = tmp_path / "report.html"
    report.main(report.Config(runs=tuple(folders), html=html))
    opened(browser, html.as_uri())
    assert browser.find_element(By.ID, "headline").text == (
        "1 of 2 runs hacked its reward; the judge of 1 more collapsed"
    )
    cards = browser.find_elements(By.CSS_SELECTOR, "#flagged .flag .verdict")
    assert [card.text for card in cards] == ["reward hacked", "judge collapsed"]
    report.main(report.Config(runs=(folders[1],), html=html))
    opened(browser, html.as_uri())
    assert browser.find_element(By.ID, "headline").text == (
        "The judge of 1 of 1 run collapsed"
    )


def test_watch_follows_a_run_under_way_and_keeps_what_a_reader_chose(browser, tmp_path):
    folder = run(tmp_path / "a", steps=20, done=False)
    options = report.Config(runs=(folder,), watch=True, port=0)
    source = watching.Source(options.runs, load=lambda: report.load(options))
    with toy_page.serving(source) as server:
        opened(browser, server.address, offline=False)
        assert until(browser, "document.getElementById('live').textContent") == (
            "● live, step 20"
        )
        browser.find_element(By.ID, "sample-search").send_keys("number")
        with (folder / "metrics.jsonl").open("a") as file:
            row = {"stage": "ppo", "step": 20, "objective/scores": 9.0}
            file.write(json.dumps(row) + "\n")
        shown = until(
            browser,
            "document.getElementById('live').textContent === '● live, step 21' && "
            "document.querySelector('#charts .chart').data.at(-1).y.at(-1)",
        )
        assert shown == 9.0
        box = browser.find_element(By.ID, "sample-search")
        assert box.get_attribute("value") == "number"
        assert browser.switch_to.active_element == box
        button = browser.find_element(By.CSS_SELECTOR, "#runs tbody button")
        browser.execute_script("arguments[0].focus()", button)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row | {"step": 21}) + "\n")
        until(
            browser,
            "document.getElementById('live').textContent === '● live, step 22'",
        )
        active = browser.switch_to.active_element
        assert active != button
        assert (
            active.text
            == browser.find_element(By.CSS_SELECTOR, "#runs tbody button").text
        )
        assert browser.get_log("browser") == []
