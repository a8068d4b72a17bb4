"""DSpark drafts as others write them compute what their own code computed, which `fixtures/dspark/make.py` ran."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_dspark import DSparkDraftModel
from hf_dspark.hub.convert import convert_checkpoint, read_checkpoint
from hf_dspark.models.slot_cache import SlotCache
from tests.features import new_context
from tests.models.test_modeling_dspark import ForcedSampler
from tests.samplers import ChainSampler

FOLDER = Path(__file__).parents[1] / "fixtures" / "dspark"
LAYOUTS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)  # CPUs round unlike each other


def bound(folder: Path, io: dict[str, torch.Tensor]) -> DSparkDraftModel:
    embedding, head = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40, bias=False)
    embedding.weight.data, head.weight.data = io["embedding"].clone(), io["lm_head"].clone()
    return DSparkDraftModel.from_pretrained(folder).bind_parts(embedding, head, torch.float32).eval()


@torch.no_grad()
def assert_same_blocks(draft: DSparkDraftModel, io: dict[str, torch.Tensor]) -> None:
    """Two rounds, the second with the context that is new: features, then blocks, tokens and confidences."""
    cache = SlotCache()
    for round_, start in (("r1", 0), ("r2", 7)):
        block, features = io[f"{round_}.block_ids"], io[f"{round_}.features"][:, start:]
        hidden = draft.read_block(new_context(block[:, 0], features, cache))
        close(hidden, io[f"{round_}.hidden"])
        close(draft.base_logits(hidden), io[f"{round_}.base_logits"])
        forced = ForcedSampler(io[f"{round_}.tokens"])
        cache.truncate(0, start)
        drafts = draft.draft_block(new_context(block[:, 0], features, cache), forced)
        close(torch.stack(forced.scores, dim=1), io[f"{round_}.corrected_logits"])
        if f"{round_}.confidence_logits" in io:
            close(drafts.confidence_logits, io[f"{round_}.confidence_logits"])
        else:
            assert drafts.confidence_logits is None
        cache.truncate(0, start)
        greedy = draft.draft_block(new_context(block[:, 0], features, cache), ChainSampler())
        assert torch.equal(greedy.token_ids, io[f"{round_}.tokens"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_their_own_code_computed(layout):
    io = load_file(FOLDER / layout / "io.safetensors")
    assert_same_blocks(bound(FOLDER / layout, io), io)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("format", ["hf_dspark", "sglang", "speculators"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_the_same_after_conversion(make_target, tmp_path, layout, format):
    io = load_file(FOLDER / layout / "io.safetensors")
    target = make_target(vocab_size=40, hidden_size=16, name_or_path="tiny/target")
    target.get_input_embeddings().weight.data.copy_(io["embedding"])
    target.get_output_embeddings().weight.data.copy_(io["lm_head"])
    convert_checkpoint(FOLDER / layout, tmp_path / "written", format, target=target)
    assert_same_blocks(bound(tmp_path / "written", io), io)


@pytest.mark.parametrize(
    ("layout", "enabled", "with_markov"),
    [("specforge_early", True, False), ("modelopt_vanilla", True, True), ("modelopt_rnn", False, True)],
)
def test_flags_that_a_config_leaves_out_are_told_by_the_tensors(layout, enabled, with_markov):
    config, tensors = read_checkpoint(FOLDER / layout)
    assert enabled == any("confidence" in name for name in tensors)
    assert (config.enable_confidence_head, config.confidence_head_with_markov) == (enabled, with_markov)
