"""Provenance says where a number comes from, and nothing of the disk it was made on."""

import sys

from hf_dspark.provenance import provenance


def test_a_command_is_the_program_with_its_options_and_no_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "run.py"), "--hub_token", "hf_secret"])
    options = {
        "target": "org/name", "data": "/somewhere/private/data.jsonl", "output": "a/b.json", "quick": True,
        "slow": False, "rows": [1, 2], "table": None,
    }  # fmt: skip
    command = "python run.py --target org/name --data data.jsonl --output a/b.json --quick --rows 1 2"
    assert provenance(options=options)["command"] == command


def test_the_command_line_itself_is_not_shown(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/hf-dspark", "push", "--hub_token", "hf_secret"])
    assert provenance()["command"] == "hf-dspark"


def test_a_notebook_is_called_so(monkeypatch):
    words = ["/usr/lib/ipykernel_launcher.py", "-f", "/tmp/tmpf.json", "--HistoryManager.hist_file=:memory:"]
    monkeypatch.setattr(sys, "argv", words)
    assert provenance()["command"] == "a notebook"


def test_provenance_names_versions_hardware_and_the_revision_of_a_checkout():
    origin = provenance()
    assert {"hf_dspark", "python", "torch", "transformers", "device", "threads"} <= origin.keys()
    assert origin.get("revision", "0" * 7).split("+")[0].isalnum()
