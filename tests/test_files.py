"""Journals keep what is finished, whatever cuts the writing short."""

import pytest
from transformers import GenerationConfig

from hf_dspark.files import Journal, digest, plain_json

SETTINGS = {"seed": 0, "options": {"top_k": 5}}


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "deep" / "run.jsonl", SETTINGS)
    for number in range(3):
        journal.append({"number": number, "text": "a\u2028b"})
    return journal.path


def test_entries_are_there_again_and_the_file_goes_on(path):
    journal = Journal(path, SETTINGS)
    assert [entry["number"] for entry in journal.entries] == [0, 1, 2] and journal.entries[0]["text"] == "a\u2028b"
    journal.append({"number": 3})
    assert len(Journal(path, SETTINGS).entries) == 4
    journal.remove()
    assert not path.exists()


def test_a_file_cut_at_any_byte_loses_no_whole_line(path):
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        journal = Journal(path, SETTINGS)
        whole = sum(end <= length for end in ends)
        assert len(journal.entries) == max(0, whole - 1)
        journal.append({"number": 9})  # behind what is left, not behind half a line
        assert len(Journal(path, SETTINGS).entries) == max(0, whole - 1) + 1


def test_other_settings_are_named_with_both_values(path):
    with pytest.raises(ValueError, match=r"differs in seed \(0 there, 1 now\): go on as before, delete it"):
        Journal(path, SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match=r"policy \(None there, 'full' now\)"):
        Journal(path, SETTINGS | {"policy": "full"})


def test_a_run_that_finished_nothing_binds_nobody(tmp_path):
    Journal(tmp_path / "run.jsonl", SETTINGS)
    assert not list(tmp_path.iterdir())
    Journal(tmp_path / "run.jsonl", {"seed": 7}).append({})


@pytest.mark.parametrize(
    ("content", "message"), [("[1]\n", "does not say what it was made with"), ("{}\n{oops\n", "line 2 is damaged")]
)
def test_files_that_are_no_journal_are_refused(tmp_path, content, message):
    (tmp_path / "run.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        Journal(tmp_path / "run.jsonl", SETTINGS)
    assert (tmp_path / "run.jsonl").read_text() == content


def test_digests_tell_values_apart_and_know_objects_by_their_type():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    assert digest([object()]) == digest([object()]) != digest([Exception()])


def test_configurations_are_told_apart_by_what_they_set():
    assert plain_json({"config": GenerationConfig(top_k=7)})["config"]["top_k"] == 7
    assert digest(GenerationConfig(top_k=7)) == digest(GenerationConfig(top_k=7)) != digest(GenerationConfig(top_k=8))


@pytest.mark.parametrize("content", [b"{}", b'{"settings"', b"text without an end"])
def test_a_file_of_others_is_left_alone_when_it_has_no_whole_line(tmp_path, content):
    (tmp_path / "mine").write_bytes(content)
    if content == b'{"settings"':  # cut short in its first line: a journal of ours
        Journal(tmp_path / "mine", {})
        return
    with pytest.raises(ValueError, match="does not say what it was made with"):
        Journal(tmp_path / "mine", {})
    assert (tmp_path / "mine").read_bytes() == content
