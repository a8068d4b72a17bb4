"""Rounds: the same tokens as without a draft, whatever the target, its dtype and the processors.

The pair under `fixtures/deepspec/trained` accepts most of its drafts, so acceptance, cut-off and rollback all happen.
"""

import copy
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    DSparkConfig,
    DSparkDraftModel,
    Policy,
)
from hf_dspark.decoding import hook
from tests.rows import EOS, GREEDY, alone, assert_no_hooks, assert_rows, padded

OPTIONS = {
    "default": {},
    "threshold": {"assistant_confidence_threshold": 0.6},
    "threshold_zero": {"assistant_confidence_threshold": 0.0},
    "one_draft": {"num_assistant_tokens": 1},
    "three_drafts": {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    "threshold_and_three_drafts": {"assistant_confidence_threshold": 0.4, "num_assistant_tokens": 3},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "min_new_tokens": {"min_new_tokens": 40},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "bad_words": {"bad_words_ids": [[5], [7, 8]]},
    "forced_eos": {"forced_eos_token_id": EOS},
    "eos_list": {"eos_token_id": [EOS, 11, 17]},
    "no_eos": {"eos_token_id": None},
    "short": {"max_new_tokens": 1},
    "two_tokens": {"max_new_tokens": 2},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "max_time": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(600.0)])},
    "constrained": {"prefix_allowed_tokens_fn": lambda batch, ids: [1 + len(ids) % 3, 20, 30]},
}


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_output_is_identical_to_plain_generate(pair, prompt_ids, options):
    target, draft = pair
    plain_options = {key: value for key, value in options.items() if "assistant" not in key}
    for prompt in prompt_ids:
        plain = target.generate(prompt, **(GREEDY | plain_options))
        assisted = target.generate(prompt, assistant_model=draft, **(GREEDY | options))
        assert assisted.tolist() == plain.tolist()
    assert_no_hooks(target)


@pytest.mark.usefixtures("either_loop")
def test_accepted_end_of_sequence_is_counted_as_accepted_and_followed_by_no_bonus_token(pair, prompt_ids):
    target, draft = pair
    ended_by_draft = 0
    for prompt in prompt_ids:
        plain = target.generate(prompt, **GREEDY)[0, prompt.shape[1] :]
        for end in {*plain.tolist()[2:]}:
            ids = target.generate(prompt, assistant_model=draft, **GREEDY, eos_token_id=end)
            stats = draft.last_stats
            assert ids.shape[1] - prompt.shape[1] == 1 + sum(stats.committed)
            if stats.rounds and stats.committed[-1] == stats.accepted[-1]:
                assert stats.proposed[-1] == stats.accepted[-1]  # nothing is sent behind it
                ended_by_draft += 1
    assert ended_by_draft > 3


@pytest.mark.parametrize("top_k", [1, 2, 8, 64])
def test_greedy_output_is_identical_with_draft_top_k(pair, prompt_ids, top_k):
    target, draft = pair
    draft = copy.deepcopy(draft)
    draft.config.draft_top_k = top_k
    for options in ({}, {"repetition_penalty": 1.3}, {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 9]}):
        plain = target.generate(prompt_ids[0], **GREEDY, **options)
        assert target.generate(prompt_ids[0], assistant_model=draft, **GREEDY, **options).tolist() == plain.tolist()


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8])
def test_rounds_reproduce_the_reference_decoder(pair, reference, threshold):
    target, draft = pair
    case = next(case for case in reference["cases"] if case["confidence_threshold"] == threshold)
    for prompt, expected in zip(reference["prompts"], case["outputs"], strict=True):
        # The reference counts its last block whole and cuts the text afterwards; so generate a block more, and
        # compare.
        ids = target.generate(
            torch.tensor([prompt]), assistant_model=draft, assistant_confidence_threshold=threshold,
            do_sample=False, max_new_tokens=reference["max_new_tokens"] + 7, pad_token_id=0,
        )  # fmt: skip
        stats, rounds = draft.last_stats, len(expected["acceptance_lengths"])
        assert ids[0, : len(expected["output_ids"])].tolist() == expected["output_ids"]
        assert [accepted + 1 for accepted in stats.accepted[:rounds]] == expected["acceptance_lengths"]
        assert stats.proposed[:rounds] == expected["proposal_lengths"]


def test_padding_on_the_left_changes_nothing(pair, prompt_ids):
    target, draft = pair
    prompt = prompt_ids[1]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt], dim=1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones_like(prompt)], dim=1).long()
    plain = target.generate(prompt, assistant_model=draft, **GREEDY)
    accepted = draft.last_stats.accepted
    assisted = target.generate(padded, attention_mask=mask, assistant_model=draft, **GREEDY)
    assert assisted[0, 5:].tolist() == plain[0].tolist()
    assert draft.last_stats.accepted == accepted  # padding is no context for the draft either


def test_sampling_stops_exactly_at_the_first_eos_and_the_length_limit(pair, prompt_ids):
    target, draft = pair
    for seed in range(12):
        torch.manual_seed(seed)
        ids = target.generate(
            prompt_ids[0], assistant_model=draft, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=30,
            eos_token_id=[EOS, 5, 9], pad_token_id=0,
        )[0, prompt_ids[0].shape[1] :].tolist()  # fmt: skip
        stops = [index for index, token in enumerate(ids) if token in (EOS, 5, 9)]
        assert len(ids) <= 30
        assert stops in ([], [len(ids) - 1])
        assert stops or len(ids) == 30


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9}, {"repetition_penalty": 1.2}]
)
def test_sampled_tokens_stay_in_the_processed_support(pair, prompt_ids, options):
    """With return_dict, every returned token has a finite processed score: drafts cannot leave the allowed set."""
    target, draft = pair
    torch.manual_seed(0)
    output = target.generate(
        prompt_ids[0], assistant_model=draft, do_sample=True, max_new_tokens=40, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    new_ids = output.sequences[0, prompt_ids[0].shape[1] :]
    assert len(output.scores) == len(new_ids)
    assert all(scores[0, token] > -torch.inf for scores, token in zip(output.scores, new_ids, strict=True))
    assert sum(draft.last_stats.accepted) > 0


@pytest.mark.usefixtures("either_loop")
def test_returned_scores_and_hidden_states_are_those_of_plain_generate(pair, prompt_ids):
    target, draft = pair
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    plain = target.generate(prompt_ids[0], **GREEDY, **ask)
    assisted = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY, **ask)
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.cat(assisted.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(assisted.logits), torch.cat(plain.logits), atol=1e-4, rtol=1e-4)
    assert len(assisted.hidden_states[1]) == target.config.num_hidden_layers + 1


class Recorder(BaseStreamer):
    def __init__(self, fail_after=None):
        self.tokens, self.ended, self.fail_after = [], False, fail_after

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if self.fail_after is not None and len(self.tokens) > self.fail_after:
            raise KeyboardInterrupt

    def end(self):
        self.ended = True


def test_streamer_receives_every_token_once(pair, prompt_ids):
    target, draft = pair
    streamer = Recorder()
    ids = target.generate(prompt_ids[0], assistant_model=draft, streamer=streamer, **GREEDY)
    assert streamer.tokens == ids[0].tolist() and streamer.ended


def test_interruption_leaves_target_and_draft_usable(pair, prompt_ids):
    target, draft = pair
    expected = target.generate(prompt_ids[0], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt_ids[0], assistant_model=draft, streamer=Recorder(fail_after=30), **GREEDY)
    assert_no_hooks(target)
    assert hook._active_generator.get() is None
    assert draft.last_stats.rounds > 0  # what had happened until then
    assert target.generate(prompt_ids[0], assistant_model=draft, **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_output_does_not_depend_on_the_dtype_of_the_draft(pair, prompt_ids, draft_dtype):
    target, draft = pair
    draft = copy.deepcopy(draft).to(draft_dtype)
    plain = target.generate(prompt_ids[0], **GREEDY)
    assert target.generate(prompt_ids[0], assistant_model=draft, **GREEDY).tolist() == plain.tolist()
    assert draft.last_stats.tau > 2


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_target_commits_tokens_within_rounding_of_the_teacher_forced_maximum(pair, prompt_ids, draft_dtype):
    target, draft = (copy.deepcopy(model) for model in pair)
    target, draft = target.to(torch.bfloat16), draft.to(draft_dtype)
    ids = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    with torch.no_grad():
        logits = target(ids).logits[0, prompt_ids[0].shape[1] - 1 : -1].float()
    chosen = logits.gather(1, ids[0, prompt_ids[0].shape[1] :, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() < 0.15
    assert draft.last_stats.tau > 2


def test_target_with_offloaded_layers_gives_the_same_tokens(pair, prompt_ids, fixtures, tmp_path):
    target, draft = pair
    plain = target.generate(prompt_ids[0], **GREEDY)
    device_map = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    offloaded = AutoModelForCausalLM.from_pretrained(
        fixtures / "deepspec" / "trained" / "target", device_map=device_map, offload_folder=tmp_path
    )
    draft = DSparkDraftModel.from_pretrained(fixtures / "deepspec" / "trained" / "draft")
    assert offloaded.generate(prompt_ids[0], assistant_model=draft, **GREEDY).tolist() == plain.tolist()


def test_target_with_offloaded_head_gives_the_same_tokens(make_target, make_draft):
    from accelerate import cpu_offload

    target = make_target()
    draft, prompt = make_draft(target), torch.tensor([[3, 9, 12, 30]])
    plain = target.generate(prompt, **GREEDY)
    cpu_offload(target.lm_head, execution_device=torch.device("cpu"))  # on the meta device between calls
    assert target.lm_head.weight.device.type == "meta"
    assert target.generate(prompt, assistant_model=draft, **GREEDY).tolist() == plain.tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_target_commits_tokens_within_rounding_of_the_teacher_forced_maximum(
    fixtures, prompt_ids, tmp_path, make_target, bits
):
    pytest.importorskip("bitsandbytes")
    make_target(hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=64).save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="cpu", dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32
        ),
    )  # fmt: skip
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, markov_rank=8, block_size=4)).eval()
    plain = target.generate(prompt_ids[0], **GREEDY)
    ids = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    # 8-bit kernels quantise activations too, and round one row and several differently.
    with torch.no_grad():
        logits = target(ids).logits[0, prompt_ids[0].shape[1] - 1 : -1].float()
    chosen = logits.gather(1, ids[0, prompt_ids[0].shape[1] :, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() < 0.15
    assert ids.shape == plain.shape and draft.last_stats.rounds > 0


FAMILIES = {
    "llama": {"model_type": "llama"},
    "mistral_window": {"model_type": "mistral", "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2"},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
    "olmo2": {"model_type": "olmo2"},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
}


@pytest.mark.parametrize("facts", FAMILIES.values(), ids=FAMILIES)
def test_greedy_output_is_identical_for_other_families(facts):
    from transformers import AutoConfig

    common = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(common | facts))).eval()
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, markov_rank=8, block_size=4)).eval()
    prompt = torch.tensor([[3, 9, 12, 30, 7, 7, 21]])
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    plain = target.generate(prompt, **options)
    assert target.generate(prompt, assistant_model=draft, **options).tolist() == plain.tolist()
    assert draft.last_stats.rounds > 0


def test_foreign_default_device_changes_nothing(pair, prompt_ids):
    target, draft = pair
    batch = torch.cat([prompt_ids[0][:, :3], prompt_ids[1][:, :3]])
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 0}
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.5))
    ways = [(prompt_ids[0], GREEDY | {"eos_token_id": 63}), (batch, GREEDY), (batch, sampled)]

    def run():
        torch.manual_seed(0)
        return [target.generate(ids, assistant_model=draft, **options).tolist() for ids, options in ways]

    here = run()
    try:
        torch.set_default_device("meta")  # where nothing can be computed
        there = run()
    finally:
        torch.set_default_device(None)
        draft.decoding = DecodingOptions()
    assert there == here


def test_limit_that_nobody_means_takes_no_memory(pair, prompt_ids):
    target, draft = pair
    plain = target.generate(prompt_ids[0], do_sample=False, max_new_tokens=30, pad_token_id=0)
    end = int(plain[0, -1])
    options = {"do_sample": False, "max_new_tokens": 10**13, "eos_token_id": end, "pad_token_id": 0}
    expected = target.generate(prompt_ids[0], **options)
    assert target.generate(prompt_ids[0], assistant_model=draft, **options).tolist() == expected.tolist()


def test_ended_rows_leave_the_batch(pair, prompts):
    """The later rounds are about fewer rows: padding is never decoded."""
    target, draft = pair
    seen = []
    draft.decoding = DecodingOptions(observer=lambda outcome: seen.append(outcome.request_ids))
    batch = padded(prompts)
    output = target.generate(**batch, assistant_model=draft, **(GREEDY | {"eos_token_id": [EOS, 11, 17, 42]}))
    lengths = [len(alone(target, prompt, eos_token_id=[EOS, 11, 17, 42])) for prompt in prompts]
    assert len(set(lengths)) > 1 and output.shape[1] == batch["input_ids"].shape[1] + max(lengths)
    assert sum(map(len, seen)) < len(prompts) * len(seen)
    assert set(seen[-1]) <= {row for row, length in enumerate(lengths) if length > 1}


def test_rows_share_one_verification_budget(pair, prompts):
    target, draft = pair

    class FiveInAll(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            lengths = torch.zeros_like(max_lengths)
            for slot in range(5):
                row = slot % len(lengths)
                lengths[row] = min(int(lengths[row]) + 1, int(max_lengths[row]))
            return lengths

    seen = []
    draft.decoding = DecodingOptions(policy=FiveInAll(), observer=seen.append)
    batch = padded(prompts)
    output = target.generate(**batch, assistant_model=draft, **GREEDY)
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt) for prompt in prompts])
    assert max(int(outcome.lengths.sum()) for outcome in seen) == 5
    ragged = next(outcome for outcome in seen if len(set(outcome.lengths.tolist())) > 1)
    assert ragged.target_logits.shape[:2] == (len(ragged.lengths), 1 + int(ragged.lengths.max()))


@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_rows_are_within_rounding_of_the_teacher_forced_maximum(pair, prompts, rows):
    target, draft = copy.deepcopy(pair[0]).bfloat16(), copy.deepcopy(pair[1]).bfloat16()
    batch = padded(prompts[:rows])
    output = target.generate(**batch, assistant_model=draft, **(GREEDY | {"eos_token_id": None}))
    width = batch["input_ids"].shape[1]
    for prompt, row in zip(prompts, output[:, width:].tolist(), strict=False):
        ids = torch.tensor([prompt + row])
        with torch.no_grad():
            logits = target(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # One unit in the last place of a bfloat16 logit below 32.
        assert (logits.amax(dim=1) - chosen).max() <= 0.125


def test_two_threads_take_turns_on_one_target(pair, prompts):

    target, draft = pair
    drafts, results = [draft, copy.deepcopy(draft)], {}

    def work(index):
        ids = torch.tensor([prompts[index]])
        results[index] = target.generate(ids, assistant_model=drafts[index], **GREEDY)[0, ids.shape[1] :].tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: alone(target, prompts[index]) for index in range(2)}
    assert target.config._attn_implementation == "sdpa"
