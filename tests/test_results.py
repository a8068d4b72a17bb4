"""Result files hold who was measured, what was found and where, or say what is missing."""

import json

import pytest

from hf_dspark.results import describe_draft, describe_target, read_results, write_result

FOUND = {"sampling": {"do_sample": False}, "policy": "FullBlock()", "domains": {"math": {"tau": 3.0}}}


def test_what_was_written_is_read(make_target, make_draft, tmp_path):
    target = make_target()
    who = describe_target(target), describe_draft(make_draft(target))
    written = write_result(tmp_path / "deep" / "eval.json", "acceptance", *who, **FOUND)
    assert read_results([tmp_path / "deep"]) == [written]
    assert written["draft"]["num_parameters"] > 0 and written["provenance"]["device"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["eval.json"]


def test_a_model_from_a_folder_shows_no_path(make_target, tmp_path):
    make_target().save_pretrained(tmp_path / "private" / "mine")
    target = type(make_target()).from_pretrained(tmp_path / "private" / "mine")
    assert describe_target(target)["name"] == "mine"


def test_results_without_their_facts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs domains"):
        write_result(tmp_path / "a.json", "acceptance", {}, {}, sampling={}, policy="")
    with pytest.raises(ValueError, match="one of .*'acceptance'.* got 'wishes'"):
        write_result(tmp_path / "a.json", "wishes", {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "acceptance"}', '{"tau": 9}'])
def test_files_that_are_no_results_are_named(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match=r"b\.json"):
        read_results([tmp_path])


def test_numbers_that_json_cannot_hold_are_refused_and_nothing_is_left(tmp_path):
    old = write_result(tmp_path / "c.json", "acceptance", {}, {}, **FOUND)
    with pytest.raises(ValueError):
        write_result(tmp_path / "c.json", "acceptance", {}, {}, **FOUND | {"domains": {"x": float("nan")}})
    assert json.loads((tmp_path / "c.json").read_text()) == old
