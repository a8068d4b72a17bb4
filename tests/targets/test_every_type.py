"""A part of the sweep over all types of causal LMs, and the manual's table that is made of the whole."""

import json
from pathlib import Path

import pytest
import transformers

from .. import families

ROOT = Path(__file__).parents[2]
# Of each kind: multimodal ones with text inside, groups of positions, experts of two kinds, states, others' names.
SOME = [
    "dory", "gemma4_unified", "llama4", "mllama", "dbrx", "qwen3_5", "blenderbot", "moshi", "blt", "longcat_flash",
    "roformer",
]  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("model_type", [name for name in SOME if name in transformers.CONFIG_MAPPING])
def test_a_type_decodes_as_without_a_draft_or_is_refused_by_name(model_type):
    found = families.of_type(model_type, new_tokens=8)
    assert "not tried" not in found
    assert all(result.startswith(("identical", "refused")) for result in [*found.values()][1:])


def test_no_type_is_left_out_and_none_differs():
    result = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    outcomes = [families.outcome(cell) for cell in result["families"]]
    assert len(outcomes) >= 187
    assert all(each.startswith(("decoded", "one sequence", "refused", "not tried: ")) for each in outcomes)
    assert not [each for each in outcomes if each.endswith(": ")], "a refusal whose reason the table does not know"
    assert families.table(result) in (ROOT / "docs/hybrid.md").read_text()
