"""The tables of `docs/drafts.md`, from the configurations that tests read: `python -m tests.formats.drafts_page`."""

import json
import re
import tempfile
from pathlib import Path

from hf_dspark.files import shortened
from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.formats.translate import draft_model_type
from hf_dspark.models.auto import DRAFTS
from hf_dspark.models.configuration_dspark import DSparkConfig
from tests.formats.public_configs import PUBLIC_CONFIGS, PublicConfig

PAGE = Path(__file__).parents[2] / "docs" / "drafts.md"
_TABLE = re.compile(r"(<!-- drafts: (\w+) -->\n).*?(<!-- end of drafts -->)", re.DOTALL)
_AHEAD = re.compile(r"^(it: |this .* draft cannot be read: |config\.json: )+")  # of what a refusal says: the file
_BEHIND = re.compile(r"(; |, and nothing here|, not one of|\. |: (pass|take|say|its weights)).*$", re.DOTALL)


def read(row: PublicConfig, folder: Path) -> DSparkConfig:
    """Read a row as a draft's configuration; a `ValueError` refuses it."""
    (folder / "config.json").write_text(json.dumps(row.config))
    kind = DRAFTS.get(draft_model_type(Checkpoint(folder).config))
    return (DSparkConfig if kind is None else kind.config_class).from_pretrained(folder)


def with_tables(page: str) -> str:
    """Return the page with its tables made anew."""
    tables = {"layouts": _layouts(), "files": _files()}
    return _TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", page)


def _layouts() -> str:
    by_layout: dict[tuple[str, str], list[PublicConfig]] = {}
    for row in PUBLIC_CONFIGS:
        by_layout.setdefault((row.project, row.layout), []).append(row)
    lines = []
    for (project, layout), rows in by_layout.items():
        kinds = ", ".join(dict.fromkeys(row.kind for row in rows if row.is_read)) or "-"
        lines.append([project, layout, kinds, f"{sum(row.is_read for row in rows)} of {len(rows)}"])
    return _table(["project", "layout of its files", "read as", "of the files below, read"], lines)


def _files() -> str:
    return _table(
        ["project", "file, or name on the Hub", "result"],
        [
            [row.project, f"`{row.where}`", row.kind if row.is_read else f"refused: {_refusal(row)}"]
            for row in PUBLIC_CONFIGS
        ],
    )


def _refusal(row: PublicConfig) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            read(row, Path(folder))
        except ValueError as error:
            said = _AHEAD.sub("", str(error).replace(folder, "it"))
            return shortened(_BEHIND.sub("", said), quote=False, size=140)
    raise AssertionError(f"{row.where} is read, not refused")


def _table(head: list[str], lines: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [head, ["---"] * len(head), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
