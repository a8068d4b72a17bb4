"""Check the installed package against its sources: it imports, and no file is missing.

Run by the interpreter that the wheel was installed for, isolated (`-I`) so that the sources cannot be imported.

    python -I .ci/check_wheel.py src
"""

import sys
from pathlib import Path

import hf_dspark
import hf_dspark_cli

source, installed = Path(sys.argv[1]).resolve(), Path(hf_dspark.__file__).resolve().parents[1]
if source == installed or source in installed.parents:
    sys.exit(f"the sources were imported from {installed}, not the installed wheel")

expected = {
    path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
}
missing = sorted(str(path) for path in expected | {Path("hf_dspark/py.typed")} if not (installed / path).is_file())
if missing:
    sys.exit(f"the wheel lacks {missing}")
for name in hf_dspark.__all__:
    getattr(hf_dspark, name)
hf_dspark_cli.parser.build_parsers()
print(f"the wheel works: hf_dspark {hf_dspark.__version__}, {len(expected)} files, py.typed included")
