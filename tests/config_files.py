"""The config.json of a checkpoint on disk."""

import json
from pathlib import Path


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))
