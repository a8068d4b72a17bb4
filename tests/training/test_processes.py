"""Runs in processes of their own: killed ones go on exactly, and several train as one does."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_dspark
from tests.training.tiny import tiny_pair, tiny_rows

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
PLACES = (Path(hf_dspark.__file__).parent.parent, FOLDER.parent.parent, os.environ.get("PYTHONPATH", ""))
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, PLACES)),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run(script: str, *words, processes: int = 1, code: int = 0) -> None:
    """Run a script beside this one; one that ends otherwise than it should says why."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, str(FOLDER / script), *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-5000:]


def test_killed_run_resumes_on_the_same_curve(tmp_path):
    """A process that is killed between two checkpoints, against one that was left alone: not a bit differs."""
    kill_at = random.Random(os.getpid()).randint(3, 8)
    run("train_tiny.py", tmp_path / "whole", tmp_path / "whole.json", -1)
    run("train_tiny.py", tmp_path / "killed", tmp_path / "killed.json", kill_at, code=-signal.SIGKILL)
    assert not (tmp_path / "killed.json").exists()
    run("train_tiny.py", tmp_path / "killed", tmp_path / "killed.json", -1)
    whole, killed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert killed == whole and len(whole["loss"]) == 10
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


@pytest.mark.parametrize("draft", ["dspark", "eagle3"])
def test_two_processes_train_as_one_with_twice_the_accumulation(tmp_path, draft):
    run("train_tiny.py", tmp_path / "one", tmp_path / "one.json", -1, draft, 2)
    run("train_tiny.py", tmp_path / "two", tmp_path / "two.json", -1, draft, 1, processes=2)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one.pop("processes") == 1 and two.pop("processes") == 2
    assert len(one["loss"]) == 10
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-4), name


def test_several_processes_train_on_streams(tmp_path):
    run("train_tiny.py", tmp_path / "run", tmp_path / "log.json", -1, "stream", processes=2)
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["processes"] == 2 and len(log["loss"]) == 10


def test_the_manuals_torchrun_line_trains_in_two_processes(tmp_path, tokenizer):
    target, _ = tiny_pair()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in tiny_rows(12)))
    (line,) = re.findall(r"^torchrun .*", (FOLDER.parents[1] / "docs" / "training.md").read_text(), re.MULTILINE)
    for words, path in (("Qwen/Qwen3-4B", "target"), ("answers.jsonl", "rows.jsonl"), ("my-draft", "draft")):
        line = line.replace(words, str(tmp_path / path))
    options = "--max_steps 2 --num_hidden_layers 1 --markov_rank 4 --block_size 3 --target_layer_ids 0 2 --use_cpu"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *line.split()[1:], *options.split()]
    done = subprocess.run(torchrun, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    result = json.loads((tmp_path / "draft" / "results" / "training.json").read_text())
    assert result["steps"] == 2 and result["arguments"]["processes"] == 2


def test_sharded_parameters_get_the_same_gradients(tmp_path):
    run("shard_tiny.py", tmp_path / "gradients.safetensors", processes=2)
    values = load_file(tmp_path / "gradients.safetensors")
    names = [name.removeprefix("alone.") for name in values if name.startswith("alone.")]
    assert len(names) > 20
    assert values["loss.sharded"].item() == pytest.approx(values["loss.alone"].item(), abs=1e-6)
    for name in names:
        torch.testing.assert_close(values[f"sharded.{name}"], values[f"alone.{name}"], atol=1e-6, rtol=1e-5, msg=name)
