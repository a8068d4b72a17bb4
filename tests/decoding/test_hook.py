"""`target.generate(..., assistant_model=draft)`: the same tokens as without a draft, or a clear error before any work.

The pair under `fixtures/deepspec/trained` accepts most of its drafts, so acceptance, cut-off and rollback are all
exercised.
"""

import copy
import json
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from packaging.version import parse
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from hf_dspark import ConfidenceThreshold, DSparkConfig, DSparkDraftModel
from hf_dspark.decoding import call as generation
from hf_dspark.decoding import hook as generate_hook
from hf_dspark.decoding import install

EOS = 62


@pytest.fixture(scope="module")
def reference(fixtures):
    return json.loads((fixtures / "deepspec" / "trained" / "generation.json").read_text())


@pytest.fixture(scope="module")
def prompts(reference):
    return [torch.tensor([ids]) for ids in reference["prompts"]]


def assert_no_hooks(target):
    for module in target.modules():  # transformers keeps hooks of its own
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not [hook for hook in hooks if hook.__module__.startswith("hf_dspark")]


GREEDY = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0}
OPTIONS = {
    "default": {},
    "threshold": {"assistant_confidence_threshold": 0.6},
    "threshold_zero": {"assistant_confidence_threshold": 0.0},
    "one_draft": {"num_assistant_tokens": 1},
    "three_drafts": {"num_assistant_tokens": 3},
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


@pytest.fixture(params=[False, True], ids=["own", "transformers"])
def either_loop(request, pair):
    """Our loop, and transformers' own with the same drafting half: each is the other's oracle."""
    pair[1].use_transformers_loop = request.param
    yield
    pair[1].use_transformers_loop = False


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_output_is_identical_to_plain_generate(pair, prompts, options):
    target, draft = pair
    plain_options = {key: value for key, value in options.items() if "assistant" not in key}
    for prompt in prompts:
        plain = target.generate(prompt, **(GREEDY | plain_options))
        assisted = target.generate(prompt, assistant_model=draft, **(GREEDY | options))
        assert assisted.tolist() == plain.tolist()
    assert_no_hooks(target)


@pytest.mark.usefixtures("either_loop")
def test_accepted_end_of_sequence_is_counted_as_accepted_and_followed_by_no_bonus_token(pair, prompts):
    target, draft = pair
    ended_by_draft = 0
    for prompt in prompts:
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
def test_greedy_output_is_identical_with_draft_top_k(pair, prompts, top_k):
    target, draft = pair
    draft = copy.deepcopy(draft)
    draft.config.draft_top_k = top_k
    for options in ({}, {"repetition_penalty": 1.3}, {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 9]}):
        plain = target.generate(prompts[0], **GREEDY, **options)
        assert target.generate(prompts[0], assistant_model=draft, **GREEDY, **options).tolist() == plain.tolist()


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


def test_statistics_describe_the_call(pair, prompts):
    target, draft = pair
    ids = target.generate(prompts[0], assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    # One token comes from the prefill, each round adds its accepted drafts and one token of the target.
    assert ids.shape[1] - prompts[0].shape[1] == 1 + sum(stats.committed)
    assert sum(stats.committed) == sum(stats.accepted) + stats.rounds
    assert stats.tau == pytest.approx(1 + sum(stats.accepted) / stats.rounds)
    assert stats.proposed_at(1) >= stats.proposed_at(5) and stats.accepted_at(1) >= stats.accepted_at(5) > 0
    assert 0 < stats.acceptance_rate <= 1
    assert (
        stats.draft_seconds > 0 and stats.verify_seconds > 0 and stats.rest_seconds > 0 and stats.prefill_seconds > 0
    )


def test_padding_on_the_left_changes_nothing(pair, prompts):
    target, draft = pair
    prompt = prompts[1]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt], dim=1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones_like(prompt)], dim=1).long()
    plain = target.generate(prompt, assistant_model=draft, **GREEDY)
    accepted = draft.last_stats.accepted
    assisted = target.generate(padded, attention_mask=mask, assistant_model=draft, **GREEDY)
    assert assisted[0, 5:].tolist() == plain[0].tolist()
    assert draft.last_stats.accepted == accepted  # padding is no context for the draft either


@pytest.mark.usefixtures("either_loop")
def test_inputs_embeds_give_the_same_continuation_or_are_refused(pair, prompts):
    target, draft = pair
    embeds = target.get_input_embeddings()(prompts[0])
    if draft.use_transformers_loop and parse(transformers.__version__) < generate_hook.INPUTS_EMBEDS_SINCE:
        with pytest.raises(ValueError, match="inputs_embeds"):
            target.generate(inputs_embeds=embeds, assistant_model=draft, **GREEDY)
        return
    plain = target.generate(prompts[0], **GREEDY)[0, prompts[0].shape[1] :]
    assisted = target.generate(inputs_embeds=embeds, assistant_model=draft, **GREEDY)
    assert assisted[0].tolist() == plain.tolist()


def test_sampling_stops_exactly_at_the_first_eos_and_the_length_limit(pair, prompts):
    target, draft = pair
    for seed in range(12):
        torch.manual_seed(seed)
        ids = target.generate(
            prompts[0], assistant_model=draft, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=30,
            eos_token_id=[EOS, 5, 9], pad_token_id=0,
        )[0, prompts[0].shape[1] :].tolist()  # fmt: skip
        stops = [index for index, token in enumerate(ids) if token in (EOS, 5, 9)]
        assert len(ids) <= 30
        assert stops in ([], [len(ids) - 1])
        assert stops or len(ids) == 30


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9}, {"repetition_penalty": 1.2}]
)
def test_sampled_tokens_stay_in_the_processed_support(pair, prompts, options):
    """With return_dict, every returned token has a finite processed score: drafts cannot leave the allowed set."""
    target, draft = pair
    torch.manual_seed(0)
    output = target.generate(
        prompts[0], assistant_model=draft, do_sample=True, max_new_tokens=40, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    new_ids = output.sequences[0, prompts[0].shape[1] :]
    assert len(output.scores) == len(new_ids)
    assert all(scores[0, token] > -torch.inf for scores, token in zip(output.scores, new_ids, strict=True))
    assert sum(draft.last_stats.accepted) > 0


@pytest.mark.usefixtures("either_loop")
def test_returned_scores_and_hidden_states_are_those_of_plain_generate(pair, prompts):
    target, draft = pair
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    plain = target.generate(prompts[0], **GREEDY, **ask)
    assisted = target.generate(prompts[0], assistant_model=draft, **GREEDY, **ask)
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


def test_streamer_receives_every_token_once(pair, prompts):
    target, draft = pair
    streamer = Recorder()
    ids = target.generate(prompts[0], assistant_model=draft, streamer=streamer, **GREEDY)
    assert streamer.tokens == ids[0].tolist() and streamer.ended


def test_interruption_leaves_target_and_draft_usable(pair, prompts):
    target, draft = pair
    expected = target.generate(prompts[0], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompts[0], assistant_model=draft, streamer=Recorder(fail_after=30), **GREEDY)
    assert_no_hooks(target)
    assert generate_hook._active_generator.get() is None
    assert draft.last_stats.rounds > 0  # what had happened until then
    assert target.generate(prompts[0], assistant_model=draft, **GREEDY).tolist() == expected.tolist()


def test_other_assistants_keep_working(pair, prompts):
    target, _ = pair
    torch.manual_seed(0)
    small = Qwen3ForCausalLM(
        Qwen3Config(**(target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}))
    ).eval()
    plain = target.generate(prompts[0], **GREEDY)
    assert target.generate(prompts[0], assistant_model=small, **GREEDY).tolist() == plain.tolist()
    assert target.generate(prompts[0], prompt_lookup_num_tokens=3, **GREEDY).tolist() == plain.tolist()
    batch = torch.cat([prompts[0][:, :5], prompts[1][:, :5]])
    assert target.generate(batch, num_beams=2, **GREEDY).shape[0] == 2


def test_pipeline_accepts_the_draft(pair, prompts):
    from tokenizers import Tokenizer, models, pre_tokenizers

    target, draft = pair
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}", pad_token="w0")
    text = tokenizer.decode(prompts[0][0])
    ask = {"do_sample": False, "max_new_tokens": 20}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **ask)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)(text, **ask)
    assert assisted == plain


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_output_does_not_depend_on_the_dtype_of_the_draft(pair, prompts, draft_dtype):
    target, draft = pair
    draft = copy.deepcopy(draft).to(draft_dtype)
    plain = target.generate(prompts[0], **GREEDY)
    assert target.generate(prompts[0], assistant_model=draft, **GREEDY).tolist() == plain.tolist()
    assert draft.last_stats.tau > 2


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_target_commits_tokens_within_rounding_of_the_teacher_forced_maximum(pair, prompts, draft_dtype):
    target, draft = (copy.deepcopy(model) for model in pair)
    target, draft = target.to(torch.bfloat16), draft.to(draft_dtype)
    ids = target.generate(prompts[0], assistant_model=draft, **GREEDY)
    with torch.no_grad():
        logits = target(ids).logits[0, prompts[0].shape[1] - 1 : -1].float()
    chosen = logits.gather(1, ids[0, prompts[0].shape[1] :, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() < 0.15
    assert draft.last_stats.tau > 2


def test_target_with_offloaded_layers_gives_the_same_tokens(pair, prompts, fixtures, tmp_path):
    target, draft = pair
    plain = target.generate(prompts[0], **GREEDY)
    device_map = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    offloaded = AutoModelForCausalLM.from_pretrained(
        fixtures / "deepspec" / "trained" / "target", device_map=device_map, offload_folder=tmp_path
    )
    draft = DSparkDraftModel.from_pretrained(fixtures / "deepspec" / "trained" / "draft")
    assert offloaded.generate(prompts[0], assistant_model=draft, **GREEDY).tolist() == plain.tolist()


def test_target_with_offloaded_head_gives_the_same_tokens(make_target, make_draft):
    from accelerate import cpu_offload

    target = make_target()
    draft, prompt = make_draft(target), torch.tensor([[3, 9, 12, 30]])
    plain = target.generate(prompt, **GREEDY)
    cpu_offload(target.lm_head, execution_device=torch.device("cpu"))  # on the meta device between calls
    assert target.lm_head.weight.device.type == "meta"
    assert target.generate(prompt, assistant_model=draft, **GREEDY).tolist() == plain.tolist()


def test_target_with_offloaded_embedding_gives_the_same_tokens_in_our_loop_alone(make_target, make_draft):
    from accelerate import cpu_offload

    target, prompt = make_target(), torch.tensor([[3, 9, 12, 30]])
    draft = make_draft(target)
    plain = target.generate(prompt, **GREEDY)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.generate(prompt, assistant_model=draft, **GREEDY).tolist() == plain.tolist()
    draft.use_transformers_loop = True
    with pytest.raises(ValueError, match="embedding is offloaded"):
        target.generate(prompt, assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_target_commits_tokens_within_rounding_of_the_teacher_forced_maximum(
    fixtures, prompts, tmp_path, make_target, bits
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
    plain = target.generate(prompts[0], **GREEDY)
    ids = target.generate(prompts[0], assistant_model=draft, **GREEDY)
    # 8-bit kernels quantise activations too, and round one row and several differently.
    with torch.no_grad():
        logits = target(ids).logits[0, prompts[0].shape[1] - 1 : -1].float()
    chosen = logits.gather(1, ids[0, prompts[0].shape[1] :, None])[:, 0]
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


# --- refused before any work ---------------------------------------------------------------------------------------


class Counter(LogitsProcessor):
    """Allows a token more with every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[-1])


class Halve(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2


REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "no_cache": ({"use_cache": False}, "use_cache"),
    "static_cache_name": ({"cache_implementation": "static"}, "dynamic cache"),
    "stateful_processor": ({"logits_processor": LogitsProcessorList([Counter()])}, "Counter keeps state"),
    "cfg": ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
    "threshold_above_one": ({"assistant_confidence_threshold": 1.5}, r"\[0, 1\]"),
    "threshold_negative": ({"assistant_confidence_threshold": -0.1}, r"\[0, 1\]"),
    "no_drafts": ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_option_is_refused_by_name(pair, prompts, options, message):
    target, draft = pair
    with pytest.raises(ValueError, match=message):
        target.generate(prompts[0], assistant_model=draft, **(GREEDY | options))
    assert_no_hooks(target)


def test_stateless_custom_processor_is_accepted(pair, prompts):
    target, draft = pair
    processors = LogitsProcessorList([Halve()])
    plain = target.generate(prompts[0], logits_processor=processors, **GREEDY)
    assisted = target.generate(prompts[0], logits_processor=processors, assistant_model=draft, **GREEDY)
    assert assisted.tolist() == plain.tolist()


def test_empty_prompt_is_refused(pair):
    target, draft = pair
    with pytest.raises(ValueError):
        target.generate(torch.zeros(1, 0, dtype=torch.long), assistant_model=draft, **GREEDY)


def test_right_padding_is_refused(pair, prompts):
    target, draft = pair
    mask = torch.ones_like(prompts[0])
    mask[0, -2:] = 0
    with pytest.raises(ValueError, match="padding_side"):
        target.generate(prompts[0], attention_mask=mask, assistant_model=draft, **GREEDY)


def test_static_cache_object_is_refused(pair, prompts):
    target, draft = pair
    with pytest.raises(ValueError, match=r"[Ss]tatic"):
        target.generate(
            prompts[0],
            past_key_values=StaticCache(config=target.config, max_cache_len=128),
            assistant_model=draft,
            **GREEDY,
        )


def test_threshold_without_confidence_head_is_refused(pair, prompts):
    target, _ = pair
    config = DSparkConfig.from_target(target.config, markov_rank=4, enable_confidence_head=False)
    draft = DSparkDraftModel(config)
    with pytest.raises(ValueError, match="confidence head"):
        target.generate(prompts[0], assistant_model=draft, assistant_confidence_threshold=0.5, **GREEDY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 80}, "vocab_size"),
        ({"hidden_size": 32}, "hidden_size"),
        ({"num_hidden_layers": 5}, "num_target_layers"),
    ],
)
def test_draft_of_another_target_is_refused(pair, prompts, change, message):
    target, draft = pair
    other = Qwen3ForCausalLM(Qwen3Config(**(target.config.to_dict() | change | {"layer_types": None})))
    with pytest.raises(ValueError, match=message):
        other.generate(prompts[0], assistant_model=draft, **GREEDY)


def test_encoder_decoder_target_is_refused(pair):
    _, draft = pair
    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(torch.tensor([[1, 2, 3]]), assistant_model=draft, max_new_tokens=4)


# --- the hook itself -----------------------------------------------------------------------------------------------


def test_wrapped_methods_have_the_parameters_that_are_used():
    import inspect

    for name, parameters in install.WRAPPED_PARAMETERS.items():
        assert set(parameters) <= set(inspect.signature(getattr(GenerationMixin, name)).parameters)


def test_installing_twice_wraps_once():
    before = GenerationMixin._assisted_decoding
    install.install()
    assert GenerationMixin._assisted_decoding is before


def test_draft_without_the_import_gets_transformers_own_explanation(tmp_path, pair):
    pair[1].save_pretrained(tmp_path)
    program = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "dspark" in result.stderr
    result = subprocess.run(
        [sys.executable, "-c", "import hf_dspark; " + program], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


# ---- surroundings


def test_foreign_default_device_changes_nothing(pair, prompts):
    target, draft = pair
    batch = torch.cat([prompts[0][:, :3], prompts[1][:, :3]])
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 0}
    draft.policy = ConfidenceThreshold(0.5)
    ways = [(prompts[0], GREEDY | {"eos_token_id": 63}), (batch, GREEDY), (batch, sampled)]

    def run():
        torch.manual_seed(0)
        return [target.generate(ids, assistant_model=draft, **options).tolist() for ids, options in ways]

    here = run()
    try:
        torch.set_default_device("meta")  # where nothing can be computed
        there = run()
    finally:
        torch.set_default_device(None)
        draft.policy = None
    assert there == here


def test_limit_that_nobody_means_takes_no_memory(pair, prompts):
    target, draft = pair
    plain = target.generate(prompts[0], do_sample=False, max_new_tokens=30, pad_token_id=0)
    end = int(plain[0, -1])
    options = {"do_sample": False, "max_new_tokens": 10**13, "eos_token_id": end, "pad_token_id": 0}
    expected = target.generate(prompts[0], **options)
    assert target.generate(prompts[0], assistant_model=draft, **options).tolist() == expected.tolist()


def test_room_for_tokens_grows(pair, prompts, monkeypatch):
    monkeypatch.setattr(generation, "ROOM_AT_FIRST", 2)
    target, draft = pair
    plain = target.generate(prompts[0], **GREEDY)
    assert target.generate(prompts[0], assistant_model=draft, **GREEDY).tolist() == plain.tolist()


class WithModel(LogitsProcessor):
    """A processor or criterion that holds something large."""

    def __init__(self, held):
        self.held, self.calls = held, []

    def __call__(self, input_ids, scores, **kwargs):
        return scores


def test_copies_of_users_objects_share_models():
    held = torch.nn.Linear(2, 2)
    copied = generation.copy_of(WithModel(held))
    assert copied.held is held and copied.calls is not copied.held


def test_processor_that_cannot_be_copied_is_named(pair, prompts):
    target, draft = pair
    with pytest.raises(ValueError, match="WithModel cannot be copied .*: give it a __deepcopy__"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY, logits_processor=[WithModel(threading.Lock())])
