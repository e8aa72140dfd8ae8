"""The site of the documents: built without a warning, its links alive, nothing from elsewhere."""

from __future__ import annotations

import shutil
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from forked import forked
from memfit.strategies import ORDER

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every element."""
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "source", "iframe") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(values["href"])


def build(folder: Path) -> None:
    """As `sphinx -b html -W` does; what it had to say is kept beside the pages."""
    from sphinx.application import Sphinx

    with (folder / "said").open("w", encoding="utf-8") as said:
        sys.stderr = said
        warnings.resetwarnings()  # as a person's python shows them
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        docs, pages, read = folder / "docs", folder / "html", folder / "doctrees"
        options: dict[str, Any] = {"status": None, "warning": said, "warningiserror": True}
        app = Sphinx(docs, docs, pages, read, "html", **options)
        app.build()
        said.write("failed" if app.statuscode else "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("strategies", "__pycache__")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=ignored)
    # Of its own, because the extensions change what they document.
    process = forked(lambda: build(folder))
    process.join()
    assert (process.exitcode, (folder / "said").read_text(encoding="utf-8")) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_and_every_strategy_is_built(site: Path, pages: dict[Path, Page]) -> None:
    names = {path.relative_to(site).as_posix() for path in pages}
    assert {f"strategies/{kind.name}.html" for kind in ORDER} <= names
    assert {"index.html", "memory.html", "reference.html", "zh/memory.html"} <= names


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_on_it(
    pages: dict[Path, Page],
) -> None:
    dead, checked = [], 0
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("#", ""):
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in pages[target].ids):
                dead.append(f"{path.name}: {link}")
    assert dead == []
    assert checked > 1000


def test_commands_are_listed_in_both_languages(site: Path) -> None:
    english, chinese = (
        (site / name).read_text(encoding="utf-8") for name in ("commands.html", "zh/commands.html")
    )
    for page in (english, chinese):
        assert '<span class="pre">--validation-split</span>' in page
        assert 'id="memfit-doctor"' in page
    assert "The share of rows held out to validate (default 0.1)." in english
    assert "留作验证的行所占的比例（默认 0.1）。" in chinese


def test_a_page_is_marked_with_its_language_and_lists_its_pages(site: Path) -> None:
    for name, language, there, not_there in (
        ("quickstart.html", "en", "Start here", "从这里开始"),
        ("zh/quickstart.html", "zh-CN", "从这里开始", "Start here"),
    ):
        page = (site / name).read_text(encoding="utf-8")
        assert f'lang="{language}"' in page
        captions = [part.partition("</p>")[0] for part in page.split('<p class="caption"')[1:]]
        assert [one for one in captions if there in one]
        assert not [one for one in captions if not_there in one]


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    outside = {one for page in pages.values() for one in page.loaded if urlsplit(one).scheme}
    assert outside == set()


def test_the_reference_documents_the_public_names(pages: dict[Path, Page], site: Path) -> None:
    import memfit

    public = set(memfit.__all__) - {"__version__", "MemfitError"}
    ids = pages[site / "reference.html"].ids
    assert [name for name in sorted(public) if f"memfit.{name}" not in ids] == []
    assert "memfit.errors.DoesNotFitError" in ids
