"""Train a small target: a BPE tokenizer and a deep, thin model. Resumes where it stopped.

python examples/train_target.py --train_file train.jsonl --test_file test.jsonl --output_dir out/target

trains the demo's target on GSM8K. Rows have `question` and `answer`, or `prompt` and `completion`. `--model_type lfm2`
trains a hybrid of the same size, which has convolutions in two of three layers.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from muon import MuonWithAdamW
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

EOS, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"


def read_texts(paths: list[str]) -> list[str]:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().strip().split("\n")]
    return [
        f"{row['prompt']}{row['completion']}{EOS}"
        if "prompt" in row
        else f"Question: {row['question']}\nAnswer: {row['answer']}{EOS}"
        for row in rows
    ]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """One digit is one token, as in Qwen3; the mask token is what a draft's block is filled with."""
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOS, PAD, MASK], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, mask_token=MASK)


def new_model(model_type: str, num_hidden_layers: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return an untrained model of 256 dimensions; its last layer is attention."""
    common = {
        "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 832, "num_attention_heads": 4,
        "num_hidden_layers": num_hidden_layers, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    if model_type == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=64, **common))
    kinds = [
        "full_attention" if (num_hidden_layers - 1 - layer) % 3 == 0 else "conv" for layer in range(num_hidden_layers)
    ]
    return Lfm2ForCausalLM(Lfm2Config(layer_types=kinds, block_auto_adjust_ff_dim=False, **common))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True, nargs="+", help="GSM8K train.jsonl, or files of your own")
    parser.add_argument("--test_file", required=True, nargs="+", help="for held-out perplexity only")
    parser.add_argument("--output_dir", default="out/target")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--num_hidden_layers", type=int, default=12)
    parser.add_argument("--model_type", choices=("qwen3", "lfm2"), default="qwen3")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_texts, test_texts = read_texts(options.train_file), read_texts(options.test_file)
    tokenizer = train_tokenizer(train_texts, vocab_size=2048)
    model = new_model(options.model_type, options.num_hidden_layers, tokenizer)
    config = model.config
    print(f"{model.num_parameters() / 1e6:.2f} M parameters")
    arguments = TrainingArguments(
        output_dir=options.output_dir, num_train_epochs=options.epochs, per_device_train_batch_size=40,
        per_device_eval_batch_size=40, learning_rate=4e-3, lr_scheduler_type="linear", warmup_steps=30,
        logging_steps=10, eval_strategy="epoch", save_steps=60, save_total_limit=1,
        train_sampling_strategy="group_by_length", report_to="none", seed=0,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=[{"input_ids": ids} for ids in tokenizer(train_texts)["input_ids"]],
        eval_dataset=[{"input_ids": ids} for ids in tokenizer(test_texts)["input_ids"]],
        processing_class=tokenizer,
        optimizers=(MuonWithAdamW(model.named_parameters(), lr=4e-3, weight_decay=0.1), None),
    )  # fmt: skip
    output_dir = Path(options.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir) if output_dir.exists() else None)
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    print(f"held-out perplexity per token: {perplexity:.3f}")
    trainer.state.save_to_json(str(output_dir / "trainer_state.json"))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
        config.eos_token_id,
        config.pad_token_id,
    )
    model.config.use_cache = True  # Trainer had switched it off
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    main()
