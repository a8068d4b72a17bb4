"""Every way to decode, measure and train on an accelerator does what it does on the CPU, seen without one: see
`pretended`."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import attach_align_device_hook_on_blocks
from transformers import TrainingArguments

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    DSparkTrainer,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    PromptLookup,
    Scheduler,
    ThroughputTable,
    calibrate,
    check_target,
    decode_with,
    evaluate,
    generate_many,
    profile_throughput,
    regenerate,
)
from hf_dspark.models.modeling_dspark import DSparkLayer
from tests.hybrids import HAVE_PROTOCOL, build, known
from tests.rows import padded
from tests.training.tiny import KINDS, tiny_arguments, tiny_pair, tiny_rows

from .pretended import CPU, DEVICE, SECOND, Counts, Pretended, moved

PROMPTS = [[5, 9, 30, 2, 7], [3, 8], [11, 12, 13, 14, 15, 16, 17, 18]]
COST = ThroughputTable((1, 8, 64), (95, 94, 80))
TREES = Scheduler(num_nodes=15)
GREEDY, DRAWN = {"do_sample": False}, {"do_sample": True, "top_k": 0}
CUT = {"do_sample": True, "top_k": 20, "top_p": 0.9}
POLICIES = {
    "whole blocks": FullBlock(),
    "threshold": ConfidenceThreshold(0.5),
    "chains": Scheduler(COST, trees=False),
    "lagged": Scheduler(COST, trees=False, lag=2),
    "limited": Scheduler(COST, trees=False, tpot_seconds=0.03),
    "trees of 15": TREES,
    "trees": Scheduler(COST, trees=True),
}
RECORDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
OPTIONS = {
    "records": RECORDS,
    "penalty": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "forbidden": {"suppress_tokens": [5], "bad_words_ids": [[7], [8, 9]], "min_new_tokens": 4, "eos_token_id": 62},
    "typical": {**DRAWN, "typical_p": 0.9, "min_p": 0.01},
    "several": {**CUT, "num_return_sequences": 2},
}


def there(value, place=DEVICE):
    """Return tensors, and those in a dictionary, on a device."""
    return {name: each.to(place) for name, each in value.items()} if isinstance(value, dict) else value.to(place)


@pytest.fixture(scope="module")
def pairs(pair):
    """The trained pair on the CPU and on the device."""
    return {CPU: pair, DEVICE: [moved(copy.deepcopy(model)) for model in pair]}


def tensors_of(output) -> list[torch.Tensor]:
    """Return all tensors of what `generate()` returned, except those of its cache."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = [output[name] for name in ("sequences", "scores", "logits", "hidden_states") if name in output]
    flat = []
    while parts:
        part = parts.pop(0)
        parts = [*part, *parts] if isinstance(part, tuple) else parts
        flat += [] if isinstance(part, tuple) else [part]
    return flat


def assert_same(found, expected):
    """Compare what a device gave with what the CPU gave: the same tokens, and the same numbers up to rounding."""
    found, expected = tensors_of(found), tensors_of(expected)
    assert {each.device for each in found} == {DEVICE}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)  # products may depend on the address


def decode(target, draft, place, rows=1, policy=None, **options):
    """Return what `generate()` does with so many of the prompts."""
    if policy is not None:
        draft.decoding = DecodingOptions(policy=policy)
    torch.manual_seed(0)
    options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None} | options
    return target.generate(**there(padded(PROMPTS[-rows:]), place), assistant_model=draft, **options)


def assert_alike(call):
    """Compare what a call, given the device, yields on the CPU with what it yields there."""
    expected = list(call(CPU))
    with Pretended():
        for found, one in zip(call(DEVICE), expected, strict=True):
            assert_same(found, one)


def assert_decodes_alike(models, **options):
    """Decode on the CPU, move the models, and decode again."""
    expected = decode(*models, CPU, **options)
    with Pretended():
        assert_same(decode(*[moved(copy.deepcopy(model)) for model in models], DEVICE, **options), expected)


# ---- the pretended devices themselves


def test_devices_do_not_mix():
    with Pretended():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        other = here.to(SECOND)
        assert there.device == DEVICE and here.device == there.cpu().device == CPU and other.device == SECOND
        for mixing in (
            lambda: torch.cat([there, here]),
            lambda: there + here,
            lambda: there + other,
            lambda: here[there.long()],
            lambda: there[other.long()],
            lambda: there.index_put_((torch.tensor([0, 1]),), here[:2]),
            lambda: torch.where(there > 0, there, here),
            lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()).multinomial(1) + here,
        ):
            with pytest.raises(RuntimeError, match="device"):
                mixing()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1.0)).device == (there + here.to(there)).device == DEVICE
        assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]
        assert there.to(SECOND).to("cuda:1").device == there.to(1).device == SECOND


def test_launches_copies_and_waits_are_counted():
    counts = Counts()
    with Pretended(counts):
        numbers = torch.tensor([3.0, -1.0, 2.0], device=DEVICE)
        assert (counts.launches, counts.copies, counts.waits.total()) == (0, 1, 1)
        torch.tensor([1.0]).to(DEVICE, non_blocking=True)
        numbers[1:].relu().softmax(dim=-1)  # a view and two operations
        assert (counts.launches, counts.copies, counts.waits.total()) == (2, 2, 1)
        for waiting in (
            lambda: numbers.tolist(),
            lambda: numbers.cpu(),
            lambda: bool(numbers[0] > 0),
            lambda: float(numbers.sum()),
            lambda: numbers[numbers > 0],
            lambda: numbers.nonzero(),
            lambda: numbers[[0, 2]],
            lambda: torch.equal(numbers, numbers),
        ):
            before = counts.waits.total()
            waiting()
            assert counts.waits.total() == before + 1


# ---- decoding


@pytest.mark.one_in(11)
@pytest.mark.parametrize("how, rows", [(GREEDY, 3), (DRAWN, 1), (CUT, 3)], ids=["greedy", "drawn", "cut"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_decode_the_same_tokens(pairs, policy, how, rows):
    assert_alike(lambda place: [decode(*pairs[place], place, rows, policy, **how)])


@pytest.mark.one_in(9)
@pytest.mark.parametrize("policy", [FullBlock(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_a_call_do_the_same(pairs, options, policy):
    assert_alike(lambda place: [decode(*pairs[place], place, 2, policy, **GREEDY | options)])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "facts",
    [
        KINDS["gated"][0] | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        KINDS["fill-in"][0],
        KINDS["pruned"][0] | {"draft_top_k": 8},
        KINDS["dflash"][0] | {"draft_top_k": 8},
    ],
    ids=["gated", "fill-in", "pruned", "dflash"],
)
@pytest.mark.parametrize("policy, how", [(FullBlock(), CUT), (TREES, DRAWN)], ids=["chains", "trees"])
def test_drafts_of_all_kinds_decode_the_same_tokens(make_target, make_draft, facts, policy, how):
    target = make_target()
    assert_decodes_alike((target, make_draft(target, **facts)), rows=2, policy=policy, **how)


def test_an_autoregressive_draft_decodes_the_same_tokens(make_target):
    target = make_target()
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config)).eval()
    assert_decodes_alike((target, draft), rows=2, policy=FullBlock(), **CUT)


@pytest.mark.one_in(4)
@pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_mamba", "recurrent_gemma", "lfm2"])
def test_recurrent_targets_decode_the_same_tokens(make_draft, family):
    if not known(family):
        pytest.skip("needs a later transformers")
    target = build(family)
    # Some refuse padding.
    assert_decodes_alike((target, make_draft(target)), num_return_sequences=2, policy=FullBlock(), **DRAWN)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_prompt_lookup_decodes_the_same_tokens(pairs, how):
    assert_alike(lambda place: [decode(pairs[place][0], PromptLookup(pairs[place][0]), place, 2, **how)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [GREEDY, CUT], ids=["greedy", "cut"])
def test_transformers_loop_decodes_the_same_tokens(pairs, how):
    def call(place):
        target, draft = pairs[place]
        draft.decoding = DecodingOptions(use_transformers_loop=True)
        yield decode(target, draft, place, **how)

    assert_alike(call)


def test_other_doors_lead_to_the_same_tokens(pairs, tokenizer):
    def calls(place):
        (target, draft), prompt = pairs[place], there(torch.tensor(PROMPTS[:1]), place)
        draft.decoding = DecodingOptions()
        options = GREEDY | {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
        yield target.generate(prompt, custom_generate=decode_with(draft), **options)
        embeds = target.get_input_embeddings()(prompt).detach()
        yield target.generate(inputs_embeds=embeds, assistant_model=draft, **options)
        yield target.generate(prompt, assistant_model=draft, stop_strings=["q"], tokenizer=tokenizer, **options)
        yield target.generate(prompt, assistant_model=target, **options)  # transformers' own kind of assistant

    assert_alike(calls)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy, how", [(FullBlock(), GREEDY), (TREES, DRAWN)], ids=["chains", "trees"])
def test_conversations_go_on_with_the_same_tokens(pairs, policy, how):
    def turns(place):
        target, draft = pairs[place]
        first = decode(target, draft, place, 2, policy, return_dict_in_generate=True, **how)
        rows = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
        mask = torch.ones_like(rows)
        mask[0, : len(PROMPTS[2]) - len(PROMPTS[1])] = 0
        options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
        inputs = {"attention_mask": mask, **options, **how}
        plain = first.past_key_values.to_dynamic_cache()
        yield target.generate(rows, past_key_values=first.past_key_values, assistant_model=draft, **inputs)
        yield target.generate(rows, past_key_values=plain, assistant_model=draft, **inputs)

    assert_alike(turns)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy, how", [(FullBlock(), GREEDY), (TREES, DRAWN)], ids=["chains", "trees"])
def test_queues_give_the_same_answers(pairs, policy, how):
    def answers(place):
        target, draft = pairs[place]
        draft.decoding = DecodingOptions(policy=policy)
        torch.manual_seed(0)
        options = how | {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, "progress": False}
        done = generate_many(target, draft, [*PROMPTS, *PROMPTS[:1]], batch_size=2, **options)
        return {each.index: each.token_ids.tolist() for each in done}

    expected = answers(CPU)
    with Pretended():
        assert answers(DEVICE) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "policy, how, place", [(FullBlock(), DRAWN, SECOND), (TREES, GREEDY, DEVICE)], ids=["chains", "trees"]
)
def test_a_target_on_two_devices_decodes_the_same_tokens(pair, policy, how, place):
    """With a draft that is where the first layers are, or where embedding and head are not."""
    target, draft = pair
    options = RECORDS | how | {"rows": 2, "policy": policy}
    expected = decode(target, draft, CPU, **options)
    target, draft = copy.deepcopy(target), copy.deepcopy(draft)
    moved(draft, {name: place for name, _ in draft.named_children()})
    places = {f"model.layers.{index}": SECOND if index else DEVICE for index in range(len(target.model.layers))}
    places |= {"model.embed_tokens": DEVICE, "model.rotary_emb": DEVICE, "model.norm": SECOND, "lm_head": DEVICE}
    with Pretended():
        moved(target, places)
        kept = dict.fromkeys(places, False)
        attach_align_device_hook_on_blocks(target, execution_device=places | {"": DEVICE}, offload=kept)
        target.hf_device_map = places
        found = decode(target, draft, DEVICE, **options)
        for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert torch.allclose(one.cpu(), other, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy, how", [(FullBlock(), DRAWN), (TREES, CUT)], ids=["chains", "trees"])
def test_a_draft_that_was_left_on_the_cpu_is_named_and_decodes_the_same_tokens(pairs, policy, how):
    expected = decode(*pairs[CPU], CPU, 2, policy, **how)
    with Pretended(), pytest.warns(UserWarning, match="the draft is on the CPU, the target on cuda:0"):
        assert_same(decode(pairs[DEVICE][0], copy.deepcopy(pairs[CPU][1]), DEVICE, 2, policy, **how), expected)


# ---- measuring


@pytest.fixture
def driver(monkeypatch):
    """What is asked of the driver of a real device."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
@pytest.mark.filterwarnings("ignore")
def test_measurements_find_the_same(pair, tokenizer, tmp_path):
    def found(target, draft, folder):
        options = {"max_new_tokens": 8, "pad_token_id": 0}
        yield check_target(target)
        for do_sample in (False, True):
            report = calibrate(target, draft, PROMPTS, do_sample=do_sample, **options)
            yield report.mean_ece
        texts = {"a": ["Hello", "Who?"]}
        result = evaluate(
            target, draft, texts, tokenizer, compare_plain=True, batch_size=2, do_sample=False, **options
        )
        yield result.metrics["a"].tau
        regenerate(target, PROMPTS, tokenizer, folder / "answers.jsonl", draft, **options)
        yield (folder / "answers.jsonl").read_text()
        profile = profile_throughput(target, draft, (1, 2), (16, 32), repetitions=1, cache=False)
        yield profile.table.verify_tokens

    folders = tmp_path / "cpu", tmp_path / "device"
    for folder in folders:
        folder.mkdir()
    expected = list(found(*map(copy.deepcopy, pair), folders[0]))
    with Pretended():
        models = [moved(copy.deepcopy(model)) for model in pair]
        for one, other in zip(found(*models, folders[1]), expected, strict=True):
            assert one == other


# ---- training


@pytest.mark.parametrize(
    "kind, cached",
    [
        ("dspark", True),
        ("eagle3", False),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("dspark", "fill-in", "pruned", "packed")),
    ],
)
def test_training_steps_have_the_same_losses(kind, cached, tmp_path, monkeypatch):
    def losses(place):
        target, draft = tiny_pair(kind)
        folder = tmp_path / place.type
        states = str(folder / "states") if cached else None
        arguments = tiny_arguments(str(folder), kind, max_steps=2, feature_cache_dir=states)
        trainer = DSparkTrainer(draft, target, arguments, train_dataset=tiny_rows(6))
        trainer.train()
        assert {each.device for each in draft.parameters()} == {place}
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(CPU)
    for owner in (TrainingArguments, Accelerator):
        monkeypatch.setattr(owner, "device", property(lambda _: DEVICE))
    with Pretended():
        assert losses(DEVICE) == pytest.approx(expected, rel=1e-5)


# ---- what a round asks of the device

# Launches, copies to the device and waits of a round at most, for one row.
QUICK = ("chain, greedy", "tree of 15, drawn")
LIMITS = {
    "chain, greedy": (FullBlock(), GREEDY, 254, 1, 1),
    "chain, drawn": (FullBlock(), DRAWN, 303, 4, 1),
    "chain, drawn by top-k and top-p": (FullBlock(), CUT, 361, 4, 1),
    "chain, cut by confidences": (ConfidenceThreshold(0.5), GREEDY, 257, 1, 2),
    "tree of 15, greedy": (TREES, GREEDY, 280, 13, 6),
    "tree of 15, drawn": (TREES, DRAWN, 446, 13, 16),
    "tree of 15, drawn by top-k and top-p": (TREES, CUT, 334, 13, 6),
}


def asked(target, draft, policy=None, **how):
    """Return what a round asks of the device, or a token without a draft: launches, copies and waits."""
    draft.decoding, found = DecodingOptions(policy=policy, prompt_lookup=False), []
    for length in (2, 8, 32):  # the first one warms up
        counts = Counts()
        with Pretended(counts):
            decode(target, None if policy is None else draft, DEVICE, max_new_tokens=length, **how)
        found.append((length if policy is None else draft.last_stats.rounds, counts))
    (few, before), (many, counts) = found[1:]
    more = counts - before
    return [number / (many - few) for number in (more.launches, more.copies, more.waits.total())]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in LIMITS]
)
def test_a_round_waits_for_the_device_a_few_times(pairs, name):
    policy, how, *limits = LIMITS[name]
    found, (step, *_, waits) = asked(*pairs[DEVICE], policy, **how), asked(*pairs[DEVICE], **how)
    assert waits <= 2  # two up to transformers 5.22
    print(f"\n| {name} | {' | '.join(f'{number:.1f}' for number in found)} | plain {step:.1f} |")
    assert all(number <= limit for number, limit in zip(found, limits, strict=True)), found


def test_trees_of_the_best_tokens_of_a_draft_wait_no_more_often_than_others(pairs, monkeypatch):
    monkeypatch.setattr(pairs[DEVICE][1].config, "draft_top_k", 8)
    policy, how, *limits = LIMITS["tree of 15, drawn"]
    assert asked(*pairs[DEVICE], policy, **how)[2] <= limits[-1]


def test_the_limit_tells_of_one_more_launch_in_each_layer(pairs, monkeypatch):
    (policy, how, limit, *_), honest = LIMITS["chain, greedy"], DSparkLayer.feed_forward
    monkeypatch.setattr(DSparkLayer, "feed_forward", lambda layer, normed: honest(layer, normed) + 0.0)
    assert asked(*pairs[DEVICE], policy, **how)[0] > limit
