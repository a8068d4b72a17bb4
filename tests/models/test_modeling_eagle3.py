"""The Eagle3 draft: parity with DeepSpec's numbers, training against decoding, and everything `generate()` offers."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    Gemma2Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
)

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    DSparkConfig,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    decode_with,
    generate_many,
    profile_throughput,
)
from hf_dspark.decoding import drafter as generator_module
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.decoding.tree_drafting import Chains
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.models import block_attention, modeling_eagle3
from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.losses import LossWeights, position_weights
from hf_dspark.models.modeling_draft import AnchoredBlocks
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.scheduling.step_costs import Machine
from tests.config_files import read_config
from tests.distributions import ROUNDING, distance_from_target
from tests.features import new_context, select_features
from tests.models.test_modeling_dspark import ForcedSampler, close, layout_of
from tests.rows import EverySecond, padded
from tests.samplers import ChainSampler

PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5, 11], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]
GREEDY = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
# Weights 0.8^k, as in DeepSpec.
LOSS = LossWeights(
    cross_entropy_weight=0, l1_weight=0, confidence_weight=0, soft_cross_entropy_weight=1,
    position_decay=-1 / math.log(0.8),
)  # fmt: skip

MTP = {"mtp": True, "target_layer_ids": [3], "norm_output": True}
PARALLEL = {"mask_token_id": 5, "num_hidden_layers": 2, "embedding_in_all_layers": False}
KINDS = [{}, {"num_hidden_layers": 2}, MTP, PARALLEL]


def make_eagle3(target: PreTrainedModel, seed: int = 1, **overrides) -> Eagle3DraftModel:
    """Build a tiny draft; every parameter is random, so that each of them matters."""
    config = Eagle3Config.from_target(target.config, **{"block_size": 4, "target_layer_ids": [0, 2]} | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3DraftModel(config)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    return draft.bind(target).eval()


@pytest.fixture
def draft(target) -> Eagle3DraftModel:
    return make_eagle3(target)


# ---- parity with DeepSpec


@pytest.fixture
def folder(fixtures):
    return fixtures / "deepspec" / "eagle3"


@pytest.fixture
def golden(folder):
    """DeepSpec's draft; of its target there are the embedding, the LM head, and hidden states."""
    stored = load_file(folder / "model.safetensors")
    config = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).requires_grad_(False)
    target.get_input_embeddings().weight.copy_(stored["embed_tokens.weight"])
    target.get_output_embeddings().weight.copy_(stored["lm_head.weight"])
    return Eagle3DraftModel.from_pretrained(folder).bind(target).eval()


def test_draft_block_matches_deepspec_over_two_cached_rounds(golden, folder):
    io, cache = load_file(folder / "io.safetensors"), SlotCache()
    committed = {"r1": torch.cat([io["prompt_ids"][0, 1:], io["first_token"][0]]), "r2": io["r2.committed_tokens"][0]}
    for r, ids in committed.items():
        features, before = io[f"{r}.target_hidden"], cache.lengths[0]
        hidden = golden.read_block(new_context(ids[-1:], features, cache, committed_ids=ids))
        close(hidden, io[f"{r}.draft_hidden"][0])
        cache.truncate(0, before)
        block = golden.draft_block(new_context(ids[-1:], features, cache, committed_ids=ids), ChainSampler())
        assert block.distribution is None and block.confidence_logits is None
        assert torch.equal(block.token_ids, io[f"{r}.verify_input_ids"][:, 1:])
        cache.truncate(0, before)
        forced = ForcedSampler(block.token_ids)
        golden.draft_block(new_context(ids[-1:], features, cache, committed_ids=ids), forced)
        close(torch.stack(forced.scores, dim=1), io[f"{r}.draft_logits"])
        assert cache.lengths[0] == before + len(ids)  # what was drafted does not count


def all_anchors(train):
    """Every position but the first as an anchor: block k of slot i belongs to anchor i+1."""
    ids = train["input_ids"]
    anchors = torch.arange(1, ids.shape[1]).expand(len(ids), -1)
    layout = layout_of(anchors, torch.ones_like(anchors).bool(), ids.shape[1], 4)
    following = torch.cat([ids, torch.zeros_like(ids)], dim=1)
    labels = torch.stack([following[:, 2 + k : 2 + k + anchors.shape[1]] for k in range(4)], dim=-1)
    return ids, layout, labels


def weighted(layout, labels, supervised) -> AnchoredBlocks:
    return AnchoredBlocks(layout, labels, position_weights(supervised, LOSS.position_decay))


@torch.no_grad()
def test_training_pass_matches_deepspec(golden, folder):
    train = load_file(folder / "train.safetensors")
    ids, layout, labels = all_anchors(train)
    logits = golden.base_logits(golden.block_hidden(ids, train["target_hidden_states"], layout, labels))
    for step in range(4):
        for row, length in enumerate(train["attention_mask"].sum(dim=1).tolist()):
            slots = slice(0, length - 1 - step)  # those whose tokens are all there
            close(logits[row, slots, step], train[f"step{step}.draft_logits"][row, slots])


def test_losses_match_deepspec_with_its_masks_which_are_not_those_of_the_labels(golden, folder):
    train, info = load_file(folder / "train.safetensors"), json.loads((folder / "info.json").read_text())
    ids, layout, labels = all_anchors(train)
    mask, last_hidden = train["loss_mask"].bool(), train["target_last_hidden_states"]
    padded = torch.cat([mask, torch.zeros_like(mask)], dim=1)
    count = layout.anchor_positions.shape[1]

    def masked(shift):
        """The mask at `shift` tokens after slot + step, `[B, N, γ]`."""
        return torch.stack([padded[:, k + shift : k + shift + count] for k in range(4)], dim=-1)

    following = torch.cat([last_hidden, torch.zeros_like(last_hidden)], dim=1)
    label_hidden = torch.stack([following[:, 1 + k : 1 + k + count] for k in range(4)], dim=2)

    def loss(supervised):
        blocks, weight_sum = weighted(layout, labels, supervised), torch.tensor(float(ids.numel()))
        return golden(ids, train["target_hidden_states"], label_hidden, blocks, LOSS, weight_sum).loss.item()

    theirs = masked(0) & masked(1)
    assert loss(theirs) == pytest.approx(info["total_loss"], abs=1e-5)
    for step in range(4):
        alone = theirs & (torch.arange(4) == step)
        assert loss(alone) / 0.8**step == pytest.approx(info["metrics"][f"train/ploss_{step}"], abs=1e-5)

    ours = masked(2)  # the label of slot i at step k is token i + k + 2
    for row, (first, end) in enumerate([(6, 20), (4, 16)]):  # the supervised stretches
        predicted = torch.arange(count)[:, None] + torch.arange(4) + 2
        inside = (predicted >= first) & (predicted < end)
        assert torch.equal(ours[row], inside)
        assert torch.equal(theirs[row], (predicted >= first + 2) & (predicted <= end))
    assert abs(loss(ours) - info["total_loss"]) > 0.1


# ---- training and decoding


def packed_documents(draft, lengths=((6, 5, 9), (13, 7)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = len(draft.config.target_layer_ids) * draft.config.hidden_size
    ids = torch.randint(0, draft.config.vocab_size, (2, 20), generator=generator)
    features = torch.randn(2, 20, width, generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return ids, features, positions


def blocks_of(ids, positions, anchors, real=None):
    anchors = torch.tensor(anchors)
    layout = BlockLayout(anchors, torch.ones_like(anchors).bool() if real is None else real, positions, 4)
    following = torch.cat([ids, ids], dim=1)
    labels = torch.stack([following.gather(1, anchors + k) for k in range(1, 5)], dim=-1)
    return layout, labels


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_training_distribution_is_the_decoding_distribution_in_packed_documents(monkeypatch, target, kind):
    monkeypatch.setattr(block_attention, "CHUNK_ROWS", 3)
    draft = make_eagle3(target, **kind)
    ids, features, positions = packed_documents(draft)
    layout, labels = blocks_of(ids, positions, [[1, 5, 7, 9, 12, 15], [2, 3, 8, 11, 14, 16]])
    logits = draft.base_logits(draft.block_hidden(ids, features, layout, labels))
    for row in range(2):
        for block, anchor in enumerate(layout.anchor_positions[row].tolist()):
            document = slice(anchor - int(positions[row, anchor]), anchor)
            committed = ids[row, document.start + 1 : anchor + 1]
            forced = ForcedSampler(labels[row, block][None])
            given = committed[-1:], features[row, document][None], SlotCache(), None, committed
            draft.draft_block(new_context(*given), forced)
            close(logits[row, block], torch.cat(forced.scores), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dummies_and_first_tokens_leave_no_trace(target, kind):
    draft = make_eagle3(target, **kind)
    ids, features, positions = packed_documents(draft)
    real = torch.tensor([[True, True, True, False], [True, True, False, False]])
    layout, labels = blocks_of(ids, positions, [[0, 6, 8, 0], [5, 13, 0, 0]], real)
    assert draft.block_hidden(ids, features, layout, labels).isfinite().all()
    counted = torch.tensor([[False, False, True, False], [True, False, False, False]])[:, :, None].expand(-1, -1, 4)
    label_hidden = torch.randn(2, 4, 4, draft.config.hidden_size)
    draft(ids, features, label_hidden, weighted(layout, labels, counted), LOSS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in draft.parameters())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_gradients_reach_every_parameter_and_are_the_same_with_checkpointing(target, use_reentrant, kind):
    gradients = []
    for checkpointing in (False, True):
        draft = make_eagle3(target, **kind).train()
        if checkpointing:
            draft.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        ids, features, positions = packed_documents(draft)
        layout, labels = blocks_of(ids, positions, [[1, 5, 7, 9], [2, 3, 8, 11]])
        label_hidden = torch.ones(2, 4, 4, draft.config.hidden_size)
        draft(ids, features, label_hidden, weighted(layout, labels, labels >= 0), LOSS).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        close(gradients[1][name], gradient)


# ---- decoding rounds


@pytest.mark.parametrize("overrides", [*KINDS, {"draft_top_k": 5}], ids=str)
def test_packed_rows_are_drafted_as_if_each_were_alone(target, overrides):
    draft = make_eagle3(target, **overrides)
    width = draft.config.num_taps * draft.config.hidden_size
    together, alone = SlotCache(3), [SlotCache() for _ in range(3)]
    for counts in ([5, 1, 9], [2, 4, 1], [0, 3, 2]):  # none: its last round failed
        features = [torch.randn(count, width) for count in counts]
        committed = [torch.randint(0, 48, (count,)) for count in counts]
        anchors = torch.stack([ids[-1] if len(ids) else torch.tensor(7) for ids in committed])
        drafts = torch.randint(0, 48, (3, 4))
        forced = ForcedSampler(drafts)
        given = anchors, torch.cat(features), together, counts, torch.cat(committed)
        block = draft.draft_block(new_context(*given), forced)
        for row in range(3):
            single = ForcedSampler(drafts[row : row + 1])
            given = anchors[row : row + 1], features[row], alone[row], counts[row : row + 1], committed[row]
            expected = draft.draft_block(new_context(*given), single)
            close(torch.cat([scores[row] for scores in forced.scores]), torch.cat([s[0] for s in single.scores]))
            close(block.distribution.probs[row], expected.distribution.probs[0])
        assert list(together.lengths) == [cache.lengths[0] for cache in alone]


# ---- generate()


class Watch:
    """Replaces drafts by the truth with an error in most blocks, and notes what the draft itself had proposed."""

    def __init__(self, monkeypatch):
        self.answers, self.seen, honest = [], [], Chains.finish

        def finish(chains, *args):
            block = honest(chains, *args)
            tokens = block.token_ids.clone()
            for row, request in enumerate(chains.requests):
                prefix = request.token_ids.tolist()
                self.seen.append((prefix, tokens[row].tolist()))
                truth = next((answer for answer in self.answers if answer[: len(prefix)] == prefix), prefix)
                truth = truth[len(prefix) : len(prefix) + tokens.shape[1]]
                tokens[row, : len(truth)] = torch.tensor(truth)
                slot = len(prefix) % (tokens.shape[1] + 2)
                if slot < tokens.shape[1]:
                    tokens[row, slot] = (tokens[row, slot] + 1) % 48
            return replace(block, token_ids=tokens)

        monkeypatch.setattr(Chains, "finish", finish)

    def check(self, target, draft, strip=0):
        """What was proposed is what the draft proposes when it reads everything anew."""
        assert self.seen
        for prefix, proposed in self.seen:
            ids = torch.tensor(prefix[strip:])
            with torch.no_grad():
                states = target(ids[None, :-1], output_hidden_states=True).hidden_states
            features = select_features(states, draft.config.target_layer_ids)
            context = new_context(ids[-1:], features, SlotCache(), committed_ids=ids[1:])
            block = draft.draft_block(context, ChainSampler())
            assert block.token_ids[0, : len(proposed)].tolist() == proposed
        self.seen.clear()


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def plain_answers(target, prompts, **options):
    return [target.generate(torch.tensor([prompt]), **(GREEDY | options))[0].tolist() for prompt in prompts]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_hidden_layers", [1, 2])
def test_greedy_output_of_a_ragged_batch_is_identical(target, watch, num_hidden_layers):
    draft = make_eagle3(target, num_hidden_layers=num_hidden_layers)
    watch.answers = plain_answers(target, PROMPTS)
    batch = padded(PROMPTS)
    output = target.generate(**batch, assistant_model=draft, **GREEDY)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, watch.answers, strict=True)):
        assert output[row, batch["input_ids"].shape[1] :].tolist() == answer[len(prompt) :]
    assert len(set(draft.last_stats.accepted)) >= 3
    watch.check(target, draft)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("loop", "options"),
    [
        *itertools.product(("own", "transformers"), ({}, {"num_assistant_tokens": 2}, {"repetition_penalty": 1.4})),
        *itertools.product(("custom_generate",), ({}, {"repetition_penalty": 1.4})),
    ],
    ids=str,
)
def test_greedy_output_of_one_sequence_is_identical_in_every_loop(target, draft, watch, loop, options):
    processing = {name: value for name, value in options.items() if "assistant" not in name}
    watch.answers = plain_answers(target, PROMPTS[:1], **processing)
    draft.decoding = DecodingOptions(use_transformers_loop=loop == "transformers")
    how = {"assistant_model": draft} if loop != "custom_generate" else {"custom_generate": decode_with(draft)}
    output = target.generate(**padded(PROMPTS[:1]), **how, **(GREEDY | options))
    assert output.tolist() == watch.answers
    assert sum(draft.last_stats.accepted) > 3
    if not processing:
        watch.check(target, draft)
    assert max(draft.last_stats.proposed) == options.get("num_assistant_tokens", 4)


def test_left_padding_is_no_context_in_transformers_loop(target, draft, watch):
    watch.answers = [[0, 0, 0, *answer] for answer in plain_answers(target, PROMPTS[:1])]
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    ids = torch.tensor([[0, 0, 0, *PROMPTS[0]]])
    output = target.generate(ids, attention_mask=(ids > 0).long(), assistant_model=draft, **GREEDY)
    assert output.tolist() == watch.answers
    watch.check(target, draft, strip=3)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*out of memory")
@pytest.mark.parametrize("fails", [False, True])
def test_generate_many_yields_the_plain_answers_also_when_a_round_fails(target, draft, watch, monkeypatch, fails):
    """When it fails after the draft, the draft has read the features, and there are no new ones."""
    watch.answers = plain_answers(target, PROMPTS)
    calls, honest = [], Drafter._draft_chains

    def fail_once(drafter, *args):
        chains = honest(drafter, *args)
        calls.append(1)
        if fails and len(calls) == 2:
            raise MemoryError("for once")
        return chains

    monkeypatch.setattr(Drafter, "_draft_chains", fail_once)
    for completion in generate_many(target, draft, PROMPTS, batch_size=2, **GREEDY):
        assert completion.error is None
        assert completion.token_ids.tolist() == watch.answers[completion.index][len(PROMPTS[completion.index]) :]
    if not fails:
        watch.check(target, draft)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("waiting_at_most", [1, 128])
def test_rounds_without_drafts_lose_no_context(monkeypatch, target, draft, watch, waiting_at_most):
    monkeypatch.setattr(generator_module, "WAITING_AT_MOST", waiting_at_most)
    draft.decoding = DecodingOptions(policy=EverySecond())
    watch.answers = plain_answers(target, PROMPTS)
    target.generate(**padded(PROMPTS), assistant_model=draft, **GREEDY)
    assert 0 in draft.last_stats.proposed
    watch.check(target, draft)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("turn", ["longer", "only_new", "edited", "shorter"])
def test_a_conversation_goes_on_with_the_whole_context(target, draft, watch, turn):
    """Of the last token that stays, the draft had read the next one, which an edit takes away."""
    options = GREEDY | {"assistant_model": draft}
    watch.answers = plain_answers(target, PROMPTS[:1])
    first = target.generate(**padded(PROMPTS[:1]), return_dict_in_generate=True, **options)
    said, cache = first.sequences[0].tolist(), first.past_key_values
    watch.check(target, draft)
    kept = {"longer": said, "only_new": said, "edited": said[:-6], "shorter": said[:-5]}[turn]
    whole = kept if turn == "shorter" else [*kept, (said[len(kept) % len(said)] + 1) % 48, 17, 3]
    watch.answers = plain_answers(target, [whole])
    ids = torch.tensor([whole])
    hidden = whole[: cache.get_seq_length()] if turn == "only_new" else []  # not in the request, nor seen by the watch
    output = target.generate(
        ids[:, len(hidden) :], attention_mask=torch.ones_like(ids), past_key_values=cache, **options
    )
    assert output[0].tolist() == watch.answers[0][len(hidden) :]
    watch.seen = [(hidden + prefix, proposed) for prefix, proposed in watch.seen]
    watch.check(target, draft)


# ---- losslessness


@pytest.mark.one_in(11)
@pytest.mark.parametrize("processors", [[], [TopKLogitsWarper(2)]], ids=["none", "top_k"])
@pytest.mark.parametrize("candidates", ["all", "the_best", "the_worst"])
@pytest.mark.parametrize("policy", [FullBlock(), ConfidenceThreshold(0.4)], ids=["full", "threshold"])
def test_round_leaves_the_target_distribution_unchanged(make_target, monkeypatch, candidates, processors, policy):
    target = make_target(vocab_size=3, pad_token_id=None)
    draft = make_eagle3(target, block_size=3, draft_top_k=None if candidates == "all" else 2)
    if candidates == "the_worst":
        monkeypatch.setattr(modeling_eagle3, "largest", lambda logits, count: logits.topk(count, largest=False))
    assert distance_from_target(target, draft, policy, processors) < ROUNDING
    if policy == FullBlock():  # of which the control is
        flat = torch.full((3, 3), 1.0 / 3, dtype=torch.double)
        claimed = {"claimed_distribution": lambda block: flat}
        assert distance_from_target(target, draft, policy, processors, **claimed) > 0.01


# ---- loading and saving


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_checkpoint_survives_saving_and_loading(target, tmp_path, kind):
    draft = make_eagle3(target, **kind)
    draft.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert not [name for name in saved if "embed_tokens" in name or "lm_head" in name]
    for auto in (Eagle3DraftModel, AutoModel):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is Eagle3DraftModel
        assert loaded.config.to_diff_dict() == draft.config.to_diff_dict()
        state = loaded.state_dict()
        assert state.keys() == saved.keys() and all(torch.equal(state[name], saved[name]) for name in saved)
    assert type(AutoConfig.from_pretrained(tmp_path)) is Eagle3Config


def test_each_kind_of_draft_refuses_the_others_checkpoint(fixtures, draft, tmp_path):
    draft.save_pretrained(tmp_path)
    for path, config in (
        (fixtures / "deepspec" / "draft_rnn", Eagle3Config), (fixtures / "deepspec" / "eagle3", DSparkConfig),
        (tmp_path, DSparkConfig), (fixtures / "deepspec" / "target_qwen3", Eagle3Config),
        (fixtures / "deepspec" / "target_qwen3", DSparkConfig),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"which is no {config.__name__.removesuffix('Config')} draft"):
            config.from_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma4_text"}, "model_type is 'gemma4_text'"),
        ({"layer_types": ["sliding_attention"]}, "whole context"),
    ],
)
def test_deepspec_checkpoints_of_other_designs_are_refused(folder, tmp_path, change, message):
    source = read_config(folder) | change
    (tmp_path / "config.json").write_text(json.dumps(source))
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(tmp_path)


# ---- configuration


def test_config_takes_the_facts_of_the_target():
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 8}
    config = Eagle3Config.from_target(Gemma2Config(**sizes, num_key_value_heads=2, final_logit_softcapping=30.0))
    assert (config.num_hidden_layers, config.block_size, config.num_target_layers) == (1, 7, 12)
    assert config.embedding_scale == pytest.approx(32**0.5) and config.final_logit_softcapping == 30.0
    assert (config.markov_rank, config.enable_confidence_head, config.sts_temperatures) == (0, False, None)
    assert config.confidence_fits_for(None, True) is None
    with pytest.raises(ValueError, match="no calibration for the domain 'math'"):
        config.confidence_fits_for("math", False)


# ---- what needs a confidence head, and what does not


def test_what_the_draft_cannot_do_is_refused_before_any_work(make_target, target, draft):
    options = GREEDY | {"inputs": torch.tensor(PROMPTS[:1]), "assistant_model": draft}
    with pytest.raises(ValueError, match="no confidence head"):
        collect_rounds(target, draft, [PROMPTS[0]])
    with pytest.raises(ValueError, match=r"vocab_size: draft 48, target 50.*Eagle3Config\.from_target"):
        make_target(vocab_size=50).generate(**options)


def test_costs_are_measured_and_not_taken_for_those_of_a_parallel_draft(target, draft, make_draft):
    profile = profile_throughput(target, draft, (1, 2), (8, 16), repetitions=1, cache=False)
    assert profile.table.drafting > 0
    parallel = make_draft(target, num_hidden_layers=1, markov_rank=0, confidence_head_with_markov=False)
    machine = Machine.of(target, draft)
    assert machine.distance(Machine.of(target, parallel)) is None and machine.distance(profile.machine) == 0
