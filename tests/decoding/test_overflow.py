"""Drafts on which the target overflows, as float16 does: their NaN stays with them and with what follows them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dspark import DecodingOptions, FullBlock, Scheduler
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import HAVE_PROTOCOL, SMALL, build, known, make_own_draft
from tests.rows import padded

PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
RECURRENT = ["lfm2", "qwen3_5_text", "falcon_mamba", "glm5_next"]


def overflow_unless(target, known):
    """Let the first layer get infinite states of every token that is not among the known ones."""
    support = TargetSupport.of(target)
    seen = []
    support.embedding.register_forward_pre_hook(lambda _, args: seen.insert(0, args[0]))

    def overflow(_, args):
        states = args[0]  # some families carry several streams
        unknown = ~torch.isin(seen[0], known)
        return states.masked_fill(unknown.view(*unknown.shape, *[1] * (states.dim() - 2)), torch.inf), *args[1:]

    support.layers[0].register_forward_pre_hook(overflow)


@pytest.fixture(
    params=[
        None,
        "gemma2",
        "lfm2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt_oss", *RECURRENT[1:])),
    ]
)
def target(request, make_target):
    if request.param is None:
        return make_target(seed=4)
    if request.param in RECURRENT:
        if not (HAVE_PROTOCOL and known(request.param)):
            pytest.skip("needs a later transformers")
        return build(request.param, 4)
    sizes = {name: value for name, value in SMALL.items() if not name.endswith("token_id")}
    config = AutoConfig.for_model(request.param, **sizes, layer_types=["sliding_attention", "full_attention"] * 2)
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=14)], ids=["chains", "trees"])
def test_a_rejected_draft_that_overflows_changes_no_token(target, policy, monkeypatch):
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(policy=policy, prompt_lookup=False)
    batches = [padded(PROMPTS), padded(PROMPTS[:1])]
    plain = [target.generate(**batch, **GREEDY) for batch in batches]
    overflow_unless(target, torch.cat([each.unique() for each in plain]))
    repaired, clear_stale = [], SlotCache.clear_stale
    monkeypatch.setattr(SlotCache, "clear_stale", lambda cache: (repaired.append(1), clear_stale(cache)))
    for batch, expected in zip(batches, plain, strict=True):
        assert torch.equal(target.generate(**batch, **GREEDY, assistant_model=draft), expected)
        assert sum(draft.last_stats.proposed) > 0
    assert repaired, "no draft overflowed"
