"""Let a target answer prompts in its own words: batched sampling at temperature 1, resumable, one JSON line per
answer.

python examples/regenerate.py --target out/target --train_file train.jsonl --output_file out/answers.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Writes new keys and values in place: a `DynamicLayer` copies the whole history at every step."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.used = 0
        start, self.used = self.used, self.used + key_states.shape[2]
        for name, new in (("keys", key_states), ("values", value_states)):
            store = getattr(self, name)
            if store.dim() < 4 or store.shape[2] < self.used:
                grown = new.new_empty(*new.shape[:2], self.used + 128, new.shape[3])
                if start:
                    grown[:, :, :start] = store[:, :, :start]
                setattr(self, name, grown)
            getattr(self, name)[:, :, start : self.used] = new
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self, *args, **kwargs) -> int:
        return self.used if self.is_initialized else 0


@torch.inference_mode()
def sample_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    num_samples: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return `num_samples` sampled continuations per prompt, in order, cut behind eos; finished rows leave."""
    encoded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    cache = DynamicCache(config=target.config)
    cache.layers = [PreallocatedLayer() for _ in cache.layers]
    mask, positions = encoded["attention_mask"], encoded["attention_mask"].cumsum(-1).sub(1).clamp_min(0)
    logits = target(encoded["input_ids"], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    cache.batch_repeat_interleave(num_samples)
    logits, mask = logits[:, -1].repeat_interleave(num_samples, 0), mask.repeat_interleave(num_samples, 0)
    answers: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
    rows = torch.arange(len(answers))
    for _ in range(max_new_tokens):
        tokens = torch.multinomial(logits.float().softmax(-1), 1)
        for row, token in zip(rows.tolist(), tokens[:, 0].tolist(), strict=True):
            answers[row].append(token)
        alive = tokens[:, 0] != tokenizer.eos_token_id
        if not alive.any():
            break
        if alive.sum() < len(alive):
            cache.batch_select_indices(alive.nonzero()[:, 0])
            rows, tokens, mask = rows[alive], tokens[alive], mask[alive]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits = target(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
    return answers


def regenerate(
    target_path: str, train_file: str, output_file: str, num_samples: int = 2, batch_prompts: int = 64, seed: int = 0
) -> None:
    """Answer every question `num_samples` times; questions already in `output_file` are skipped."""
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    questions = [json.loads(line)["question"] for line in Path(train_file).read_text().splitlines()]
    prompts = [f"Question: {question}\nAnswer:" for question in questions]
    output = Path(output_file)
    output.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["prompt"] for line in output.read_text().splitlines()} if output.exists() else set()
    # Similar lengths together: little padding. Seeded by what is done, so a resumed run does not repeat its draws.
    remaining = sorted((prompt for prompt in prompts if prompt not in done), key=len)
    torch.manual_seed(seed + len(done))
    with output.open("a") as stream, tqdm(total=len(remaining), unit="prompt") as progress:
        for start in range(0, len(remaining), batch_prompts):
            batch = remaining[start : start + batch_prompts]
            answers = sample_answers(target, tokenizer, batch, num_samples, max_new_tokens=320)
            for index, ids in enumerate(answers):
                stream.write(json.dumps({"prompt": batch[index // num_samples], "completion_ids": ids}) + "\n")
            stream.flush()
            progress.update(len(batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train_file", required=True, help="JSONL with a 'question' field")
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--num_samples", type=int, default=2)
    options = parser.parse_args()
    regenerate(options.target, options.train_file, options.output_file, options.num_samples)
