"""What `import hf_dspark` offers, and what it does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dspark


def loaded_by(*programs: str) -> list[set[str]]:
    """Return the modules that are there after each of some programs, which one process of its own runs in turn."""
    source = "".join(f"{program}\nimport sys; print(*sys.modules)\n" for program in programs)
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_public_names_exist_are_sorted_and_listed():
    assert len(hf_dspark.__all__) <= 30 and not any(name.startswith("_") for name in hf_dspark.__all__)
    assert hf_dspark.__all__ == sorted(hf_dspark.__all__) and set(hf_dspark.__all__) <= set(dir(hf_dspark))
    for name in hf_dspark.__all__:
        assert getattr(hf_dspark, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hf_dspark.nonsense  # noqa: B018


def test_editors_are_told_of_every_public_name():
    tree = ast.parse(Path(hf_dspark.__file__).read_text())
    told = {alias.asname or alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            for alias in node.names}  # fmt: skip
    assert {name: told.get(name) for name in hf_dspark.__all__} == hf_dspark._MODULES


def test_the_manual_lists_every_public_name():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    assert [name for name in hf_dspark.__all__ if f"::: hf_dspark.{name}\n" not in page] == []


def test_importing_the_package_loads_no_more_than_registering_takes_and_lets_a_draft_assist(pair, tmp_path):
    for name, model in zip(("target", "draft"), pair, strict=True):
        model.save_pretrained(tmp_path / name)
    program = f"""
import torch
from transformers import AutoModel
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r})
draft = AutoModel.from_pretrained({str(tmp_path / "draft")!r})
assert type(draft) is hf_dspark.DSparkDraftModel
ids = torch.tensor([[1, 2, 3]])
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
plain = target.generate(ids, **options)
assert torch.equal(target.generate(ids, assistant_model=draft, **options), plain)
assert draft.last_stats.rounds > 0
"""
    before = "from transformers import AutoModelForCausalLM, GenerationMixin"
    base, imported, used = loaded_by(before, "import hf_dspark", program)
    more = imported - base
    ours = {name for name in more if name.startswith("hf_dspark")}
    assert not {name.split(".")[0] for name in more} & {"scipy", "accelerate", "datasets", "matplotlib", "peft"}
    assert "transformers.modeling_utils" not in more and "transformers.trainer" not in more
    folders = {name.split(".")[1] for name in ours if "." in name}
    assert folders <= {"decoding", "models", "formats", "sampling", "scheduling", "files"} and len(ours) <= 27, sorted(
        ours
    )
    decoding = {name.split(".")[2] for name in ours if name.startswith("hf_dspark.decoding.")}
    assert decoding == {"install"}
    assert "hf_dspark.decoding.loop" in used
