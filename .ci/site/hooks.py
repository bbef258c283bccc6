"""Changes to the pages that MkDocs writes."""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import minify_html
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

# Matches arXiv numbers outside links and tags.
ARXIV = re.compile(r"<a .*?</a>|<[^>]*>|arXiv:([\d.]+\d|[a-z-]+/\d+)", re.DOTALL)
# In signatures: names without a link, and spans without a colour.
TITLED = re.compile(r'<span title="[^"]*">([^<]*)</span>')
PLAIN = re.compile(r'<span class="[np]">([^<]*|<a [^>]*>[^<]*</a>)</span>')
# The empty description of a field, and the tooltip of a ¶.
NOTHING = re.compile(
    r'–\s*<div class="doc-md-description">\s*</div>| title="Permanent link"'
)
# Scripts that every page needs before it is shown: functions, and their calls.
SHARED = re.compile(r"(<script>__md_scope=[^,]*,location\)),(.*?)</script>", re.DOTALL)
PALETTE = re.compile(r"<script>(var palette=.*?)</script>", re.DOTALL)
# What is the same on all pages but for addresses, the page's title and its tab.
TOGGLES = re.compile(r"<input autocomplete=off class=md-toggle .*?</label>")
HEADER = re.compile(r"<header .*?</header>", re.DOTALL)
TITLE = re.compile(
    r"(data-md-component=header-topic><span class=md-ellipsis>).*?(?=</span>)",
    re.DOTALL,
)
TABS = re.compile(r"<nav aria-label=Tabs .*?</nav>", re.DOTALL)
ACTIVE = re.compile(r'class="md-tabs__item md-tabs__item--active"')
CONFIG = re.compile(r"(<script id=__config type=application/json>)(.*?)</script>")
ADDRESS = re.compile(r"(?<=href=)[^\s>]+")
ROOT = "@root/"  # stands for the address of the site


def on_page_content(html: str, **kwargs: Any) -> str:
    """Adds links to the papers that a text names."""
    return ARXIV.sub(
        lambda match: (
            f'<a href="https://arxiv.org/abs/{match[1]}">{match[0]}</a>'
            if match[1]
            else match[0]
        ),
        html,
    )


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Hides the menu of a page that is alone in its section."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    return markdown


def on_post_page(output: str, page: Page, config: Any, **kwargs: Any) -> str:
    """Removes parts of a page that no browser needs: two thirds of the site."""
    shared, palette = SHARED.search(output), PALETTE.search(output)
    if shared is None or palette is None:
        return minify_html.minify(output, keep_html_and_head_opening_tags=True)
    output = SHARED.sub(r"\1</script>", PALETTE.sub("", output))
    output = NOTHING.sub("", PLAIN.sub(r"\1", TITLED.sub(r"\1", output)))
    output = minify_html.minify(output, keep_html_and_head_opening_tags=True)
    output, script = _with_shared_parts(output, page.url)
    script = f"{shared[2]};{script}{palette[1]}"
    (Path(config["site_dir"]) / "page.js").write_text(script, "utf-8")
    return output


def _with_shared_parts(output: str, url: str) -> tuple[str, str]:
    """A page that calls for its header and tabs, and the script that writes them.

    Its last statement has the palette's place: after the header.
    """
    toggles, header, tabs, settings = (
        x.search(output) for x in (TOGGLES, HEADER, TABS, CONFIG)
    )
    if toggles is None or header is None or tabs is None or settings is None:
        raise ValueError(f"{url}: expected a page of mkdocs-material 9, got another")

    def from_root(html: str) -> str:
        folder = posixpath.dirname(url)
        return ADDRESS.sub(
            lambda at: ROOT + posixpath.normpath(posixpath.join(folder, at[0])), html
        )

    values = json.loads(settings[2])
    values["search"] = ROOT + values["search"].replace("../", "").removeprefix("./")
    values["base"] = ROOT
    parts = {
        "header": toggles[0] + from_root(TITLE.sub(r"\1", header[0])),
        "tabs": from_root(ACTIVE.sub("class=md-tabs__item", tabs[0])),
        "settings": f"{settings[1]}{json.dumps(values)}</script>",
    }
    tab = tabs[0].partition("--active")[0].count("<li") - 1
    if "--active" not in tabs[0]:
        tab = -1
    address = get_relative_url("page.js", url)
    output = output.replace(settings[0], "").replace(toggles[0], "")
    output = output.replace(header[0], f"<script src={address}></script>")
    output = output.replace(tabs[0], f"<script>__tabs({tab})</script>")
    html = json.dumps(parts, ensure_ascii=False).replace("</", "<\\/")
    return output, WRITE.replace("PARTS", html)


WRITE = r"""
const __parts = PARTS;
const __write = (html) => document.write(html.replaceAll("@root/", __md_scope.href));
const __tabs = (active) => {
  __write(__parts.tabs);
  const item = document.querySelectorAll(".md-tabs__item")[active];
  if (item) item.classList.add("md-tabs__item--active");
};
__write(__parts.header + __parts.settings);
document.querySelector("[data-md-component=header-topic] .md-ellipsis").textContent =
  document.title.replace(/ - rlhf_jax$/, "");
"""
"""Writes what `__parts` has, each where a page calls for it."""


def on_post_build(config: dict[str, Any], **kwargs: Any) -> None:
    """Removes files that no page loads, and those that need the site's address."""
    site = Path(config["site_dir"])
    shutil.rmtree(site / "assets" / "javascripts" / "lunr")  # for other languages
    for file in (*site.rglob("*.map"), *site.glob("sitemap.*"), site / "404.html"):
        file.unlink()
