"""Transformers' own assisted loop with our drafts: what goes there, and what it would get wrong."""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from hf_dspark import DecodingOptions, DSparkCandidateGenerator, Rounds
from hf_dspark.decoding import checks
from hf_dspark.targets.transformers_api import is_since
from tests.rows import GREEDY, assert_same_tokens, padded


def test_attentions_are_left_to_transformers_loop(target, draft, prompts):
    eager = copy.deepcopy(target)
    eager.set_attn_implementation("eager")
    ask = {"return_dict_in_generate": True, "output_attentions": True}
    with pytest.warns(UserWarning, match="assisted loop, because output_attentions .* 1.15 times") as warnings:
        assert eager.generate(torch.tensor(prompts[:1]), assistant_model=draft, **GREEDY, **ask).attentions
    assert len(warnings) == 1 and draft.last_stats.loop == "transformers"
    with pytest.raises(ValueError, match="output_attentions"):
        eager.generate(**padded(prompts), assistant_model=draft, **GREEDY, **ask)


def test_transformers_loop_refuses_batches_and_says_why_it_was_needed(target, draft, prompts):
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    with pytest.raises(ValueError, match="6 sequences .* together: draft.decoding.use_transformers_loop"):
        target.generate(**padded(prompts), assistant_model=draft, **GREEDY)


@pytest.mark.filterwarnings("error:this call goes through transformers")
@pytest.mark.usefixtures("either_loop")
def test_statistics_say_who_verified_and_a_loop_that_was_asked_for_needs_no_warning(target, draft, prompts):
    target.generate(torch.tensor(prompts[:1]), assistant_model=draft, **GREEDY)
    expected = "transformers" if draft.decoding.use_transformers_loop else "hf_dspark"
    assert draft.last_stats.loop == Rounds.from_dict(draft.last_stats.to_dict()).loop == expected
    assert Rounds.joined([draft.last_stats]).loop == expected


def test_positions_of_the_users_own_are_left_to_transformers_loop(target, draft, prompts):
    ids, batch = torch.tensor(prompts[:1]), padded(prompts)
    assert_same_tokens(target, draft, ids, position_ids=torch.arange(ids.shape[1])[None] + 50)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(len(prompts), -1) + 50
    with pytest.raises(ValueError, match="position_ids"):
        target.generate(**batch, position_ids=positions, assistant_model=draft, **GREEDY)


@pytest.mark.usefixtures("either_loop")
def test_inputs_embeds_give_the_same_continuation_or_are_refused(target, draft, prompt_ids):
    embeds = target.get_input_embeddings()(prompt_ids[0])
    if draft.decoding.use_transformers_loop and not is_since(checks.INPUTS_EMBEDS_SINCE):
        with pytest.raises(ValueError, match="inputs_embeds"):
            target.generate(inputs_embeds=embeds, assistant_model=draft, **GREEDY)
        return
    plain = target.generate(prompt_ids[0], **GREEDY)[0, prompt_ids[0].shape[1] :]
    assisted = target.generate(inputs_embeds=embeds, assistant_model=draft, **GREEDY)
    assert assisted[0].tolist() == plain.tolist()


def test_target_with_offloaded_embedding_gives_the_same_tokens_in_our_loop_alone(make_target, make_draft):
    from accelerate import cpu_offload

    target, prompt = make_target(), torch.tensor([[3, 9, 12, 30]])
    draft = make_draft(target)
    plain = target.generate(prompt, **GREEDY)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.generate(prompt, assistant_model=draft, **GREEDY).tolist() == plain.tolist()
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    with pytest.raises(ValueError, match="embedding is offloaded"):
        target.generate(prompt, assistant_model=draft, **GREEDY)


def test_the_candidate_generator_drafts_for_transformers_assisted_loop(target, draft, prompts, monkeypatch):
    for prompt in prompts[:3]:
        ids = torch.tensor([prompt])
        plain = target.generate(ids, **GREEDY)
        with (
            DSparkCandidateGenerator(target, draft, target.generation_config) as generator,
            monkeypatch.context() as patch,
        ):
            patch.setattr(type(target), "_get_candidate_generator", lambda *_, **__: generator)
            assisted = target.generate(ids, assistant_model=target, **GREEDY)  # any assistant: the loop asks ours
        assert torch.equal(assisted, plain)
        assert draft.last_stats.tau > 1.5 and not any(module._forward_hooks for module in target.modules())


@pytest.mark.parametrize("kind", ["draft", "ordinary"])
def test_the_candidate_generator_drafts_for_a_loop_of_ones_own(target, draft, prompts, kind):
    draft = draft if kind == "draft" else copy.deepcopy(target)
    ids = torch.tensor(prompts[:1])
    plain = target.generate(ids, **(GREEDY | {"max_new_tokens": 20, "eos_token_id": None}))
    cache, matches = DynamicCache(config=target.config), None
    with DSparkCandidateGenerator(target, draft) as generator, torch.no_grad():
        while ids.shape[1] < plain.shape[1]:
            first = matches is None
            candidates, _ = generator.get_candidates(ids, is_first_iteration=first, n_last_matches=matches or 0)
            drafts = candidates[0, ids.shape[1] :]
            logits = target(candidates[:, cache.get_seq_length() :], past_key_values=cache).logits
            best = logits[0, -len(drafts) - 1 :].argmax(dim=-1)
            matches = int((drafts == best[:-1]).long().cumprod(dim=0).sum())
            cache.crop(matches - len(drafts))
            ids = torch.cat([ids, best[None, : matches + 1]], dim=1)
            generator.update_candidate_strategy(ids, logits[:, -len(drafts) - 1 :], matches)
    assert torch.equal(ids[:, : plain.shape[1]], plain)
    assert generator.draft.last_stats.tau > 1.5


def test_the_candidate_generator_refuses_what_it_cannot_serve(target, draft, make_target):
    with pytest.raises(ValueError, match="num_beams"):
        DSparkCandidateGenerator(target, draft, GenerationConfig(num_beams=2))
    with pytest.raises(ValueError, match="not made for this target"):
        DSparkCandidateGenerator(make_target(vocab_size=77), draft)
    with pytest.raises(RuntimeError, match="enter it"):
        DSparkCandidateGenerator(target, draft).get_candidates(torch.tensor([[1, 2]]), is_first_iteration=True)
