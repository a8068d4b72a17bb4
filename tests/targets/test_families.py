"""All families that transformers calls stateful decode with drafts what they decode without, or are refused."""

import pytest
import torch

from hf_dspark import check_target, decode_with, generate_many
from hf_dspark.targets.support import TargetSupport
from hf_dspark.targets.transformers_api import cache_argument

from ..hybrids import AROUND, HAVE_PROTOCOL, REFUSED, TEXT, build, known, make_own_draft, stateful_families
from ..rigged import rig
from ..rows import padded
from .test_recurrent import assisted, pair_of, plain, prompts_of

FAMILIES = sorted({*TEXT, *AROUND} - {"glm5_next_text"})
# One of each kind of layer, and one with a rule of its own for prompts.
QUICK = ("lfm2", "mamba2", "qwen3_5_text", "recurrent_gemma", "zamba2")
EACH = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in FAMILIES]
)

# A prompt's rule of these has a limit that the rule for single tokens has not. So whole conversations differ from
# those that go on in a cache, with drafts and without.
OTHER_RULE = {"zamba2", "nemotron_h", "nemotron_h_omni", "nemotron3_5_transcribe"}
NEW_TOKENS = 10  # of a turn


def in_own_caches(target, prompts, caches):
    """Return what plain decoding gives that goes on in its cache, row by row."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    rows = []
    for prompt, cache in zip(prompts, caches, strict=True):
        output = target.generate(**padded([prompt]), **options, **cache)
        cache[cache_argument(target)] = output.past_key_values
        rows.append(output.sequences[0])
    return rows


needs_protocol = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")


def needs(family):
    if not known(family):
        pytest.skip(f"this version of transformers has no {family}")


def test_no_family_is_forgotten():
    tested = {family.removesuffix("_text") for family in (*FAMILIES, *REFUSED)}
    assert set(stateful_families()) <= tested


@pytest.mark.one_in(5)
@needs_protocol
@EACH
def test_two_turns_of_any_batch_give_the_tokens_of_plain_decoding(family, monkeypatch):
    needs(family)
    target, draft = pair_of(family)
    ragged = ((7,), (3, 11, 6), (9, 5, 14, 2, 1))
    for lengths in ((7,), (7, 7)) if TargetSupport.of(target).reads_padding else ragged:
        prompts = prompts_of(target, lengths)
        cache, own = {}, [{} for _ in prompts]
        for turn in range(2):
            own_rule = family in OTHER_RULE
            expected = in_own_caches(target, prompts, own) if own_rule else plain(target, prompts, NEW_TOKENS)
            with monkeypatch.context() as patch:
                rig(patch, expected, right_part=0.7, seed=turn)
                rows, output = assisted(target, draft, prompts, NEW_TOKENS, return_dict_in_generate=True, **cache)
            for row, answer in zip(rows, expected, strict=True):
                assert torch.equal(row, answer)
            more = prompts_of(target, [3] * len(lengths), seed=1)
            prompts = [torch.cat(parts) for parts in zip(rows, more, strict=True)]
            cache = {cache_argument(target): output.past_key_values}


@pytest.mark.one_in(3)
@needs_protocol
@EACH
def test_padding_of_any_tokens_gives_what_plain_decoding_gives_or_is_refused(family):
    needs(family)
    target, draft = pair_of(family)
    rows, mask = torch.stack(prompts_of(target, (9, 9))), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    others = torch.where(mask.bool(), rows, torch.stack(prompts_of(target, (9, 9), seed=5)))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    scored = {"return_dict_in_generate": True, "output_scores": True}
    one, other = (target.generate(each, **options, **scored).scores[0] for each in (rows, others))
    if torch.allclose(one, other, atol=1e-3):
        expected = target.generate(rows, **options)
        assert torch.equal(target.generate(rows, **options, assistant_model=draft), expected)
    else:
        with pytest.raises(ValueError, match="layers of .* read the padding of rows \\[0, 1\\]"):
            target.generate(rows, **options, assistant_model=draft)


@pytest.mark.one_in(3)
@needs_protocol
@EACH
def test_packed_rows_have_the_logits_of_single_ones(family):
    needs(family)
    assert check_target(build(family)) < 1e-3


@needs_protocol
@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_state_cannot_be_kept_are_refused_with_the_reason(family):
    needs(family)
    target = build(family)
    draft = make_own_draft(target)
    prompt = torch.tensor([[5, 6, 7]])
    for refused in (
        lambda: target.generate(prompt, assistant_model=draft),
        lambda: target.generate(prompt, custom_generate=decode_with(draft)),
        lambda: list(generate_many(target, draft, prompt.tolist())),
        lambda: check_target(target),
    ):
        with pytest.raises(ValueError, match=f"{type(target).__name__} .*cannot go back to before a rejected token"):
            refused()


@pytest.mark.skipif(HAVE_PROTOCOL, reason="of older versions of transformers")
def test_older_versions_are_told_which_one_is_needed():
    target = build("mamba")
    draft = make_own_draft(target)
    with pytest.raises(ValueError, match="takes transformers 5.23 or later"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft)
