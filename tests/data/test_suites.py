"""Benchmarks by name: their files, and what is said where one is missing."""

import pytest

from hf_dspark.data.suites import SUITES, suite_files


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_a_file_of_prompts_for_each_task(suite, tmp_path):
    for task in SUITES[suite]:
        (tmp_path / f"{task}.jsonl").write_text('{"turns": ["Why?"]}\n')
    assert list(suite_files(suite, tmp_path)) == list(SUITES[suite])


def test_missing_files_and_unknown_suites_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"lacks gsm8k.jsonl, .*arena-hard-v2.jsonl: a folder of paper has"):
        suite_files("paper", tmp_path)
    with pytest.raises(ValueError, match="no suite 'glue': choose paper or spec_bench"):
        suite_files("glue", tmp_path)
