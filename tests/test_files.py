"""Journals keep what is finished, whatever cuts the writing short."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import GenerationConfig

from hf_dspark.files import Journal, digest, plain_json, replace_text

SETTINGS = {"seed": 0, "options": {"top_k": 5}}


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "deep" / "run.jsonl", SETTINGS)
    for number in range(3):
        journal.append({"number": number, "text": "ä\u2028\ud800"})
    return journal.path


def test_entries_are_there_again_and_the_file_goes_on(path):
    journal = Journal(path, SETTINGS)
    assert [entry["number"] for entry in journal.entries] == [0, 1, 2]
    assert journal.entries[0]["text"] == "ä\u2028\ud800" and "ä\\u2028\\ud800" in path.read_text().splitlines()[0]
    journal.append({"number": 3})
    assert len(Journal(path, SETTINGS).entries) == 4
    journal.remove()
    assert not list(path.parent.iterdir())


def test_a_file_cut_at_any_byte_loses_no_whole_line(path):
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        journal = Journal(path, SETTINGS)
        whole = sum(end <= length for end in ends)
        assert len(journal.entries) == whole
        journal.append({"number": 9})  # after what is left, not after half a line
        assert len(Journal(path, SETTINGS).entries) == whole + 1


def test_lines_to_forget_are_dropped_from_the_file(path):
    journal = Journal(path, SETTINGS, remember=lambda entry: None if entry["number"] == 1 else entry["number"])
    assert journal.entries == [0, 2] and len(path.read_text().splitlines()) == 2
    assert sorted(file.name for file in path.parent.iterdir()) == ["run.jsonl", "run.jsonl.settings.json"]


def test_other_settings_are_named_with_both_values(path):
    with pytest.raises(ValueError, match=r"differs in seed \(0 there, 1 now\): go on as before, delete it"):
        Journal(path, SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match=r"policy \(None there, 'full' now\)"):
        Journal(path, SETTINGS | {"policy": "full"})


def test_a_run_that_finished_nothing_leaves_nothing(tmp_path):
    Journal(tmp_path / "run.jsonl", SETTINGS)
    assert not list(tmp_path.iterdir())
    Journal(tmp_path / "run.jsonl", {"seed": 7}).append({})


@pytest.mark.parametrize("content", ["[1]\n", "{}\n{oops\n", "text without an end", "{}"])
def test_files_that_are_no_journal_are_refused_and_left_alone(tmp_path, content):
    (tmp_path / "mine").write_text(content)
    with pytest.raises(ValueError, match="does not say what it was made with"):
        Journal(tmp_path / "mine", SETTINGS)
    assert (tmp_path / "mine").read_text() == content


def test_files_that_cannot_be_written_are_named_as_the_user_knows_them(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for write, wrong in (
        (lambda path: Journal(path, SETTINGS).append({}), "run.jsonl cannot be written .*/file is read-only, or no"),
        (lambda path: replace_text(path, "text"), "Not a directory: '.*/file/run.jsonl'"),
    ):
        with pytest.raises((OSError, ValueError), match=wrong):
            write(tmp_path / "file" / "run.jsonl")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full_disk)
            with pytest.raises(OSError, match=r"No space left on device: '.*/run.jsonl") as raised:
                write(tmp_path / "run.jsonl")
            assert raised.value.errno == errno.ENOSPC and {each.name for each in tmp_path.iterdir()} == {"file"}
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        Journal(tmp_path, SETTINGS)


def full_disk(path, text, **options):
    with path.open("w") as file:
        file.write(text[:2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_damaged_line_is_named(path):
    path.write_text(path.read_text().replace('{"number": 1', '{"number"; 1'))
    with pytest.raises(ValueError, match="line 2 is damaged: delete the file, or the line"):
        Journal(path, SETTINGS)


def test_digests_tell_values_apart_and_know_objects_by_their_type():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    assert digest([object()]) == digest([object()]) != digest([Exception()])
    assert plain_json({"config": GenerationConfig(top_k=7)})["config"]["top_k"] == 7
    assert digest(GenerationConfig(top_k=7)) == digest(GenerationConfig(top_k=7)) != digest(GenerationConfig(top_k=8))


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        replace_text(pipe, "text")
        assert read.result(timeout=10) == "text" and pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_place_that_is_read_only_is_named_before_any_work(path, monkeypatch):
    locked = {path.parent}
    monkeypatch.setattr("os.access", lambda place, mode: place not in locked)  # the superuser may write anywhere
    with pytest.raises(ValueError, match="other.jsonl cannot be written .*/deep is read-only"):
        Journal(path.parent / "other.jsonl", SETTINGS)
    assert len(Journal(path, SETTINGS).entries) == 3
    locked.add(path)
    with pytest.raises(ValueError, match="run.jsonl cannot be written"):
        Journal(path, SETTINGS)
