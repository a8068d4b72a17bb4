"""Calibration by real rounds: what is recorded, that it resumes, and that generate() uses the result."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_dspark import ConfidenceThreshold, DecodingOptions, DSparkDraftModel, FullBlock, calibrate
from hf_dspark.measuring import calibrate as collection
from hf_dspark.measuring.calibrate import collect_rounds, recorded_round
from tests.measuring.interruption import interrupt_third_call

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3, 4, 5, 6, 7]]
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


def records(target, draft, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 24} | options
    return collect_rounds(target, draft, prompts, **options)


def test_rounds_agree_with_the_statistics_of_generate(target, draft):
    rounds = records(target, draft, PROMPTS[:1])
    ids, draft.decoding = torch.tensor(PROMPTS[:1]), DecodingOptions(policy=FullBlock())
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=24)
    drafted = [n for n in zip(draft.last_stats.proposed, draft.last_stats.accepted, strict=True) if n[0] > 0]
    assert rounds.proposed.tolist() == [proposed for proposed, _ in drafted]
    assert rounds.num_accepted.tolist() == [accepted for _, accepted in drafted]
    said = [confidence for confidence in draft.last_stats.confidence if confidence is not None]
    for row, confidence in zip(rounds.logits.sigmoid(), said, strict=True):
        torch.testing.assert_close(row[: len(confidence)], confidence)  # the last block is shorter


def test_sampled_acceptance_is_the_overlap_of_both_distributions_after_the_weight_of_the_prefix(
    target, draft, monkeypatch
):
    seen = []
    monkeypatch.setattr(collection, "recorded_round", lambda o, *size: (seen.append(o), recorded_round(o, *size))[1])
    rounds = records(target, draft, PROMPTS[:1], **SAMPLED)
    assert len(seen) == len(rounds.logits)
    for outcome, row in zip(seen, rounds.acceptance, strict=True):
        weight = 1.0
        for slot in range(int(outcome.lengths[0])):
            target_distribution = outcome.target_logits[0, slot].softmax(-1)
            draft_distribution = outcome.drafts.distribution[0, slot].dense(outcome.target_logits.shape[-1]).probs
            if weight > 1e-6:
                expected = torch.minimum(target_distribution, draft_distribution / weight).sum().item()
                assert row[slot].item() == pytest.approx(expected, abs=1e-5)
            token = int(outcome.drafts.token_ids[0, slot])
            weight = min(1.0, weight * float(target_distribution[token] / draft_distribution[token]))
    assert 0.0 < rounds.acceptance[rounds.acceptance > 0].mean() < 1.0


def test_target_scores_of_a_round_are_the_targets_distribution_behind_its_prefix(target, draft):
    """The scores at slot k belong to the token that slot k proposes: an off-by-one would calibrate on noise."""
    seen = []
    draft.decoding = DecodingOptions(observer=seen.append)
    ids = torch.tensor(PROMPTS[:1])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=12)
    with torch.no_grad():
        logits = target(output).logits[0]
    position = ids.shape[1]  # of the token behind the first anchor
    for outcome in seen:
        for slot in range(int(outcome.num_accepted[0]) + 1):
            torch.testing.assert_close(outcome.target_logits[0, slot], logits[position + slot], atol=1e-4, rtol=1e-4)
        position += int(outcome.num_accepted[0]) + 1


def test_collection_restores_the_users_policy_and_random_state(target, draft):
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.3))
    before = torch.random.get_rng_state()
    records(target, draft, **SAMPLED)
    assert draft.decoding.policy == ConfidenceThreshold(0.3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_collection_resumes_where_it_was_interrupted(target, draft, tmp_path, monkeypatch):
    path = tmp_path / "rounds.jsonl"
    whole = records(target, draft, **SAMPLED)
    calls = interrupt_third_call(monkeypatch, type(target), "generate")
    with pytest.raises(KeyboardInterrupt):
        records(target, draft, output_file=path, **SAMPLED)
    assert len(path.read_text().splitlines()) == 2
    path.write_text(path.read_text() + '{"index": 2, "rounds": [{"half a li')  # power went off while writing
    resumed = records(target, draft, output_file=path, **SAMPLED)
    assert len(calls) == 4  # the third prompt only
    assert all(torch.equal(a, b) for a, b in zip(vars(whole).values(), vars(resumed).values(), strict=True))
    again = records(target, draft, output_file=path, **SAMPLED)
    assert len(calls) == 4 and len(again.logits) == len(whole.logits)


def test_records_of_another_run_are_not_mixed_in(target, draft, make_draft, tmp_path, monkeypatch):
    path = tmp_path / "rounds.jsonl"
    records(target, draft, output_file=path)
    other = make_draft(target, seed=9)
    runs = [(draft, PROMPTS, SAMPLED, "options"), (other, PROMPTS, {}, "draft"), (draft, PROMPTS[:2], {}, "prompts")]
    for changed, prompts, options, name in runs:
        with pytest.raises(ValueError, match=rf"another run .*differs in {name} \(.* there, .* now\): go on"):
            records(target, changed, prompts, output_file=path, **options)
    monkeypatch.setattr(draft.config, "confidence_fits", {"default": [[0.5, -1.0]] * draft.config.block_size})
    records(target, draft, output_file=path)  # rounds are recorded before any calibration
    monkeypatch.setattr(draft.config, "draft_top_k", 8)
    with pytest.raises(ValueError, match="another run .*differs in draft_config"):
        records(target, draft, output_file=path)


def test_every_turn_of_a_conversation_is_answered_and_recorded(target, draft, chat_tokenizer, monkeypatch):
    seen, generate = [], type(target).generate
    spy = lambda self, ids, **kwargs: seen.append(ids[0].tolist()) or generate(self, ids, **kwargs)  # noqa: E731
    monkeypatch.setattr(type(target), "generate", spy)
    rounds = records(target, draft, [{"turns": ["what is", "not much"]}], processing_class=chat_tokenizer)
    first = records(target, draft, [seen[0]])
    assert chat_tokenizer.decode(seen[0]) == "user what is <eos> assistant"
    assert chat_tokenizer.decode(seen[1]).endswith("not much <eos> assistant") and seen[1][: len(seen[0])] == seen[0]
    assert len(rounds.logits) > len(first.logits) and torch.equal(rounds.logits[: len(first.logits)], first.logits)


def test_rounds_are_whole_whatever_the_targets_generation_config_says(target, draft):
    whole = records(target, draft)
    target.generation_config.assistant_confidence_threshold = 0.9
    target.generation_config.num_assistant_tokens = 2
    assert torch.equal(records(target, draft).proposed, whole.proposed)


def test_what_cannot_be_calibrated_on_is_refused(target, draft, make_draft):
    headless = make_draft(target, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate(target, headless, PROMPTS)
    with pytest.raises(ValueError, match="there are no prompts"):
        calibrate(target, draft, [])
    for option in ("assistant_confidence_threshold", "num_assistant_tokens"):
        with pytest.raises(ValueError, match=f"{option} itself: rounds are recorded with the full block"):
            records(target, draft, **{option: 1})


def test_answers_without_room_for_a_whole_block_are_refused_before_any_is_decoded(target, draft, monkeypatch):
    assert records(target, draft, PROMPTS[:1], max_new_tokens=6).proposed.max() == draft.config.block_size == 4
    monkeypatch.setattr(type(target), "generate", lambda *args, **kwargs: pytest.fail("it decodes"))
    with pytest.raises(ValueError, match="max_new_tokens=5 have no room for a whole block of 4 draft tokens: give 6"):
        records(target, draft, max_new_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens=5 have no room for a whole block"):
        collect_rounds(target, draft, PROMPTS, generation_config=GenerationConfig(max_new_tokens=5))
    with pytest.raises(ValueError, match="answers need a limit, .* has none: give max_new_tokens"):
        records(target, draft, max_new_tokens=None)
    target.generation_config.max_new_tokens = 5
    with pytest.raises(ValueError, match="max_new_tokens=5 have no room for a whole block"):
        records(target, draft, max_new_tokens=None)


def test_an_accepted_end_of_sequence_counts_as_accepted(fixtures):
    """transformers counts it as the bonus token; calibration must not learn that the draft was wrong."""
    folder = fixtures / "deepspec" / "trained"
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    draft = DSparkDraftModel.from_pretrained(folder / "draft").eval()
    prompts = json.loads((folder / "generation.json").read_text())["prompts"]
    rounds = records(target, draft, prompts, do_sample=False, max_new_tokens=64, eos_token_id=[62, 11, 17])
    before = torch.arange(rounds.block_size) < rounds.num_accepted[:, None]
    assert bool((rounds.acceptance[before] == 1.0).all())
    stopped = (rounds.num_accepted < rounds.proposed).nonzero()[:, 0]
    assert len(stopped) > 5 and bool((rounds.acceptance[stopped, rounds.num_accepted[stopped]] == 0.0).all())
    ended = int((rounds.proposed < rounds.block_size).sum())  # blocks cut behind an end of sequence
    assert ended > 0 and bool((rounds.num_accepted == rounds.proposed)[rounds.proposed < rounds.block_size].any())


def test_calibrate_keeps_its_fits_in_the_config_and_generate_uses_them(target, draft, tmp_path):
    report = calibrate(target, draft, PROMPTS, max_new_tokens=24)
    temperatures = draft.config.sts_temperatures["default"]
    assert report.domain == "greedy"
    assert temperatures == report.temperatures and len(temperatures) == draft.config.block_size
    assert report.mean_ece[1] <= report.mean_ece[0] + 1e-9

    draft.save_pretrained(tmp_path)
    loaded = type(draft).from_pretrained(tmp_path)
    assert loaded.config.sts_temperatures == {"greedy": temperatures, "default": temperatures}
    fits = [list(pair) for pair in report.fits]
    assert loaded.config.confidence_fits == {"greedy": fits, "default": fits}

    ids = torch.tensor(PROMPTS[:1])
    options = {"attention_mask": torch.ones_like(ids), "assistant_model": draft, "max_new_tokens": 8}
    draft.decoding = DecodingOptions(policy=FullBlock())
    draft.config.sts_temperatures = draft.config.confidence_fits = None
    target.generate(ids, **options)
    raw = draft.last_stats.confidence[0].logit()
    draft.config.sts_temperatures = {"default": [0.5, 1.0, 2.0, 4.0]}
    target.generate(ids, **options)
    scaled = draft.last_stats.confidence[0].logit()
    torch.testing.assert_close(scaled, raw / torch.tensor([0.5, 1.0, 2.0, 4.0]), atol=1e-4, rtol=1e-3)
    draft.config.confidence_fits = {"default": [[2.0, -1.0]] * 4}  # comes before the temperatures
    target.generate(ids, **options)
    shifted = draft.last_stats.confidence[0].logit()
    torch.testing.assert_close(shifted, raw * 2.0 - 1.0, atol=1e-4, rtol=1e-3)


def test_a_calibration_that_is_repeated_replaces_the_default_that_came_from_it(target, draft):
    calibrate(target, draft, PROMPTS[:1], max_new_tokens=24)
    first = draft.config.confidence_fits["default"]
    calibrate(target, draft, PROMPTS[:1], **SAMPLED)
    assert draft.config.confidence_fits["default"] == first
    calibrate(target, draft, PROMPTS, max_new_tokens=24)
    for known in (draft.config.confidence_fits, draft.config.sts_temperatures):
        assert known["default"] == known["greedy"] != known["sampled"]
    assert draft.config.confidence_fits["default"] != first


@pytest.mark.slow
def test_regimes_and_domains_are_kept_apart(target, draft):
    calibrate(target, draft, PROMPTS, max_new_tokens=24)
    only = draft.config.confidence_fits["default"]
    assert draft.config.confidence_fits_for(None, True) == draft.config.confidence_fits_for(None, False) == only
    calibrate(target, draft, PROMPTS, **SAMPLED)
    draft.decoding = DecodingOptions(domain="poems")  # which has no temperatures yet
    calibrate(target, draft, PROMPTS, domain="poems", **SAMPLED)
    assert draft.decoding.domain == "poems"
    known = draft.config.confidence_fits
    assert draft.config.sts_temperatures.keys() == known.keys()
    assert set(known) == {"greedy", "sampled", "poems", "default"} and known["default"] == known["greedy"]
    assert draft.config.confidence_fits_for(None, do_sample=True) == known["sampled"]
    assert draft.config.confidence_fits_for(None, do_sample=False) == known["greedy"]
    assert draft.config.confidence_fits_for("poems", do_sample=False) == known["poems"]
    with pytest.raises(ValueError, match="no calibration for the domain 'code', only for"):
        draft.config.confidence_fits_for("code", do_sample=False)
