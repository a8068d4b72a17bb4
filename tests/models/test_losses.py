"""The training objective: parity with DeepSpec's numbers, and with formulas written out here."""

import math
from dataclasses import replace

import pytest
import torch

from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.losses import BlockLosses, LossWeights, SlotLogits, block_losses, position_weights
from hf_dspark.models.modeling_draft import AnchoredBlocks
from hf_dspark.training.blocks import label_hidden

GOLDEN = ("draft_vanilla", "draft_rnn", "draft_dflash", "gemma4/draft_vanilla")
SETTINGS = ("dspark_default", "dspark_gamma_eq_block", "no_decay", "dflash")
PLAIN = LossWeights()
CASES = [(name, setting) for name in GOLDEN[:3] for setting in SETTINGS] + [(GOLDEN[3], "dspark_default")]


def options(losses: dict) -> LossWeights:
    return LossWeights(
        cross_entropy_weight=losses["ce_loss_alpha"],
        l1_weight=losses["l1_loss_alpha"],
        confidence_weight=losses["confidence_head_alpha"],
        position_decay=losses["loss_decay_gamma"],
    )


def losses_of(
    draft_logits, target_logits, labels, supervised, confidence_logits, weights=PLAIN, **kwargs
) -> BlockLosses:
    """Losses of logits that exist already."""
    draft, target = (SlotLogits(lambda x: x, (logits,), logits.shape[-1]) for logits in (draft_logits, target_logits))
    slot_weights = position_weights(supervised, weights.position_decay)
    return block_losses(draft, target, labels, slot_weights, weights, confidence_logits, **kwargs)


def stored_losses(data, setting):
    """Losses of DeepSpec's own logits: no model of ours is involved."""
    train = data.train
    draft_logits = train["draft_logits"] if "draft_logits" in train else train["base_logits"]
    return losses_of(
        draft_logits, train["aligned_target_logits"], train["target_ids"], train["eval_mask"].bool(),
        train.get("confidence_pred"), options(data.losses[setting]),
    )  # fmt: skip


def random_blocks():
    """Draft logits, target logits, labels, what is supervised, and confidence logits of 2x3 blocks of 4."""
    draft_logits, confidence_logits = torch.randn(2, 3, 4, 7).requires_grad_(), torch.randn(2, 3, 4).requires_grad_()
    supervised = torch.ones(2, 3, 4, dtype=torch.bool)
    supervised[0, 1, 2:] = supervised[1, 2] = False
    return draft_logits, torch.randn(2, 3, 4, 7), torch.randint(0, 7, (2, 3, 4)), supervised, confidence_logits


def test_half_precision_around_the_losses_changes_no_sum():
    draft_logits, *others = random_blocks()
    weights = LossWeights(soft_cross_entropy_weight=0.5)
    expected = losses_of(draft_logits, *others, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses_of(draft_logits, *others, weights)
    for name in ("loss", "cross_entropy", "l1", "soft_cross_entropy", "confidence"):
        assert getattr(found, name).dtype == torch.float32, name
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


# ---- parity with DeepSpec


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_block_losses_and_reported_acceptance_match_deepspec(golden, name, setting):
    data = golden(name)
    losses, expected = stored_losses(data, setting), data.losses[setting]
    assert losses.loss.item() == pytest.approx(expected["total"], rel=1e-5, abs=1e-5)
    terms = {"ce": losses.cross_entropy, "l1": losses.l1, "confidence": losses.confidence}
    if expected["l1_loss_alpha"] == 0:  # the reference skips it then
        del terms["l1"]
    if "confidence_pred" not in data.train:
        assert terms.pop("confidence") is None
    for term, value in terms.items():
        assert value.item() == pytest.approx(expected[f"{term}_loss_num"], rel=1e-5)
        assert losses.weight_sum.item() == pytest.approx(expected[f"{term}_loss_den"], rel=1e-5)
    supervised, metrics = data.train["eval_mask"].bool(), data.info["train"]["metrics"]
    acceptance, metrics = losses.acceptance * supervised, metrics.get(setting, metrics)
    tau = 1 + acceptance.cumprod(-1).sum(-1)[supervised.any(-1)].mean().item()
    assert tau == pytest.approx(metrics["train/tau_probabilistic"], rel=1e-5)
    rates = acceptance.sum((0, 1)) / supervised.sum((0, 1))
    assert rates.tolist() == pytest.approx([metrics[f"train/accept_rate@{slot}"] for slot in range(5)], rel=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_gradients_match_deepspec(golden, name, setting):
    data = golden(name)
    train, draft = data.train, data.draft
    positions = torch.arange(train["input_ids"].shape[1]).expand(len(train["input_ids"]), -1)
    layout = BlockLayout(train["anchor_positions"], train["block_keep_mask"].bool(), positions, 5)
    weights = options(data.losses[setting])
    slot_weights = position_weights(train["eval_mask"].bool(), weights.position_decay)
    blocks = AnchoredBlocks(layout, train["target_ids"], slot_weights)
    hidden = label_hidden(train["target_last_hidden_states"], blocks)
    loss = draft(train["input_ids"], train["target_hidden_states"], hidden, blocks, weights).loss
    assert loss.item() == pytest.approx(data.losses[setting]["total"], rel=1e-5, abs=1e-5)
    loss.backward()
    norms = data.info["train"]["grad_norms"]
    norms = norms.get(setting, norms)
    is_stored = data.info["train"].get("grad_loss_name") == setting
    assert not is_stored or any(key.startswith("grad.") for key in train)
    for key, parameter in draft.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert key in norms or key.endswith("layer_scalar"), key
        assert gradient.norm().item() == pytest.approx(norms.get(key, gradient.norm().item()), rel=1e-4, abs=1e-7), key
        if is_stored and f"grad.{key}" in train:
            torch.testing.assert_close(gradient, train[f"grad.{key}"], atol=1e-5, rtol=1e-4)
    assert norms.keys() <= dict(draft.named_parameters()).keys()
    assert all(parameter.grad is None for parameter in data.target.parameters())


# ---- the formulas


def take_chunks(monkeypatch, chunk_size):
    monkeypatch.setattr("hf_dspark.models.losses.CHUNK_ELEMENTS", 0)
    monkeypatch.setattr("hf_dspark.models.losses.MINIMUM_CHUNK", {"cpu": chunk_size, "cuda": chunk_size})


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(1.0, 0.0, 0.0), LossWeights(0.2, 0.3, 0.4, 0.7, None)])
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_gradients_in_chunks_equal_those_of_autograd(weights, chunk_size, monkeypatch):
    take_chunks(monkeypatch, chunk_size)
    torch.manual_seed(1)
    hidden, prefix = torch.randn(2, 3, 4, 6, requires_grad=True), torch.randn(2, 3, 4, 2, requires_grad=True)
    head, own, frozen = torch.randn(9, 6), torch.nn.Parameter(torch.randn(9, 2)), torch.randn(9)
    _, _, _, supervised, confidence_logits = random_blocks()
    labels, target_hidden = torch.randint(0, 9, (2, 3, 4)), torch.randn(2, 3, 4, 6)

    def logits_of(hidden, prefix):
        return torch.tanh(hidden @ head.T) * 3 + prefix @ own.T + frozen

    draft = SlotLogits(logits_of, (hidden, prefix), 9, (own, frozen))
    target = SlotLogits(lambda x: x @ head.T, (target_hidden,), 9)
    slot_weights = position_weights(supervised, weights.position_decay)
    losses = block_losses(draft, target, labels, slot_weights, weights, confidence_logits)
    leaves = [hidden, prefix, own, confidence_logits]
    (3.0 * losses.loss).backward()
    chunked = [leaf.grad.clone() for leaf in leaves]

    draft_log_probs = logits_of(hidden, prefix).log_softmax(-1)
    target_probs = (target_hidden @ head.T).softmax(-1)
    distance = (draft_log_probs.exp() - target_probs).abs().sum(-1)
    acceptance, c = 1 - distance.detach() / 2, confidence_logits.sigmoid()
    bce = -acceptance * c.log() - (1 - acceptance) * (1 - c).log()
    nll = -draft_log_probs.gather(-1, labels[..., None])[..., 0]
    soft_nll = -(target_probs * draft_log_probs).sum(-1)
    terms = (
        weights.cross_entropy_weight * nll + weights.l1_weight * distance
        + weights.confidence_weight * bce + weights.soft_cross_entropy_weight * soft_nll
    )  # fmt: skip
    total = (terms * slot_weights).sum() / (slot_weights.sum() + 1e-6)
    torch.testing.assert_close(losses.loss, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses.acceptance, (1 - distance / 2) * supervised, atol=1e-6, rtol=0)
    for ours, naive in zip(chunked, torch.autograd.grad(3.0 * total, leaves), strict=True):
        torch.testing.assert_close(ours, naive, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 100])
def test_logits_of_some_tokens_equal_those_of_all_without_the_others(chunk_size, monkeypatch):
    take_chunks(monkeypatch, chunk_size)
    torch.manual_seed(3)
    hidden = torch.randn(2, 3, 4, 6, requires_grad=True)
    head, token_ids, target_logits = torch.randn(5, 6), torch.tensor([6, 0, 3, 8, 2]), torch.randn(2, 3, 4, 9)
    _, _, _, supervised, confidence_logits = random_blocks()
    labels = token_ids[torch.randint(0, 5, (2, 3, 4))].masked_fill(~supervised, 7)  # 7 cannot be proposed
    target = SlotLogits(lambda x: x, (target_logits,), 9)
    some = SlotLogits(lambda x: x @ head.T, (hidden,), 9, token_ids=token_ids)
    whole_head = torch.zeros(9, 6).index_copy(0, token_ids, head)
    others = torch.full((9,), -torch.inf).index_fill(0, token_ids, 0.0)
    all_tokens = SlotLogits(lambda x: x @ whole_head.T + others, (hidden,), 9)
    found = []
    for draft in (some, all_tokens):
        slot_weights = position_weights(supervised, 4.0)
        losses = block_losses(draft, target, labels, slot_weights, PLAIN, confidence_logits)
        found.append((losses.loss, losses.l1, losses.acceptance, *torch.autograd.grad(losses.loss, hidden)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_a_data_token_that_the_draft_cannot_propose_has_no_cross_entropy_but_counts_in_all_other_terms():
    torch.manual_seed(3)
    hidden, confidence_logits = torch.randn(2, 3, 4, 6, requires_grad=True), torch.randn(2, 3, 4)
    head, token_ids, target_logits = torch.randn(5, 6), torch.tensor([6, 0, 3, 8, 2]), torch.randn(2, 3, 4, 9)
    labels = torch.randint(0, 9, (2, 3, 4))
    can_propose = torch.isin(labels, token_ids)
    draft = SlotLogits(lambda x: x @ head.T, (hidden,), 9, token_ids=token_ids)
    target, total = SlotLogits(lambda x: x, (target_logits,), 9), torch.tensor(24.0)

    def found(slots, weights=PLAIN):
        losses = block_losses(draft, target, labels, slots.float(), weights, confidence_logits, weight_sum=total)
        return (losses.loss, losses.l1, losses.acceptance, *torch.autograd.grad(losses.loss, hidden))

    whole, others = found(torch.ones_like(can_propose)), replace(PLAIN, cross_entropy_weight=0.0)
    for ours, *parts in zip(whole, found(can_propose), found(~can_propose, others), strict=True):
        torch.testing.assert_close(ours, sum(parts), atol=1e-6, rtol=1e-5)
    assert (whole[2] < 1).all() and whole[2][~can_propose].mean() > 0


def test_gradients_in_float16_survive_a_large_step():
    """Divided by the weights of 10^6 slots they would be zero before a loss scale reaches them."""
    torch.manual_seed(2)
    hidden, head = torch.randn(1, 2, 4, 8), torch.randn(50, 8)
    labels, supervised = torch.randint(0, 50, (1, 2, 4)), torch.ones(1, 2, 4, dtype=torch.bool)
    gradients = []
    for dtype in (torch.float32, torch.float16):
        leaf = hidden.clone().to(dtype).requires_grad_()
        draft = SlotLogits(lambda x: x @ head.to(x.dtype).T, (leaf,), 50)
        target = SlotLogits(lambda x: x @ head.T, (torch.zeros(1, 2, 4, 8),), 50)
        slot_weights = position_weights(supervised, 4.0)
        losses = block_losses(draft, target, labels, slot_weights, LossWeights(), weight_sum=torch.tensor(1e6))
        (losses.loss * 65536).backward()
        gradients.append(leaf.grad.float())
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


def test_a_pooled_denominator_makes_parts_add_up_to_the_whole():
    blocks = random_blocks()
    whole = losses_of(*blocks)
    parts = [losses_of(*(part[row] for part in blocks), weight_sum=whole.weight_sum).loss for row in range(2)]
    torch.testing.assert_close(sum(parts), whole.loss, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        evaluated = losses_of(*blocks)
    assert whole.loss.requires_grad and not evaluated.loss.requires_grad
    assert torch.equal(whole.loss, evaluated.loss) and torch.equal(whole.acceptance, evaluated.acceptance)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"l1_weight": -0.1}, "l1_weight must be 0 or more, got -0.1"),
        ({"cross_entropy_weight": math.nan}, "cross_entropy_weight must be 0 or more, got nan"),
        ({"cross_entropy_weight": 0, "l1_weight": 0, "confidence_weight": 0}, "nothing would be learnt"),
        ({"position_decay": 0.0}, "position_decay must be positive or None, got 0.0"),
    ],
)
def test_loss_weights_refuse_wrong_values(values, message):
    with pytest.raises(ValueError, match=message):
        LossWeights(**values)


def test_block_losses_ignore_unsupervised_slots():
    draft_logits, target_logits, labels, supervised, confidence_logits = random_blocks()
    plain = losses_of(draft_logits, target_logits, labels, supervised, confidence_logits)
    draft_nan, target_nan, confidence_nan = (
        torch.where(supervised.reshape(2, 3, 4, *[1] * (value.dim() - 3)), value.detach(), torch.nan)
        for value in (draft_logits, target_logits, confidence_logits)
    )
    losses = losses_of(draft_nan.requires_grad_(), target_nan, labels, supervised, confidence_nan)
    assert torch.equal(losses.loss, plain.loss) and (losses.acceptance[~supervised] == 0).all()
    losses.loss.backward()
    assert (draft_nan.grad[~supervised] == 0).all() and draft_nan.grad[supervised].abs().min() > 0
    nothing = losses_of(draft_logits, target_logits, labels, torch.zeros_like(supervised), confidence_logits)
    nothing.loss.backward()
    assert nothing.loss.item() == 0.0 and (draft_logits.grad == 0).all()


def test_block_losses_compute_in_float32_when_logits_are_bfloat16():
    draft_logits, target_logits, labels, supervised, confidence_logits = random_blocks()
    rounded = [value.detach().bfloat16() for value in (draft_logits, target_logits, confidence_logits)]
    low, wide = (
        losses_of(draft, target, labels, supervised, confidence).loss
        for draft, target, confidence in (rounded, [value.float() for value in rounded])
    )
    assert low.dtype == torch.float32 and torch.equal(low, wide)


# ---- position weights


def test_position_weights_decay_along_the_block():
    supervised = torch.tensor([[True, True, True, False], [True, False, False, False]])
    e = [math.exp(-slot / 4.0) for slot in range(3)]
    expected = torch.tensor([[e[0], e[1], e[2], 0.0], [e[0], 0.0, 0.0, 0.0]])
    torch.testing.assert_close(position_weights(supervised, 4.0), expected)
    assert position_weights(supervised, None).tolist() == supervised.float().tolist()
    assert ((position_weights(supervised, 1e-3) > 0) == supervised).all()  # however fast they decay
