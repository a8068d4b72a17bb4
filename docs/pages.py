"""Pages that live beside what they are about: results and changes; their figures come with them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "results.md": ROOT / "benchmarks" / "README.md",
    "results_smollm2.md": ROOT / "benchmarks" / "smollm2.md",
    "changes.md": ROOT / "CHANGELOG.md",
}
FIGURES = ROOT / "benchmarks" / "report"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the figures."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=with_pages(path.read_text(), path.parent)))
    for path in sorted(FIGURES.glob("*.png")):
        files.append(File.generated(config, f"report/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show the figures, whose paths hold where pages are read as files."""
    return with_pages(markdown.replace("](../benchmarks/report/", "](report/"), ROOT / "docs")


def with_pages(markdown: str, folder: Path) -> str:
    """Return a text whose links lead to pages of the site; of a link to another file only its text stays."""
    sources = {path: name for name, path in PAGES.items()}

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if target.startswith("report/") or (folder == ROOT / "docs" and target in PAGES):
            return found[0]
        path = (folder / target).resolve()
        if path.parent == ROOT / "docs":
            return f"[{text}]({path.name}{anchor})"
        return f"[{text}]({sources[path]}{anchor})" if path in sources else text

    return LINK.sub(linked, markdown)
