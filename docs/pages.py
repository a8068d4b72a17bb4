"""Pages that live beside what they are about: results and changes; their figures come with them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"results.md": ROOT / "benchmarks" / "README.md", "changes.md": ROOT / "CHANGELOG.md"}
FIGURES = ROOT / "benchmarks" / "report"
# Links to files of the repository have no page here: their text stays, the link goes.
REPOSITORY_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|report/[\w.]+\.png)[^)]+\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the figures."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=REPOSITORY_LINK.sub(r"\1", path.read_text())))
    for path in sorted(FIGURES.glob("*.png")):
        files.append(File.generated(config, f"report/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show figures and name files of the repository, whose paths hold where pages are read as files."""
    return REPOSITORY_LINK.sub(_text_or_page, markdown.replace("](../benchmarks/report/", "](report/"))


def _text_or_page(link: re.Match[str]) -> str:
    return link[1] if "](../" in link[0] else link[0]
