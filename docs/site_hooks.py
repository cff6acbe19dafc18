"""What the site has beside the pages of this folder: the README as its front page, the pages that stand next to it,
what pages link to, and the notebook as a page. Links lead there from where each stands in the repository."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "first_steps.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them."""
    examples = (path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".yaml", ".ipynb"))
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE", *examples]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, f"{NOTEBOOK.stem}.md", content=page_of(NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Here `docs/` is the root, what stands beside it is in it, and the notebook is a page."""
    if page.file.src_uri == f"{NOTEBOOK.stem}.md":
        return f"{markdown}\n\nThis page is a [notebook]({NOTEBOOK.name}) that every run of the tests executes."
    inside = (ROOT / "docs" / page.file.src_uri).exists()
    return markdown.replace("](../" if inside else "](docs/", "](").replace(NOTEBOOK.name, f"{NOTEBOOK.stem}.md")


def page_of(notebook: Path) -> str:
    """Its text and its code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in sources)
