"""What only a GPU can tell: its kernels, its synchronisation, several devices. `make test-gpu`.

HF_DSPARK_DEVICE=cpu runs the same tests elsewhere, to see that they themselves are right.
"""

import copy
import os
import warnings

import pytest
import torch
from transformers import Qwen3ForCausalLM

from hf_dspark import (
    DecodingOptions,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    Scheduler,
    generate_many,
)

from ..rows import padded
from .test_pretended_device import LIMITS

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 30, 2, 7], [3, 8], [11, 12, 13, 14, 15, 16, 17, 18]]
NEW_TOKENS = 40


@pytest.fixture(scope="session")
def device() -> torch.device:
    asked = os.environ.get("HF_DSPARK_DEVICE", "cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(asked)


@pytest.fixture
def exact_products(device):
    """Greedy identity is a statement about exact products: float32 without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def there(prompts: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: part.to(device) for name, part in padded(prompts).items()}


def decode(target, inputs, **options) -> torch.Tensor:
    return target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=15)], ids=["chains", "trees"])
def test_three_greedy_rows_are_identical_to_plain_decoding(pair, device, attention, policy):
    target, draft = (model.to(device) for model in pair)
    draft.decoding = DecodingOptions(policy=policy)
    target.set_attn_implementation(attention)
    inputs = there(PROMPTS, device)
    assert torch.equal(decode(target, inputs), decode(target, inputs, assistant_model=draft))
    assert draft.last_stats.tau > 1.5  # the draft is a trained one: a wrong cache position would show here


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=15)], ids=["chains", "trees"])
def test_compiled_rounds_are_identical_to_plain_decoding(pair, device, policy, rows):
    target, draft = (model.to(device) for model in pair)
    draft.decoding = DecodingOptions(policy=policy, compile=True)
    inputs = there(PROMPTS[:rows], device)
    expected = decode(target, inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without compiled graphs")
        for _ in range(3):  # CUDA graphs are recorded in the second round of a size, and replayed after it
            assert torch.equal(expected, decode(target, inputs, assistant_model=draft))
    assert draft.last_stats.tau > 1.5


@pytest.mark.usefixtures("exact_products")
def test_a_random_draft_changes_nothing(make_target, make_draft, device):
    target = make_target().to(device)
    draft = make_draft(target).to(device)
    inputs = there(PROMPTS, device)
    assert torch.equal(decode(target, inputs), decode(target, inputs, assistant_model=draft))


@pytest.mark.usefixtures("exact_products")
def test_an_eagle3_draft_changes_nothing(make_target, device):
    target = make_target().to(device)
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config)).to(device).eval()
    inputs = there(PROMPTS, device)
    assert torch.equal(decode(target, inputs), decode(target, inputs, assistant_model=draft))


def test_tokens_in_bfloat16_are_the_best_up_to_rounding(pair, device):
    target, draft = (copy.deepcopy(model).to(device, torch.bfloat16) for model in pair)
    inputs = there(PROMPTS[:1], device)
    sequence = decode(target, inputs, assistant_model=draft)
    logits = target(sequence).logits[0, len(PROMPTS[0]) - 1 : -1].float()
    chosen = logits.gather(1, sequence[0, len(PROMPTS[0]) :, None])[:, 0]
    rounding = 2.0**-7 * logits.abs().amax(dim=1)  # bfloat16 keeps eight bits; two passes round apart
    assert ((logits.amax(dim=1) - chosen) <= 4 * rounding).all()


@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=6)], ids=["chains", "trees"])
def test_sampled_tokens_follow_the_targets_distribution(make_target, make_draft, device, policy):
    """The first two tokens of many rows, against the distribution that the target itself gives."""
    target = make_target(vocab_size=8).to(device)
    draft = make_draft(target, block_size=3).to(device)
    draft.decoding = DecodingOptions(policy=policy)
    rows = 4000
    ids = torch.tensor([[1, 2, 3]], device=device)
    torch.manual_seed(0)
    sampled = target.generate(
        ids,
        do_sample=True,
        top_k=0,
        max_new_tokens=2,
        num_return_sequences=rows,
        assistant_model=draft,
        pad_token_id=0,
    )[:, 3:]
    with torch.no_grad():
        first = target(ids).logits[0, -1].float().softmax(dim=-1)
        pairs = torch.cat([ids.expand(8, 3), torch.arange(8, device=device)[:, None]], dim=1)
        distribution = first[:, None] * target(pairs).logits[:, -1].float().softmax(dim=-1)
    counts = torch.bincount(sampled[:, 0] * 8 + sampled[:, 1], minlength=64).float().cpu()
    distance = 0.5 * (counts / rows - distribution.flatten().cpu()).abs().sum()
    assert distance < 3 * (64 / rows) ** 0.5 / 2


@pytest.mark.usefixtures("exact_products")
def test_a_queue_gives_each_prompt_its_plain_answer(pair, device):
    target, draft = (model.to(device) for model in pair)
    answers = generate_many(
        target, draft, PROMPTS * 3, batch_size=4, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0,
        progress=False,
    )  # fmt: skip
    for done in answers:
        prompt = (PROMPTS * 3)[done.index]
        plain = decode(target, there([prompt], device))[0, len(prompt) :].tolist()
        assert done.token_ids.tolist() == plain[: len(done.token_ids)]


def test_one_training_step_lowers_the_loss(make_target, make_draft, device, tmp_path):
    target = make_target().to(device)
    draft = make_draft(target)
    rows = [{"input_ids": list(range(1, 33)), "loss_mask": [1] * 32}] * 8
    args = DSparkTrainingArguments(
        tmp_path, max_steps=8, learning_rate=1e-2, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=device.type == "cpu", bf16=device.type == "cuda",
    )  # fmt: skip
    trainer = DSparkTrainer(draft, target, args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LIMITS)
def test_a_round_waits_no_more_often_than_the_pretended_device_says(pair, device, name):
    if device.type != "cuda":
        pytest.skip("CUDA alone tells when it is waited for")
    policy, how, *_, most = LIMITS[name]
    target, draft = (model.to(device) for model in pair)
    draft.decoding, found = DecodingOptions(policy=policy, prompt_lookup=False), []
    for length in (8, 8, 32):  # the first one warms up
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assistant = {} if policy is None else {"assistant_model": draft}
                options = {"max_new_tokens": length, "pad_token_id": 0, "eos_token_id": None}
                target.generate(**there(PROMPTS[-1:], device), **assistant, **how, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchronizing CUDA operation" in str(each.message) for each in told)
        found.append((length if policy is None else draft.last_stats.rounds, waits))
    (few, before), (many, after) = found[1:]
    assert (after - before) / (many - few) <= most


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.usefixtures("exact_products")
def test_a_target_on_two_devices_decodes_the_same_tokens(pair, tmp_path):
    target, draft = (model.cpu() for model in pair)
    plain = decode(target, there(PROMPTS, torch.device("cpu")))
    target.save_pretrained(tmp_path)
    layers = {f"model.layers.{index}": int(index > 0) for index in range(target.config.num_hidden_layers)}
    places = layers | {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    spread = Qwen3ForCausalLM.from_pretrained(tmp_path, device_map=places).eval()
    output = decode(spread, there(PROMPTS, torch.device("cuda:0")), assistant_model=draft.to("cuda:0"))
    assert torch.equal(output.cpu(), plain)
