"""Links between the pages, and from them to files, lead somewhere."""

import re
from pathlib import Path

from repository import PAGES, ROOT, name_of

LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> list[str]:
    """The anchors that a page's headings get: lower case, words joined by hyphens, punctuation left out."""
    headings = re.findall(
        r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M
    )
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(page: Path) -> list[str]:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return [one or other for one, other in LINK.findall(text)]


def test_links_resolve() -> None:
    found = [(page, link) for page in PAGES for link in links(page)]
    assert len(found) >= 5
    for page, link in found:
        if re.match(r"[a-z]+:", link):
            assert link.startswith(("https://", "mailto:")), f"{name_of(page)}: {link} is not safe to follow"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{name_of(page)}: {link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)}: {link} has no such heading"


def test_no_page_has_a_heading_twice() -> None:
    for page in PAGES:
        assert len(set(anchors(page))) == len(anchors(page)), name_of(page)


def test_a_decision_is_a_paragraph() -> None:
    assert not re.findall(r"[^\n]\n(\*\*.*)", (ROOT / "docs/decisions.md").read_text(encoding="utf-8"))
