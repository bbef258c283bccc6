"""Changes to the pages that MkDocs writes."""

from __future__ import annotations

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
    if shared and palette:
        script = f"{shared[2]};{palette[1]}"
        (Path(config["site_dir"]) / "palette.js").write_text(script, "utf-8")
        address = get_relative_url("palette.js", page.url)
        output = PALETTE.sub(f'<script src="{address}"></script>', output)
        output = SHARED.sub(r"\1</script>", output)
    output = NOTHING.sub("", PLAIN.sub(r"\1", TITLED.sub(r"\1", output)))
    return minify_html.minify(output, keep_html_and_head_opening_tags=True)


def on_post_build(config: dict[str, Any], **kwargs: Any) -> None:
    """Removes files that no page loads, and those that need the site's address."""
    site = Path(config["site_dir"])
    shutil.rmtree(site / "assets" / "javascripts" / "lunr")  # for other languages
    for file in (*site.rglob("*.map"), *site.glob("sitemap.*"), site / "404.html"):
        file.unlink()
