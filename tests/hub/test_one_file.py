"""The one file that a repository carries: a second implementation of the method, compared with the package and with
plain decoding. Its output distribution is enumerated through its own `generate`."""

import ast
import importlib.util
import itertools
import math
import sys

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.dynamic_module_utils import get_imports

from hf_dspark import ConfidenceThreshold, DecodingOptions, DSparkConfig, DSparkDraftModel, FullBlock
from hf_dspark.hub.repository import DECODER
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling.distributions import TokenDistribution
from hf_dspark.scheduling.calibration import calibrated_confidence
from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.support import TargetSupport
from tests.distributions import ROUNDING, Paths, TargetDistribution, total_variation
from tests.features import new_context
from tests.rows import Notes
from tests.samplers import ChainSampler
from tests.targets.test_model_types import EACH_TYPE, PLAIN, PROMPTS, make_pair

PROMPT = torch.tensor([[3, 9, 12, 30]])
GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": DFLASH,
    "dflash_fill_in": DFLASH | {"sample_from_anchor": False},
    "rnn_fill_in": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "confidence_of_hidden_alone": {"confidence_head_with_markov": False},
    "calibrated": {"sts_temperatures": {"default": [0.5, 1.0, 1.5, 2.0], "greedy": [2.0, 0.5, 1.0, 1.5]}},
    "fits": {"confidence_fits": {"default": [[1.0, 0.0]] * 4, "sampled": [[0.5, -1.0], [2.0, 1.0]] * 2}},
    "pruned": {"draft_vocab_size": 20},
    "own_ends": {"own_embedding": True, "own_lm_head": True, "embedding_scale": 3.0},
    "gemma": {"sandwich_norms": True, "value_norm": True, "layer_scalar": True, "attention_scaling": 1.0},
    "shared_values": {"attention_k_eq_v": True, "qk_norm": False, "attention_bias": True, "mlp_bias": True},
    "scaled": {"embedding_scale": 3.0, "logit_scale": 0.5, "final_logit_softcapping": 5.0},
    "sliding": SLIDING,
    "sliding_from_anchor": SLIDING | {"sliding_from_anchor": True},
    "sliding_causal": SLIDING | {"causal_sliding": True},
    "interleaved": {"rope_interleaved": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "partial_rotary": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}  # fmt: skip


@pytest.fixture(scope="module")
def one_file():
    """The file as a module of its own, as transformers would load it."""
    spec = importlib.util.spec_from_file_location("someones_repository.generate", DECODER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def copied(one_file, tmp_path):
    """Load one of the package's drafts with the file's own class."""

    def load(draft):
        draft.save_pretrained(tmp_path)
        return one_file.DSparkDraftModel.from_pretrained(tmp_path).eval()

    return load


def test_file_is_short_and_imports_transformers_torch_and_the_standard_library_alone():
    lines, imported = DECODER.read_text().splitlines(), set()
    assert len(lines) <= 500 and max(map(len, lines)) <= 119
    for node in ast.walk(ast.parse(DECODER.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers", "hf_dspark"}
    assert "hf_dspark" not in get_imports(DECODER)  # transformers would demand what is there


def package_block(draft, ids, features, cache):
    """Draft arg-max tokens with the package; returns them, their distributions and the raw confidence."""

    class Dense(ChainSampler):
        def draw(self, logits, candidate_ids):
            distribution = TokenDistribution(logits.softmax(-1), candidate_ids).dense(draft.config.vocab_size)
            return distribution.probs.argmax(-1), distribution

    return draft.draft_block(new_context(ids[0, -1:], features, cache), Dense())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS)
def test_blocks_are_those_of_the_package(one_file, copied, make_target, make_draft, monkeypatch, facts):
    """Two blocks one after the other: distributions and confidences agree, so caches, positions and masks do."""
    target = make_target()
    draft = make_draft(target, **facts)
    copy, cache, own_cache = copied(draft), SlotCache(), one_file.DynamicCache()
    rule = one_file.TokenRule(LogitsProcessorList(), do_sample=True)
    monkeypatch.setattr(rule, "draw", lambda distribution: distribution.argmax(-1, keepdim=True))
    confidences = []
    monkeypatch.setattr(
        copy, "confidence", lambda *args: confidences.append(type(copy).confidence(copy, *args)) or 1.0
    )
    ids = torch.randint(48, (1, 16))
    with FeatureCapture(TargetSupport.of(target), draft.config.target_layer_ids) as capture, torch.no_grad():
        target(ids)
        features = capture.take(draft.device, draft.dtype)
    for seen in (slice(0, 9), slice(9, 15)):
        prefix = ids[:, : seen.stop + 1]
        theirs = package_block(draft, prefix, features[:, seen], cache)
        with torch.no_grad():
            hidden = copy.hidden_block(target, prefix[0, -1:], features[:, seen], own_cache)
            logits = copy.base_logits(target, hidden[-4:])
            threshold = 0.5 if draft.config.enable_confidence_head else None
            tokens, distributions = copy.draw_block(prefix, hidden, logits, rule, threshold)
        assert torch.cat(tokens).tolist() == theirs.token_ids[0].tolist()
        torch.testing.assert_close(torch.stack(distributions), theirs.distribution.probs[0], atol=1e-5, rtol=1e-4)
        if threshold is not None:
            fits = draft.config.confidence_fits_for(None, True)
            expected = calibrated_confidence(theirs.confidence_logits[0], fits)
            torch.testing.assert_close(torch.tensor(confidences[-4:]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cut", [{}, {"assistant_confidence_threshold": 0.5}, {"num_assistant_tokens": 2}], ids=str)
def test_trained_pair_takes_the_rounds_of_the_package(one_file, copied, pair, cut):
    """The same tokens as plain decoding, and the same drafts and acceptance as the package, round by round."""
    target, draft = pair
    policy = ConfidenceThreshold(0.5) if "assistant_confidence_threshold" in cut else FullBlock()
    draft.decoding = DecodingOptions(policy=policy)
    copy, plain = copied(draft), target.generate(PROMPT, **GREEDY)
    assert target.generate(PROMPT, assistant_model=draft, **cut, **GREEDY).equal(plain)
    assert one_file.generate(target, assistant_model=copy, inputs=PROMPT, **cut, **GREEDY).equal(plain)
    proposed, accepted = zip(*copy.rounds, strict=True)
    ours = draft.last_stats.proposed, draft.last_stats.accepted
    assert list(proposed)[:-1] == ours[0][:-1] and list(accepted)[:-1] == ours[1][:-1]
    assert sum(accepted) > len(accepted) and len(set(accepted)) > 2  # accepted drafts, and rollbacks


def knowing_the_answer(monkeypatch, copy, answer):
    """Let every block be the true continuation, with an error at a slot that differs from block to block."""

    def draw_block(ids, hidden, logits, rule, threshold):
        start, vocab_size = ids.shape[1], logits.shape[-1]
        drafts = answer[start : start + len(logits)].clone()
        if (slot := (start * 3) % 7) < len(drafts):
            drafts[slot] = (drafts[slot] + 1) % vocab_size
        return list(drafts[:, None]), list(torch.nn.functional.one_hot(drafts, vocab_size).float())

    monkeypatch.setattr(copy, "draw_block", draw_block)


@pytest.mark.one_in(11)
@EACH_TYPE
def test_kinds_of_targets_are_decoded_as_without_a_draft(one_file, copied, monkeypatch, model_type, facts):
    """Sliding windows, latent attention, sinks, learnt positions, mixtures of experts: rolled back exactly."""
    target, draft = make_pair(model_type, facts)
    copy, ids = copied(draft), torch.tensor([PROMPTS[0]])
    plain = target.generate(ids, **PLAIN)
    knowing_the_answer(monkeypatch, copy, plain[0])
    output = one_file.generate(target, assistant_model=copy, inputs=ids, return_dict_in_generate=True, **PLAIN)
    assert output.sequences.equal(plain)
    assert len({accepted for _, accepted in copy.rounds}) >= 2
    assert output.past_key_values.get_seq_length() == plain.shape[1] - 1
    with torch.no_grad():
        whole = target(plain[:, :-1], past_key_values=one_file.DynamicCache(), use_cache=True).past_key_values
    for rolled_back, fresh in zip(output.past_key_values.layers, whole.layers, strict=True):
        torch.testing.assert_close(rolled_back.keys, fresh.keys, atol=1e-4, rtol=1e-4)


def enumerated_distribution(monkeypatch, one_file, decode):
    """Run `decode` along every path of its draws and uniforms; returns the exact distribution of what it returns."""
    distribution, paths = {}, Paths()

    def happens(self, probability):
        return paths.choose([1.0 - probability.item(), probability.item()]) == 1

    monkeypatch.setattr(one_file.TokenRule, "happens", happens)
    monkeypatch.setattr(one_file.TokenRule, "draw", lambda self, probs: torch.tensor([paths.choose(probs.double())]))
    for path in paths:
        output = tuple(decode()[0].tolist())
        distribution[output] = distribution.get(output, 0.0) + path.probability
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-6)
    return distribution


@pytest.fixture
def distance(one_file, copied, make_target, monkeypatch):
    """Return the distance between the file's distribution and the target's, for a draft far from the target."""

    def measure(vocab_size=2, new_tokens=4, spoil=None, processors=(), options=(), **facts):
        target = make_target(vocab_size=vocab_size, num_hidden_layers=2, pad_token_id=None)
        facts = {"num_hidden_layers": 1, "block_size": 2, "markov_rank": 4, "mask_token_id": 0} | facts
        draft = DSparkDraftModel(DSparkConfig.from_target(target.config, **facts))
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.normal_(0.0, 0.8)
        copy, prompt = copied(draft), torch.tensor([[0, 1, 1, 0]])
        if spoil is not None:
            spoil(copy)
        call = {"do_sample": True, "top_k": 0, "max_new_tokens": new_tokens, "pad_token_id": 0, **dict(options)}
        call |= {"inputs": prompt, "attention_mask": torch.ones_like(prompt)}
        found = enumerated_distribution(
            monkeypatch, one_file, lambda: one_file.generate(target, assistant_model=copy, **call)[:, 4:]
        )
        after = TargetDistribution(target, LogitsProcessorList(processors), prompt)
        expected = {
            tokens: math.prod(after(tokens[:place])[token].item() for place, token in enumerate(tokens))
            for tokens in itertools.product(range(vocab_size), repeat=new_tokens)
        }
        return total_variation(found, expected)

    return measure


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash", "rnn_fill_in"])
def test_sampling_follows_the_target_distribution_exactly(distance, kind):
    assert distance(**KINDS[kind]) < ROUNDING


def test_sampling_follows_the_target_distribution_with_three_tokens_and_processors(distance):
    warpers = [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]
    assert distance(3, 3, processors=warpers, options={"temperature": 0.7, "top_p": 0.9}) < ROUNDING


def test_sampling_follows_the_target_distribution_when_a_threshold_cuts(distance):
    lengths = set()

    def watch(copy):
        draw_block = copy.draw_block

        def watched(*args):
            drafts, distributions = draw_block(*args)
            lengths.add(len(drafts))
            return drafts, distributions

        copy.draw_block = watched

    assert distance(options={"assistant_confidence_threshold": 0.5}, spoil=watch) < ROUNDING
    assert 2 in lengths and len(lengths) > 1  # cut, and not cut


def test_enumeration_catches_rejected_drafts_replaced_from_the_whole_distribution(distance, monkeypatch, one_file):
    def verify(self, draft, p_t, p_d):
        kept = self.happens((p_t[draft] / p_d[draft]).clamp(max=1.0))
        return (draft if kept else self.draw(p_t)), kept

    monkeypatch.setattr(one_file.TokenRule, "verify", verify)
    assert distance(new_tokens=3) > 0.01


def test_enumeration_catches_a_cut_that_looks_at_its_own_token(distance):
    def spoil(copy):
        draw_block = copy.draw_block

        def before_token_one(*args):
            drafts, distributions = draw_block(*args)
            kept = len(list(itertools.takewhile(lambda token: token.item() != 1, drafts)))
            return drafts[:kept], distributions[:kept]

        copy.draw_block = before_token_one

    assert distance(new_tokens=3, spoil=spoil) > 0.01


class Counting(LogitsProcessor):
    """Forbids a token that depends on how often it was called: right only if called as in plain decoding."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, (self.calls * 7) % scores.shape[-1]] = -torch.inf
        return scores


class EndsAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 17])


def test_stateful_processors_criteria_end_tokens_and_streamers_work_as_in_plain_decoding(one_file, copied, pair):
    target, draft = pair
    copy, whole = copied(draft), target.generate(PROMPT, **GREEDY)
    calls = (
        lambda: {"logits_processor": LogitsProcessorList([Counting()])},
        lambda: {"stopping_criteria": StoppingCriteriaList([EndsAt()])},
        lambda: {"eos_token_id": whole[0, 20].item()},
        lambda: {"repetition_penalty": 1.3, "min_new_tokens": 6},
    )
    for call in calls:
        streamer, plain = Notes(), target.generate(PROMPT, **GREEDY | call())
        ours = one_file.generate(target, assistant_model=copy, streamer=streamer, inputs=PROMPT, **GREEDY | call())
        assert ours.equal(plain) and streamer.tokens == [*plain[0].tolist(), "end"]


def test_stop_strings_end_the_answer(one_file, copied, pair, tokenizer):
    target, copy = pair[0], copied(pair[1])
    stop = tokenizer.decode(target.generate(PROMPT, **GREEDY)[0, 13:15])
    call = GREEDY | {"tokenizer": tokenizer, "stop_strings": stop}
    plain = target.generate(PROMPT, **call)
    assert plain.shape[1] < 44 and one_file.generate(target, assistant_model=copy, inputs=PROMPT, **call).equal(plain)
    with pytest.raises(ValueError, match="need the target's tokenizer"):
        one_file.generate(target, assistant_model=copy, inputs=PROMPT, **call | {"tokenizer": None})


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ({"inputs": PROMPT.expand(2, -1)}, "batches, and got 2 sequences"),
        ({"do_sample": True, "num_return_sequences": 2}, "batches"),
        ({"num_beams": 2}, "'beam_search'"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padded prompts"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_file_leaves_to_the_package_is_refused_with_the_cure(one_file, copied, pair, call, what):
    target, draft = pair
    with pytest.raises(ValueError, match=f"does not support .*{what}.*hf_dspark from a checkout"):
        one_file.generate(target, assistant_model=copied(draft), **{"inputs": PROMPT} | GREEDY | call)


def test_drafts_and_cut_offs_that_do_not_fit_are_refused(one_file, copied, pair, make_target, make_draft):
    target = make_target()
    draft = copied(make_draft(target, **DFLASH))
    for message, call in {
        "was made for a target of vocabulary": {"model": pair[0]},
        "has no confidence head": {"assistant_confidence_threshold": 0.5},
        r"a threshold lies in \[0, 1\]": {"assistant_confidence_threshold": 1.5},
        "drafts are 1 or more": {"num_assistant_tokens": 0},
        "drafts of the type 'qwen3'": {"assistant_model": target},
        "where is the draft": {"assistant_model": None},
    }.items():
        with pytest.raises(ValueError, match=message):
            one_file.generate(**{"model": target, "assistant_model": draft, "inputs": PROMPT} | GREEDY | call)


LONGROPE = {"rope_type": "longrope", "long_factor": [1.0], "original_max_position_embeddings": 10}


@pytest.mark.parametrize(
    ("of_target", "of_draft", "what"),
    [
        ({"rope_parameters": LONGROPE}, {}, "an answer within which rotary frequencies switch"),
        ({"rope_parameters": {"full_attention": LONGROPE}}, {}, "an answer within which rotary frequencies switch"),
        ({"layer_types": ["full_attention", "conv"]}, {}, "targets with a recurrent state"),
        ({}, {"attention_sinks": True}, "drafts with attention sinks"),
    ],
)
def test_what_would_decode_wrongly_is_refused(one_file, copied, pair, monkeypatch, of_target, of_draft, what):
    target, draft = pair[0], copied(pair[1])
    for config, changes in ((target.config, of_target), (draft.config, of_draft)):
        for name, value in changes.items():
            monkeypatch.setattr(config, name, value, raising=False)
    with pytest.raises(ValueError, match=f"does not support {what}"):
        one_file.generate(target, assistant_model=draft, inputs=PROMPT, **GREEDY)


def test_answers_on_one_side_of_a_switch_are_decoded(one_file, copied, pair, monkeypatch):
    target, draft = pair[0], copied(pair[1])
    plain = target.generate(PROMPT, **GREEDY)
    for switch in (3, 43):  # before the prompt's end, and where no pass reads it
        rope = LONGROPE | {"original_max_position_embeddings": switch}
        monkeypatch.setattr(target.config, "rope_parameters", rope)
        assert one_file.generate(target, assistant_model=draft, inputs=PROMPT, **GREEDY).equal(plain)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True])
def test_numbers_that_overflow_are_not_drafted_from(one_file, copied, make_target, make_draft, do_sample):
    target = make_target()
    draft = copied(make_draft(target))
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[:24] = torch.nan
    call = GREEDY | {"do_sample": do_sample, "top_k": 1}
    output = one_file.generate(target, assistant_model=draft, inputs=PROMPT, **call)
    assert output.equal(target.generate(PROMPT, **call))
    assert {0} < {proposed for proposed, _ in draft.rounds}


def test_drafts_end_where_a_table_of_positions_does(one_file, copied):
    target = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=16, n_embd=8, n_layer=2, n_head=1)).eval()
    config = DSparkConfig.from_target(target.config, target_layer_ids=[0], block_size=7, num_hidden_layers=1)
    end = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= 15])])
    call = GREEDY | {"max_new_tokens": 20, "stopping_criteria": end}
    output = one_file.generate(target, assistant_model=copied(DSparkDraftModel(config).eval()), inputs=PROMPT, **call)
    assert output.equal(target.generate(PROMPT, **call))
