"""Files of rows in every form that is common: read alike as prompts and as examples, or refused by name."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import threading

import pytest

from hf_dspark.data.prompts import Prompt, read_prompt_file
from hf_dspark.data.row_files import open_table, read_rows
from hf_dspark.files import shortened
from hf_dspark_cli.parser import file as file_option

ROWS = [{"prompt": "what\u2028is", "completion": "up", "n": 1}, {"prompt": "ïs 'it'?", "completion": "só", "n": 2}]
TEXT = {row["prompt"]: row for row in ROWS}


def lines(rows=ROWS, end="\n", **kwargs) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, **kwargs) + end for row in rows)


def columns(rows=ROWS) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def as_csv(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


ARRAY = json.dumps(ROWS, ensure_ascii=False)
FILES = {
    "lines": ("a.jsonl", lines()),
    "lines without an end": ("a.jsonl", lines().rstrip()),
    "lines of Windows": ("a.jsonl", lines(end="\r\n")),
    "lines of old Macs": ("a.jsonl", lines(end="\r")),
    "blank lines": ("a.jsonl", "\n \n" + lines(end="\n\n\t\n")),
    "escapes": ("a.jsonl", lines().encode("ascii", "backslashreplace").decode().replace("\\x", "\\u00")),
    "a byte-order mark": ("a.jsonl", lines().encode("utf-8-sig")),
    "marks of two files joined": ("a.jsonl", b"".join(lines([row]).encode("utf-8-sig") for row in ROWS)),
    **{f"{encoding}": ("a.jsonl", lines().encode(encoding)) for encoding in ("utf-16", "utf-16-le", "utf-32")},
    "an array": ("a.json", ARRAY),
    "an array in a .jsonl": ("a.jsonl", ARRAY),
    "an array over lines": ("a.json", json.dumps(ROWS, indent=2)),
    "an array, a row a line": ("a.json", "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n"),
    "an array with a mark, in UTF-16": ("a.json", ARRAY.encode("utf-16")),
    "data": ("a.json", json.dumps({"version": 1, "data": ROWS}, indent=1)),
    "rows": ("a.json", json.dumps({"rows": ROWS})),
    "columns": ("a.json", json.dumps(columns())),
    "columns over lines": ("a.json", json.dumps(columns(), indent=4)),
    "gzip": ("a.jsonl.gz", gzip.compress(lines().encode())),
    "gzip by another name": ("a.jsonl", gzip.compress(lines().encode("utf-16"))),
    "bzip2": ("a.jsonl.bz2", bz2.compress(lines().encode())),
    "xz": ("a.json.xz", lzma.compress(ARRAY.encode())),
    "CSV": ("a.csv", as_csv(",")),
    "TSV": ("a.tsv", as_csv("\t")),
    "CSV in gzip, with a mark": ("a.csv.gz", gzip.compress(b"\xef\xbb\xbf" + as_csv(","))),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_form_of_a_file_holds_the_same_rows(kind, tmp_path, monkeypatch):
    name, content = FILES[kind]
    content = content.encode() if isinstance(content, str) else content
    path = tmp_path / name
    path.write_bytes(content)
    file = read_rows(str(path))
    assert not file.faults
    assert [row | {"n": int(row["n"])} for _, row in file.rows] == ROWS
    assert [prompt.content for prompt in read_prompt_file(str(path)).prompts] == list(TEXT)
    if "SV" not in kind:  # told by the name
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert [row for _, row in read_rows("-").rows] == ROWS


def test_parquet_is_a_table_that_stays_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = str(tmp_path / "a.data")  # by its content
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert list(open_table(path)) == ROWS and [row for _, row in read_rows(path).rows] == ROWS
    assert [prompt.content for prompt in read_prompt_file(path).prompts] == list(TEXT)
    assert open_table(__file__) is None and open_table("nowhere.parquet") is None


def test_parquet_without_its_reader_is_refused_with_the_cure(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1cut off")
    with pytest.raises(ValueError, match="a.parquet is no whole Parquet file"):
        read_rows(str(tmp_path / "a.parquet"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="a.parquet is a Parquet file: pip install datasets, or write JSON Lines"):
        read_rows(str(tmp_path / "a.parquet"))


MESSAGES = [{"role": "user", "content": "what"}]


@pytest.mark.parametrize(
    ("value", "contents"),
    [
        ([5, 6], [[5, 6]]),  # one prompt of tokens, one of messages
        (MESSAGES, [MESSAGES]),
        ([{"from": "human", "value": "what"}], [MESSAGES]),
        (["what", "is"], ["what", "is"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([MESSAGES, MESSAGES], [MESSAGES, MESSAGES]),
        ({"messages": MESSAGES}, [MESSAGES]),
        ({"prompt": MESSAGES, "tags": ["easy"]}, [MESSAGES]),
        ({"input_ids": [5, 6], "attention_mask": [1, 1]}, [[5, 6]]),
        ({"input_ids": [[5, 6], [7]]}, [[5, 6], [7]]),
        ({"messages": [MESSAGES, MESSAGES]}, [MESSAGES, MESSAGES]),
        ({"prompt": ["what", "is"]}, ["what", "is"]),
        ({"turns": ["what", "is"]}, [MESSAGES]),
        ({"prompt": "what", "data": [1, 2]}, ["what"]),
        ("what", ["what"]),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_document_is_told_from_a_row(tmp_path, value, contents, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value, indent=indent))
    assert [prompt.content for prompt in read_prompt_file(str(path)).prompts] == contents


DAMAGED = {
    "a name twice": ('{"prompt": "a", "prompt": "b"}', "line 1 is not JSON: 'prompt' is given twice"),
    "half a line": ('{"prompt": "a"', "line 1 is not JSON: "),
    "single quotes": ("{'prompt': 'a'}", "line 1 is not JSON: "),
    "not UTF-8": (b'{"prompt": "\xff"}', "line 1 is not JSON: 'utf-8.* codec can't decode"),
    "a number without end": ('{"input_ids": [%s]}' % ("9" * 5000), "line 1 is not JSON: Exceeds the limit"),
    "a number beyond all vocabularies": (
        '{"input_ids": [%s]}' % ("9" * 30),
        "is no prompt: input_ids must be .* whole",
    ),
    "brackets without end": ("[" * 100_000, "line 1 is not JSON: "),
    "a list of nothing": ("[]", "holds no prompt"),
    "an object of nothing": ("{}", "line 1 is no prompt: .*got an object with nothing"),
    "nothing": ("", "holds no prompt"),
    "a number": ("5", "line 1 is no prompt"),
    "null": ("null", "line 1 is no prompt"),
    "nulls": ('{"prompt": null}', "line 1 is no prompt: .*got an object with nothing"),
    "a wrong entry": ('[5, "a"]', None),
    "a list that is cut": ("[1, 2", "line 1 is not JSON"),
    "an array that is cut": ('[\n{"prompt": "a"},\n{"prompt": ', "line 3 is not JSON"),
    "a comma too many": ('[\n{"prompt": "a"},\n]', "line (2|3) is not JSON"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_cannot_be_read_is_named_with_its_file_and_line(kind, tmp_path):
    content, words = DAMAGED[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if words is None:
        read = read_prompt_file(str(path))
        assert len(read.prompts) == 1 and all("a.jsonl entry 1 is no prompt" in str(fault) for fault in read.faults)
        return
    with pytest.raises(ValueError, match=f"a.jsonl holds no prompt.*{words}" if words != "holds no prompt" else words):
        read_prompt_file(str(path))
    # In a file with other lines the others are read.
    path.write_bytes(b'"before"\n' + path.read_bytes() + b'\n"after"\n')
    assert Prompt("before") in read_prompt_file(str(path)).prompts, shortened(content)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", gzip.compress(b"[]" * 99, mtime=0)[:-9], "a.jsonl.gz cannot be unpacked or decoded"),
        ("a.jsonl.zst", b"(\xb5/\xfd....", "a.jsonl.zst is packed by zstd: write JSON Lines or Parquet, or"),
        ("a.xlsx", b"PK\x03\x04....", "a.xlsx is a zip archive"),
        ("a.arrow", b"ARROW1..", "a.arrow is an Arrow file"),
        ("a.csv", b'prompt\n"a', "a.csv cannot be read as CSV"),
        ("a.csv", b"prompt,prompt\na,b\n", "a.csv: its first line names 'prompt' twice"),
        ("a.csv", b"prompt\n\xff", "a.csv cannot be read as CSV"),
        ("a.csv", b"prompt,completion\na\n", "a.csv holds no prompt.*line 2 has not as many fields as the first"),
        ("a.jsonl", '"half'.encode("utf-16")[:-1], "a.jsonl cannot be unpacked or decoded"),
    ],
)  # fmt: skip
def test_files_that_are_not_read_say_what_to_do(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_prompt_file(str(tmp_path / name))


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=('"a"\n"b"\n',), daemon=True)
    writer.start()
    assert file_option(str(tmp_path / "pipe"))
    assert read_prompt_file(str(tmp_path / "pipe")).prompts == [Prompt("a"), Prompt("b")]
    writer.join(timeout=9)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        read_rows(str(tmp_path))
