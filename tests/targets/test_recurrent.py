"""Recurrent and hybrid targets decode with drafts as without, and keep no token that was rejected."""

import threading

import pytest
import torch
from transformers import DynamicCache

from hf_dspark import DecodingOptions, generate_many
from hf_dspark.targets.recurrent import Mixer
from hf_dspark.targets.slot_attention import PackedTarget
from hf_dspark.targets.support import TargetSupport
from hf_dspark.targets.transformers_api import cache_argument

from ..hybrids import HAVE_PROTOCOL, build, make_own_draft
from ..rigged import rig
from ..rows import padded

pytestmark = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
KINDS = ["qwen3_5_text", "mamba", "lfm2", "falcon_h1", "jamba"]


def pair_of(name):
    return (target := build(name)), make_own_draft(target)


@pytest.fixture(params=[*KINDS[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS[3:])])
def pair(request):
    return pair_of(request.param)


def prompts_of(target, lengths, seed=0):
    size = target.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, size, (length,), generator=generator) for length in lengths]


def plain(target, prompts, new_tokens):
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    return [target.generate(**padded([prompt]), **options)[0] for prompt in prompts]


def assisted(target, draft, prompts, new_tokens, **options):
    output = target.generate(
        **padded(prompts), assistant_model=draft, max_new_tokens=new_tokens, do_sample=False, **options
    )
    sequences = getattr(output, "sequences", output)
    width = max(map(len, prompts))
    rows = [row[width - len(prompt) :] for row, prompt in zip(sequences, prompts, strict=True)]
    return rows, output


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("lengths", "right_part"), [((7,), 0.6), ((3, 11, 6), 0.0), ((3, 11, 6), 1.0), ((5, 1, 9, 2, 14), 0.6)]
)
def test_rows_get_the_tokens_of_plain_decoding(pair, monkeypatch, lengths, right_part):
    target, draft = pair
    prompts = prompts_of(target, lengths)
    expected = plain(target, prompts, 20)
    rig(monkeypatch, expected, right_part)
    rows, _ = assisted(target, draft, prompts, 20)
    for row, answer in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, answer)
    if right_part == 1.0:
        assert draft.last_stats.tau > 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_a_rejected_token_left_in_place_would_be_seen(name, monkeypatch):
    target, draft = pair_of(name)
    prompts = prompts_of(target, (3, 11, 6))
    expected = plain(target, prompts, 20)
    rig(monkeypatch, expected, 0.6)
    attach = Mixer.attach

    def careless(self, cache, layout):
        stays = type(layout)(layout.starts, layout.counts, layout.first_row, is_prefill=True)
        for row in cache.row_states:
            for state in row.values():
                state.position = min([state.position, *layout.starts])  # so that nothing is read twice
        attach(self, cache, stays)

    monkeypatch.setattr(Mixer, "attach", careless)
    monkeypatch.setattr(Mixer, "_advance", lambda *args: None)
    rows, _ = assisted(target, draft, prompts, 20)
    assert any(not torch.equal(row, answer) for row, answer in zip(rows, expected, strict=True))


@pytest.mark.one_in(3)
def test_a_prompt_may_be_read_in_chunks(pair, monkeypatch):
    target, draft = pair
    prompts = prompts_of(target, (3, 11, 6))
    expected = plain(target, prompts, 16)
    rig(monkeypatch, expected)
    rows, _ = assisted(target, draft, prompts, 16, prefill_chunk_size=4)
    for row, answer in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, answer)


@pytest.mark.one_in(3)
def test_a_conversation_goes_on_and_an_edited_one_begins_again(pair):
    target, draft = pair
    prompts = prompts_of(target, (9, 5))
    rows, output = assisted(target, draft, prompts, 12, return_dict_in_generate=True)
    name = cache_argument(target)
    more = prompts_of(target, (4, 7), seed=1)
    longer = [torch.cat(parts) for parts in zip(rows, more, strict=True)]
    cache = output.past_key_values
    held = cache.lengths
    again, output = assisted(target, draft, longer, 12, return_dict_in_generate=True, **{name: cache})
    for row, answer in zip(again, plain(target, longer, 12), strict=True):
        torch.testing.assert_close(row, answer)
    assert min(held) > 9 and output.past_key_values is cache
    edited = [torch.cat([row[:-20], part]) for row, part in zip(again, more, strict=True)]
    rows, _ = assisted(target, draft, edited, 12, return_dict_in_generate=True, **{name: cache})
    for row, answer in zip(rows, plain(target, edited, 12), strict=True):
        torch.testing.assert_close(row, answer)


@pytest.mark.one_in(3)
def test_a_target_is_left_as_it_was(pair):
    target, draft = pair
    before = {name: dict(vars(module)) for name, module in target.named_modules()}
    assisted(target, draft, prompts_of(target, (3, 11)), 8)
    for name, module in target.named_modules():
        assert "forward" not in vars(module) and vars(module).keys() == before[name].keys()


def test_caches_from_elsewhere_are_refused(pair):
    target, draft = pair
    prompt = prompts_of(target, (6,))[0][None]
    cache = DynamicCache(config=target.config)
    with pytest.raises(ValueError, match="recurrent states of a DynamicCache from elsewhere"):
        target.generate(prompt, assistant_model=draft, **{cache_argument(target): cache})


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_transformers_own_loop_is_refused(name):
    target, draft = pair_of(name)
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    with pytest.raises(ValueError, match="only hf_dspark's own loop"):
        assisted(target, draft, prompts_of(target, (5,)), 4)


@pytest.mark.one_in(3)
def test_a_queue_of_more_prompts_than_rows_gives_each_its_own_answer(pair, monkeypatch):
    target, draft = pair
    prompts = prompts_of(target, (3, 11, 6, 8, 2))
    expected = plain(target, prompts, 12)
    rig(monkeypatch, expected)
    found = generate_many(target, draft, [prompt.tolist() for prompt in prompts], None, 2, False, max_new_tokens=12)
    for each in found:
        torch.testing.assert_close(each.token_ids, expected[each.index][-12:])


@pytest.mark.one_in(3)
def test_neighbours_of_a_prompt_that_fails_when_it_is_admitted_begin_anew(pair):
    target, draft = pair
    prompts = prompts_of(target, (3, 11, 6, 8, 2))
    expected = plain(target, prompts, 12)

    def forbid_all(ids, scores):
        return torch.full_like(scores, -torch.inf) if torch.equal(ids[0, :11], prompts[1]) else scores

    options = {"do_sample": True, "top_k": 1, "max_new_tokens": 12, "logits_processor": [forbid_all]}
    found = generate_many(target, draft, [prompt.tolist() for prompt in prompts], None, 3, False, **options)
    results = {each.index: each for each in found}
    assert "probability tensor" in str(results.pop(1).error)
    for index, each in results.items():
        torch.testing.assert_close(each.token_ids, expected[index][-12:])


def test_a_pass_in_another_thread_does_not_decide_what_a_layers_own_settings_are():
    target = build("falcon_h1")
    packed = PackedTarget(TargetSupport.of(target))
    mixer = TargetSupport.of(target).by_rows[0].module
    own = vars(mixer)["chunk_size"]
    with packed.lock:
        mixer.chunk_size = own + 1  # as during a pass
        others = []
        thread = threading.Thread(target=lambda: others.append(PackedTarget(TargetSupport.of(target))))
        thread.start()
        thread.join(timeout=0.2)
        mixer.chunk_size = own
    thread.join()
    others[0].restore()
    assert mixer.chunk_size == own


@pytest.mark.one_in(3)
def test_several_sequences_of_a_prompt_have_states_of_their_own(pair):
    target, draft = pair
    prompts = prompts_of(target, (4, 7))
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "return_dict_in_generate": True}
    output = target.generate(
        **padded(prompts), assistant_model=draft, max_new_tokens=10, output_logits=True, **options
    )
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    logits = torch.stack(output.logits, dim=1)
    for row, sequence in enumerate(output.sequences):
        tokens = sequence[7 - len(prompts[row // 3]) :][None]
        alone = target(tokens, attention_mask=torch.ones_like(tokens)).logits[0, -11:-1]
        torch.testing.assert_close(logits[row], alone, rtol=1e-3, atol=1e-3)


def test_offloaded_recurrent_layers_are_refused():
    target, draft = pair_of("qwen3_5_text")
    target.model.layers[0].linear_attn.to("meta")
    with pytest.raises(ValueError, match="recurrent layers whose weights are offloaded"):
        assisted(target, draft, prompts_of(target, (5,)), 4)
