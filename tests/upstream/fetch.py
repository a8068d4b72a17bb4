"""Fetch transformers' own tests into a folder that git ignores. They are run there, and no part of this repository.

python tests/upstream/fetch.py                        those of the installed release, from GitHub
python tests/upstream/fetch.py --from CHECKOUT        those of a checkout of transformers
"""

import argparse
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import transformers

FOLDER = Path(__file__).parents[2] / "out" / "upstream"
ARCHIVE = "https://github.com/huggingface/transformers/archive/refs/tags/v{}.tar.gz"
KEPT = ("tests/", "utils/")  # the tests import some of the utilities
NEEDED = "tests/generation/test_utils.py"


def fetch(version: str, folder: Path, url: str | None = None) -> None:
    """Download the archive of a release, and keep its tests in `folder`. A `SystemExit` says what has failed."""
    url = url or ARCHIVE.format(version)
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / "transformers.tar.gz"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file)
        except (urllib.error.URLError, OSError) as error:
            raise SystemExit(
                f"error: the tests of transformers {version} were not downloaded from {url}: {error}\n"
                "       Without a network, pass a checkout of that release: --from /path/to/transformers"
            ) from error
        with tarfile.open(archive) as opened:
            members = [member for member in opened if member.name.partition("/")[2].startswith(KEPT)]
            opened.extractall(temporary, members, filter="data")
        checkout = next((path for path in Path(temporary).iterdir() if path.is_dir()), Path(temporary))
        copy_tests(checkout, folder)


def copy_tests(checkout: Path, folder: Path) -> None:
    """Copy the tests of a checkout, beside a link to the installed package, which some of them look for."""
    if not (checkout / NEEDED).is_file():
        raise SystemExit(f"error: {checkout} is no checkout of transformers: it has no {NEEDED}")
    shutil.rmtree(folder, ignore_errors=True)
    for kept in KEPT:
        if (checkout / kept).is_dir():
            shutil.copytree(checkout / kept, folder / kept)
    (folder / "src").mkdir()
    (folder / "src" / "transformers").symlink_to(Path(transformers.__file__).parent, target_is_directory=True)
    (folder / "pytest.ini").write_text("[pytest]\n")  # else the settings of this repository would hold


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="checkout", type=Path, help="a checkout of transformers; nothing is downloaded")
    parser.add_argument("--to", dest="folder", type=Path, default=FOLDER, help="default: %(default)s")
    given = parser.parse_args(arguments)
    if given.checkout is not None:
        copy_tests(given.checkout, given.folder)
    elif not (given.folder / f"{transformers.__version__}.fetched").exists():
        fetch(transformers.__version__, given.folder)
        (given.folder / f"{transformers.__version__}.fetched").touch()
    print(f"transformers' tests: {given.folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
