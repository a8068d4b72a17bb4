"""Provenance says where a number comes from, and nothing of the disk it was made on."""

import sys

from hf_dspark.provenance import provenance


def test_a_command_shows_no_path_outside_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    words = [
        str(tmp_path / "run.py"),
        "--target",
        "org/name",
        "/somewhere/private/data.jsonl",
        str(tmp_path / "a/b.json"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert provenance()["command"] == "python run.py --target org/name data.jsonl a/b.json"


def test_a_command_shows_no_secret(monkeypatch):
    words = "train --hub_token hf_0123456789 --data=/home/u/x.jsonl --api_key=abc math=/home/u/y.jsonl".split()
    words += [
        "--max_new_tokens",
        "24",
        "--tokenizer=x",
        "--api_key_env",
        "NAME",
        "--hub-token=hf_0123456789",
        "--endpoint",
        "https://user:pw@host/v1",
        "say",
        "hf_0123456789",
    ]
    monkeypatch.setattr(sys, "argv", ["hf-dspark", *words])
    assert provenance()["command"] == (
        "hf-dspark train --hub_token *** --data=x.jsonl --api_key=*** math=y.jsonl --max_new_tokens 24 --tokenizer=x "
        "--api_key_env NAME --hub-token=*** "
        "--endpoint https://host/v1 say ***"
    )


def test_a_console_script_is_shown_by_its_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/hf-dspark", "eval", "http://127.0.0.1:8000/v1"])
    assert provenance()["command"] == "hf-dspark eval http://127.0.0.1:8000/v1"


def test_provenance_names_versions_hardware_and_the_revision_of_a_checkout():
    origin = provenance()
    assert {"hf_dspark", "python", "torch", "transformers", "device", "threads"} <= origin.keys()
    assert origin.get("revision", "0" * 7).split("+")[0].isalnum()
