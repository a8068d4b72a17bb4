"""Rounds as compiled graphs: the tokens of rounds without, few graphs, and what cannot be compiled.

Dynamo traces the graphs as a whole, and a backend that only counts them stands for the compiler.
"""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Scheduler,
    ThroughputTable,
    profile_throughput,
)
from hf_dspark.decoding import compiled_drafting, hook
from hf_dspark.models import fixed_cache
from hf_dspark.models.fixed_cache import fixed_size
from hf_dspark.models.slot_cache import SlotLayout
from hf_dspark.targets import compiled_target
from hf_dspark.targets.compiled_target import CompiledTarget
from hf_dspark.targets.support import TargetSupport
from tests.gpu.pretended import DEVICE, Pretended, moved
from tests.hybrids import make_own_draft
from tests.models.test_v4_layers import KINDS
from tests.rows import padded
from tests.targets.test_model_types import (
    COMMON,
    PLAIN,
    PROMPTS,
    TYPES,
    know_the_answers,
)

COMPILED_TYPES = (
    "gpt2", "gemma2", "llama", "mixtral", "qwen3", "gemma3_text", "phi3", "opt", "gpt_oss", "afmoe", "deepseek_v3",
)  # fmt: skip
GREEDY, DRAWN = {"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.8}
TREES = Scheduler(num_nodes=12)


def forget(monkeypatch) -> None:
    for module in (compiled_target, compiled_drafting):
        monkeypatch.setattr(module, "_known", weakref.WeakKeyDictionary())


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that were made, which run without a compiler."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    monkeypatch.setattr(fixed_cache, "BACKEND", backend)
    forget(monkeypatch)
    torch._dynamo.reset()
    return made


@pytest.fixture
def uncompiled(monkeypatch) -> None:
    """Run what would be compiled as it is, on any device."""
    forget(monkeypatch)
    monkeypatch.setattr(compiled_target, "compiled", lambda function, device: function)


@pytest.fixture(autouse=True)
def no_warning():
    """What is not compiled is an error, unless a test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without compiled graphs")
        yield


def decoded(pair, rows, options, **kwargs):
    target, draft = pair
    draft.decoding = options
    torch.manual_seed(0)
    batch = padded([prompt[:9] for prompt in (PROMPTS * 2)[:rows]])
    try:
        kwargs = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None} | kwargs
        return target.generate(**batch, assistant_model=draft, **kwargs)
    finally:
        draft.decoding = DecodingOptions()


def make_small_target(model_type):
    facts = COMMON | TYPES[model_type] | {"num_hidden_layers": 2}
    if "layer_types" in facts:
        facts["layer_types"] = facts["layer_types"][:2]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **facts)).eval()


@pytest.mark.slow  # the trained pair is compiled as a whole below, faster
@pytest.mark.parametrize("model_type", COMPILED_TYPES)
def test_targets_of_many_types_compile_as_a_whole_and_decode_the_same(model_type, graphs, monkeypatch):
    target = make_small_target(model_type)
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(compile=True)
    alone = [target.generate(input_ids=torch.tensor([prompt]), **PLAIN)[0].tolist() for prompt in PROMPTS]
    know_the_answers(monkeypatch, alone)
    batch = padded(PROMPTS)
    output = target.generate(**batch, assistant_model=draft, **PLAIN)
    answers = [row[len(prompt) :] for prompt, row in zip(PROMPTS, alone, strict=True)]
    assert output[:, batch["input_ids"].shape[1] :].tolist() == answers
    assert len(graphs) <= 4 and len(set(draft.last_stats.accepted)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_rounds_of_any_kind_give_the_same_tokens_without_another_graph(rows, graphs, pair):
    policies = {"whole": FullBlock(), "cut": ConfidenceThreshold(0.6), "trees": TREES}
    for sampling in (GREEDY, DRAWN, DRAWN | {"top_k": 9, "top_p": 0.9}):
        for policy in policies.values():
            expected = decoded(pair, rows, DecodingOptions(policy=policy), **sampling)
            for _ in range(2):
                found = decoded(pair, rows, DecodingOptions(policy=policy, compile=True), **sampling)
                assert torch.equal(found, expected)
    # Of the target, of the draft for trees, and for chains by each way to draw; of several rows, and of the last one.
    assert len(graphs) <= (2 + 3) * (1 + (rows > 1))


@pytest.mark.slow
def test_experts_streams_and_low_rank_attention_are_in_the_graph(graphs, pair, make_draft):
    target, taps = pair[0], pair[1].config.target_layer_ids
    facts = {"num_hidden_layers": 1, "num_experts": 2, "target_layer_ids": taps}
    draft = make_draft(target, **facts | KINDS["attention"])
    expected = decoded((target, draft), 1, DecodingOptions(policy=FullBlock()), **GREEDY)
    found = decoded((target, draft), 1, DecodingOptions(policy=FullBlock(), compile=True), **GREEDY)
    assert torch.equal(found, expected) and len(graphs) >= 2


@pytest.mark.slow
def test_no_graph_is_made_after_the_first_rounds(graphs, pair):
    options = DecodingOptions(policy=ConfidenceThreshold(0.5), compile=True)
    decoded(pair, 1, options, **DRAWN)
    warm, rounds, accepted, seed = len(graphs), 0, set(), 0
    while rounds < 200:
        decoded(pair, 1, options, **DRAWN, max_new_tokens=40 + 7 * seed)
        statistics, seed = pair[1].last_stats, seed + 1
        rounds += len(statistics.accepted)
        accepted |= set(statistics.accepted)
    assert len(graphs) == warm == 2  # of the target and the draft
    assert len(accepted) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "option", "values"),
    [(2, "top_p", (0.5, 0.6, 0.7, 0.8, 0.9, 0.7)), (1, "temperature", (0.5, 0.8, 1.3))],
)
def test_ways_to_draw_beyond_a_few_share_a_graph(graphs, pair, monkeypatch, ways, option, values):
    monkeypatch.setattr(compiled_drafting, "MOST_WAYS", ways)
    for value in values:
        drawn = DRAWN | {option: value}
        expected = decoded(pair, 1, DecodingOptions(policy=FullBlock()), **drawn)
        assert torch.equal(decoded(pair, 1, DecodingOptions(policy=FullBlock(), compile=True), **drawn), expected)
    assert len(graphs) <= (6 if ways == 2 else 3)  # target, shared, and two of each other way: for a value, for all


@pytest.mark.slow
def test_drafts_with_hooks_and_of_another_size_are_not_taken_for_compiled_ones(graphs, pair):
    target, draft = pair[0], copy.deepcopy(pair[1])
    hook = draft.layers[0].register_forward_hook(lambda module, args, output: None)
    with pytest.warns(UserWarning, match="the draft .* without compiled graphs, because hooks"):
        decoded((target, draft), 1, DecodingOptions(compile=True), **GREEDY)
    hook.remove()
    assert len(graphs) == 1
    for size in (7, 3):
        draft.config.block_size = size
        expected = decoded((target, draft), 2, DecodingOptions(policy=FullBlock()), **GREEDY)
        assert torch.equal(
            decoded((target, draft), 2, DecodingOptions(policy=FullBlock(), compile=True), **GREEDY), expected
        )
    assert len(graphs) > 1


@pytest.mark.slow
def test_a_profile_measures_the_graphs_of_calls(graphs, pair):
    target, draft = pair
    decoded(pair, 1, DecodingOptions(policy=FullBlock(), compile=True), do_sample=True, top_k=0)
    draft.decoding = DecodingOptions(compile=True)
    profile_throughput(target, draft, batch_sizes=(1,), context_lengths=(16,), repetitions=1, cache=False)
    draft.decoding = DecodingOptions()
    assert len(graphs) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [FullBlock(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("rows", [1, 5])
def test_passes_padded_for_an_accelerator_give_the_same_tokens(rows, policy, uncompiled, pair, monkeypatch):
    sizes = []

    def as_on_a_gpu(layout, device):
        sizes.append(fixed_size(layout, torch.device("cuda")))
        return sizes[-1]

    expected = decoded(pair, rows, DecodingOptions(policy=policy), **DRAWN)
    monkeypatch.setattr(fixed_cache, "fixed_size", as_on_a_gpu)
    assert torch.equal(decoded(pair, rows, DecodingOptions(policy=policy, compile=True), **DRAWN), expected)
    assert len(set(sizes)) >= 2 and {width for _, width in sizes} <= set(fixed_cache.WIDTHS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [FullBlock(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_is_the_same_in_graphs(rows, policy, uncompiled, pair):
    options = {"policy": policy, "draft_window": 8}
    expected = decoded(pair, rows, DecodingOptions(**options), **DRAWN, max_new_tokens=60)
    accepted = pair[1].last_stats.accepted
    found = decoded(pair, rows, DecodingOptions(compile=True, **options), **DRAWN, max_new_tokens=60)
    assert torch.equal(found, expected) and pair[1].last_stats.accepted == accepted


@pytest.mark.slow
def test_a_cache_gets_the_memory_of_one_that_is_gone(uncompiled, pair):
    """CUDA graphs are recorded for addresses."""
    target, draft = pair
    compiled = CompiledTarget.of(TargetSupport.of(target), True)
    kept = compiled.cache, compiled_drafting.CompiledDraft.of(draft, compiled).blocks
    for cache in kept:
        cache.keeps_memory = True
    found = []
    for length in (40, 12, 25):
        expected = decoded(pair, 2, DecodingOptions(), **DRAWN, max_new_tokens=length)
        output = decoded(pair, 2, DecodingOptions(compile=True), **DRAWN, max_new_tokens=length)
        assert torch.equal(output, expected)
        found.append([cache._kept[0, "keys"].data_ptr() for cache in kept])
        assert all(cache._latest() is None for cache in kept)
    assert found[0] == found[1] == found[2]
    options = DecodingOptions(compile=True)
    used = [decoded(pair, 1, options, **GREEDY, return_dict_in_generate=True) for _ in range(2)]
    assert len({each.past_key_values.stores[0, "keys"].data_ptr() for each in used}) == 2  # both are in use


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_pretended_accelerator_is_compiled_for_by_itself(rows, uncompiled, pair, monkeypatch):
    expected, passes, run = decoded(pair, rows, DecodingOptions(), **GREEDY), [], CompiledTarget.run
    monkeypatch.setattr(CompiledTarget, "run", lambda *args, **kwargs: passes.append(1) or run(*args, **kwargs))
    device_pair = [moved(copy.deepcopy(model)) for model in pair]
    with Pretended():
        batch = {name: part.to(DEVICE) for name, part in padded([prompt[:9] for prompt in PROMPTS[:rows]]).items()}
        device_pair[1].decoding = DecodingOptions(compile="auto")
        options = GREEDY | {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
        output = device_pair[0].generate(**batch, assistant_model=device_pair[1], **options)
    assert torch.equal(output.host, expected) and len(passes) > 5
    decoded(pair, rows, DecodingOptions(compile="auto"), **GREEDY)  # not on a CPU
    assert len(passes) < 40


@pytest.mark.parametrize(
    ("counts", "size"),
    [((1,), (2, 2)), ((5,), (8, 8)), ((33,), (64, 64)), ((3, 1, 1), (8, 4)), ((8, 8, 8), (24, 8)), ((1, 1), (2, 2))],
)
def test_passes_have_few_sizes_on_accelerators(counts, size):
    assert fixed_size(SlotLayout((10,) * len(counts), counts), torch.device("cuda")) == size


def test_scheduler_counts_what_padded_passes_cost(uncompiled, pair, monkeypatch):
    table = ThroughputTable((1, 8, 64), (95, 94, 80), growth=(1.1, 1.3))
    counted = table.padded()
    tokens = range(1, 65)
    expected = [float(table.seconds_of([max(2, 1 << (count - 1).bit_length())])[0]) for count in tokens]
    assert counted.seconds_of(tokens).tolist() == pytest.approx(expected)
    assert counted.growth == table.growth
    target, draft = [moved(copy.deepcopy(model)) for model in pair]
    for compiles in (False, "auto"):
        options = DecodingOptions(policy=Scheduler(table), compile=compiles)
        config, cutoff = target.generation_config, dict.fromkeys(hook.CUTOFF_ARGUMENTS)
        plan, _ = hook.plan_call(target, draft, options, config, cutoff)
        assert plan["policy"].cost == (counted if compiles else table)


def broken_backend(graph, inputs):
    raise RuntimeError("no compiler was found")


def attach_a_hook(target):
    target.model.layers[0].register_forward_hook(lambda module, args, output: None)


def compile_before(target):
    target.forward = torch.compile(target.forward, backend="eager")


OBSTACLES = {
    "compiler": (lambda target: None, "could not be compiled .*no compiler was found"),
    "hook": (attach_a_hook, "hooks are around its modules"),
    "compiled": (compile_before, "it is compiled already"),
    "quantised": (lambda target: setattr(target, "hf_quantizer", object()), "its weights are quantised"),
    "memory": (lambda target: None, "could not be compiled .*OutOfMemoryError: no memory"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "memory" or "compile" in each)) for each in OBSTACLES],
)
def test_what_cannot_be_compiled_is_decoded_without_and_named_once(name, graphs, pair, monkeypatch):
    pair, (prepare, reason) = (copy.deepcopy(pair[0]), pair[1]), OBSTACLES[name]
    expected = decoded(pair, 1, DecodingOptions(policy=FullBlock()), **DRAWN)
    if name == "compiler":
        monkeypatch.setattr(fixed_cache, "BACKEND", broken_backend)
    if name == "memory":

        def begin(*args):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(fixed_cache.FixedCache, "begin", begin)
    prepare(pair[0])
    implementation = pair[0].config._attn_implementation
    with pytest.warns(UserWarning, match=f"without compiled graphs, because .*{reason}") as said:
        for _ in range(2):
            options = DecodingOptions(policy=FullBlock(), compile=True)
            assert torch.equal(decoded(pair, 1, options, **DRAWN), expected)
    messages = [str(each.message) for each in said if "compiled graphs" in str(each.message)]
    assert len(messages) == 1 + (name == "compiler")  # of the target, and of the draft if that was tried
    assert len(graphs) == (name == "memory")
    assert pair[0].config._attn_implementation == implementation
    assert name == "hook" or not any(module._forward_hooks for module in pair[0].modules())


@pytest.mark.slow
def test_graphs_go_with_their_target(graphs, pair):
    target = copy.deepcopy(pair[0])
    decoded((target, pair[1]), 1, DecodingOptions(compile=True), **GREEDY)
    alive = weakref.ref(target)
    pair[1].bind(pair[0])
    del target
    gc.collect()
    assert graphs and alive() is None and not compiled_target._known


def test_a_target_that_was_moved_is_compiled_where_it_is(uncompiled, pair):
    support = TargetSupport.of(target := copy.deepcopy(pair[0]))
    assert CompiledTarget.of(support, True) is CompiledTarget.of(support, True)
    target.to("meta")
    assert CompiledTarget.of(support, True).device == support.input_device == torch.device("meta")


def test_unknown_ways_to_compile_are_refused():
    with pytest.raises(ValueError, match="compile must be True, False or 'auto', got 'always'"):
        DecodingOptions(compile="always")
