"""`DSparkTrainer`: transformers' `Trainer` for drafts, with the frozen target in process, its states on disk, or both.

Knows nothing of generation, nor of what kind of draft it trains. One step reads top to bottom in
[`DSparkTrainer.compute_loss`].
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HubStrategy, get_last_checkpoint
from transformers.utils import PushInProgress

from ..data.conversations import prepare_rows
from ..formats.files import read_json
from ..maths.losses import LossWeights, position_weights
from ..models.auto import load_draft
from ..models.modeling_draft import DraftModel, DraftTrainingOutput
from .blocks import (
    AnchoredBlocks,
    BlockCollator,
    PackedRows,
    PackedStream,
    cut_blocks,
    label_hidden,
    require_separable_documents,
    sample_anchors,
)
from .feature_cache import FeatureCache
from .metrics import BlockMetrics
from .target_source import TargetSource

RUN_FACTS_FILE = "dspark_run.json"
# What may differ in the config of a draft that is trained on; `Trainer` sets the ids of special tokens.
NO_FACTS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "sts_temperatures", "torch_dtype", "transformers_version",
}  # fmt: skip
SPLITS = ("train", "eval")
# What a result file says about a run; no paths, no tokens.
REPORTED_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed",
    "num_anchors", "cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight",
    "position_decay", "max_length", "packing", "chat_template_kwargs",
)  # fmt: skip


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """Arguments of [`DSparkTrainer`]; those of `TrainingArguments` keep their meaning.

    What a batch, an anchor and a loss are, belongs here; what the draft is, to its config.

    Args:
        num_anchors (`int`): Blocks per row and step at most. Rows hold several documents when packed.
        cross_entropy_weight, l1_weight, confidence_weight (`float`): Weights of the three losses (DSpark Eq. 12).
        soft_cross_entropy_weight (`float`): Weight of the cross-entropy to the target's law.
        position_decay (`float`, *optional*): Slots after which a loss weighs 1/e; `None` weighs all slots alike.
        max_length (`int`, *optional*): Rows are cut to this many tokens; `None` leaves them as they are.
        packing (`bool`): Join short documents into rows of `max_length`.
        chat_template_kwargs (`dict`, *optional*): For the tokenizer's chat template, such as
            `{"enable_thinking": False}`.
        feature_cache_dir (`str`, *optional*): The target's states are read from this folder as far as they are there,
            and computed and added otherwise. Without a target, all must be there.
        dataset_num_proc (`int`, *optional*): Processes that tokenise.
    """

    num_anchors: int = field(default=64, metadata={"help": "Blocks per row and step at most."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy (Eq. 9)."})
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance to the target's law (Eq. 10)."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss (Eq. 11)."})
    soft_cross_entropy_weight: float = field(
        default=0.0, metadata={"help": "Weight of the cross-entropy to the target's law (Eagle3's objective)."}
    )
    position_decay: float | None = field(
        default=4.0, metadata={"help": "Slots after which a loss weighs 1/e; None weighs all slots alike."}
    )
    max_length: int | None = field(default=2048, metadata={"help": "Rows are cut to this many tokens."})
    packing: bool = field(default=False, metadata={"help": "Join short documents into rows of max_length."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "For the chat template, as JSON, such as '{\"enable_thinking\": false}'."}
    )
    feature_cache_dir: str | None = field(
        default=None, metadata={"help": "Where the target's states are kept; filled while training if need be."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    # Trainer parses strings for these fields: one more than its own.
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat_template_kwargs"]

    def __post_init__(self) -> None:
        super().__post_init__()
        # The rows' own columns are needed; the model's forward takes blocks.
        self.remove_unused_columns = False
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()  # else it warns
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")
        if self.packing and self.max_length is None:
            raise ValueError("packing joins documents into rows of max_length tokens: give one, got None")
        if self.push_to_hub and self.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={self.hub_strategy.value!r} would publish pickled optimizer states, which nobody "
                "should load: choose 'every_save' or 'end'"
            )
        self.loss_weights()  # refuses wrong values

    def loss_weights(self) -> LossWeights:
        """Return the weights of the losses."""
        return LossWeights(
            self.cross_entropy_weight,
            self.l1_weight,
            self.confidence_weight,
            self.soft_cross_entropy_weight,
            self.position_decay,
        )


class DSparkTrainer(Trainer):
    """Trains a draft, DSpark, DFlash or Eagle3, on conversations that its target wrote.

    Args:
        model ([`DraftModel`] or `str`): The draft, or where it is loaded from. Only its own parameters
            are trained.
        target (`PreTrainedModel`, `str`, *optional*): The frozen target, in process: any causal LM, quantised or
            spread over devices as it may be. Without one, `args.feature_cache_dir` must hold its states.
        args ([`DSparkTrainingArguments`], *optional*): Run facts.
        train_dataset, eval_dataset (*optional*): Rows of `messages`, of `prompt` and `completion`, of `text`, or of
            `input_ids` and `loss_mask`; see [`~conversations.prepare_rows`]. `eval_dataset` may be a dictionary.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; that of the target's
            repository unless given.
        kwargs: As for `Trainer`.

    Raises:
        ValueError: If draft, target, cached states and data do not fit, before anything is trained.

    DSpark Section 3.3.
    """

    def __init__(
        self,
        model: DraftModel | str,
        target: PreTrainedModel | str | None = None,
        args: DSparkTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or DSparkTrainingArguments()
        if not isinstance(args, DSparkTrainingArguments):
            raise TypeError(f"args must be DSparkTrainingArguments, got {type(args).__name__}")
        if args.n_gpu > 1:  # DataParallel cannot split blocks, nor place a borrowed head
            warnings.warn("training on one GPU of several: start it with `accelerate launch` to use all", stacklevel=2)
            args._n_gpu = 1
        # Updates are smaller than half precision can hold: autocast computes in it, the weights stay wide.
        model = load_draft(model, dtype=torch.float32) if isinstance(model, str) else model
        if not hasattr(model, "block_layout"):
            raise TypeError(
                f"the first argument is the draft that is trained, the second its target; got {type(model).__name__} "
                "first: are they swapped?"
            )
        if model.dtype in (torch.float16, torch.bfloat16):
            warnings.warn(
                f"the draft's weights are {model.dtype}, in which small updates are lost: load it with "
                "dtype=torch.float32, and set bf16=True to compute in bfloat16",
                stacklevel=2,
            )
        if args.soft_cross_entropy_weight > 0 and model.draft_token_ids() is not None:
            raise ValueError(
                "a draft with a pruned vocabulary gives some tokens no probability, so its cross-entropy to the "
                f"target's law is infinite: set soft_cross_entropy_weight=0, got {args.soft_cross_entropy_weight}"
            )
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto") if isinstance(target, str) else target
        if processing_class is None:
            processing_class = _tokenizer_of(target)
        cache = None
        if args.feature_cache_dir is not None:
            cache = FeatureCache(args.feature_cache_dir, model.config, target, args.process_index)
        if target is None and cache is None:
            raise ValueError(
                "the target's states are needed: pass target=..., or args.feature_cache_dir that holds them"
            )
        self.target = target
        self.source = TargetSource(target, cache, model.config, args.device)
        self.source.lend_to(model)
        if args.packing and target is not None:
            require_separable_documents(target, model.config.target_layer_ids)
        self._read_rows = partial(
            prepare_rows, tokenizer=processing_class, vocab_size=model.config.vocab_size, max_length=args.max_length,
            chat_template_kwargs=args.chat_template_kwargs, num_proc=args.dataset_num_proc,
        )  # fmt: skip
        several = isinstance(eval_dataset, dict)
        given = [train_dataset, *(eval_dataset.values() if several else [eval_dataset])]
        # One process at a time: the first one tokenises for all, and makes the cache's folder.
        with args.main_process_first():
            # A block need not fit into rows that only evaluate.
            sizes = [model.config.block_size, *(1 for _ in given[1:])]
            read = [
                None if part is None else self._read_rows(part, block_size=size)
                for part, size in zip(given, sizes, strict=True)
            ]
            self.source.require_rows([rows for rows in read if hasattr(rows, "__len__")], args.process_index == 0)
        self._packed_length = args.max_length if args.packing else None
        train_dataset, *evaluated = map(self._packed, read)
        eval_dataset = dict(zip(eval_dataset, evaluated, strict=True)) if several else evaluated[0]
        if any(isinstance(part, IterableDataset) for part in (train_dataset, *evaluated)):
            # Else accelerate joins the batches of several processes, which are of different lengths.
            args.accelerator_config.dispatch_batches = args.accelerator_config.dispatch_batches or False
        pad_token_id = getattr(processing_class, "pad_token_id", None)
        kwargs.setdefault("data_collator", BlockCollator(pad_token_id or 0))
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, **kwargs,
        )  # fmt: skip
        self.add_callback(_RunCallback(self))
        # compute_loss divides by the weights of the whole step, over accumulation steps and processes.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.loss_weights = args.loss_weights()
        self._metrics = {split: BlockMetrics(model.config.block_size) for split in SPLITS}
        self._eval_batches = 0
        self._reported = "eval_"

    def _packed(self, rows: Any) -> Any:
        """Join rows if asked to; returns `None` for `None`."""
        if rows is None or self._packed_length is None:
            return rows
        return (PackedRows if hasattr(rows, "__len__") else PackedStream)(rows, self._packed_length)

    # One step

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """Draw the anchors of all batches of a step, so that the weights of the whole step are known beforehand."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight_sum = torch.zeros((), device=device)
        for index, batch in enumerate(batches):
            # The same anchors, whichever process has the batch: two processes equal two accumulation steps.
            number = index * self.args.world_size + self.args.process_index
            batch["blocks"] = self._sample_blocks(batch, (self.state.global_step, number))
            weights = position_weights(batch["blocks"].supervised, self.loss_weights.position_decay)
            weight_sum += weights.sum().to(device)
        return batches, self.accelerator.reduce(weight_sum, "sum")

    def _sample_blocks(self, batch: dict[str, torch.Tensor], key: tuple[int, ...]) -> AnchoredBlocks:
        # Keyed, not drawn from the global state: a resumed run has the same anchors without replaying any.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        anchors, real = sample_anchors(batch["loss_mask"], batch["position_ids"], self.args.num_anchors, generator)
        layout = self._draft.block_layout(anchors, real, batch["position_ids"])
        return cut_blocks(batch["input_ids"], batch["loss_mask"], layout, self._draft.draft_token_ids())

    @property
    def _draft(self) -> DraftModel:
        return self.accelerator.unwrap_model(self.model)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, DraftTrainingOutput]:
        """One training step: the target's states, anchored blocks, the draft's losses.

        Args:
            model: The draft, wrapped as the launcher wants it.
            inputs: A batch, with `blocks` that are sampled already.
            return_outputs: Whether to return the draft's output as well.
            num_items_in_batch: Sum of the slots' weights over the whole step: all micro-batches of all processes.
        """
        blocks: AnchoredBlocks = inputs["blocks"]
        states = self.source.states(inputs, self._draft, packed=self.args.packing)
        output = model(
            inputs["input_ids"], states.features, label_hidden(states.last_hidden, blocks), blocks.layout,
            blocks.labels, blocks.supervised, self.loss_weights, num_items_in_batch,
        )  # fmt: skip
        self._metrics["train" if model.training else "eval"].add(output, blocks.supervised)
        loss = output.loss
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, output) if return_outputs else loss

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One forward and backward pass; stops before a loss that is not a number reaches the weights."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        bad = (~torch.isfinite(loss)).float()
        if self.args.world_size > 1:  # all processes stop, or the others would wait for ever
            bad = self.accelerator.reduce(bad, "sum")
        if bad:
            raise FloatingPointError(self._save_bad_batch(inputs, loss))
        return loss

    def _save_bad_batch(self, inputs: dict[str, Any], loss: torch.Tensor) -> str:
        path = (
            Path(self.args.output_dir)
            / f"bad_batch_step_{self.state.global_step}_{self.args.process_index}.safetensors"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in inputs.items() if torch.is_tensor(value)}
        tensors["anchor_positions"] = inputs["blocks"].layout.anchor_positions.cpu().contiguous()
        save_file(tensors, path)
        states = self.source.states(inputs, self._draft, packed=self.args.packing)
        finite = bool(torch.isfinite(states.features).all() and torch.isfinite(states.last_hidden).all())
        weights = ((name, getattr(value, "_local_tensor", value)) for name, value in self._draft.named_parameters())
        broken = [name for name, value in weights if not torch.isfinite(value).all()]
        if not finite:
            reason = "the target's own states are not finite: load it in bfloat16 or float32 instead of float16"
        elif broken:
            reason = f"the draft's weights are not finite already ({broken[0]}): resume from an earlier checkpoint"
        else:
            reason = "lower learning_rate, set max_grad_norm, or train in bfloat16 instead of float16"
        return (
            f"the loss is {loss.item()} at step {self.state.global_step}; the weights were not changed by it, and the "
            f"batch is in {path}. Likely cure: {reason}."
        )

    # Evaluation and reports

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Evaluation needs the loss and the metrics, no predictions."""
        inputs = self._prepare_inputs(inputs)
        number = self._eval_batches * self.args.world_size + self.args.process_index
        self._eval_batches += 1
        inputs["blocks"] = self._sample_blocks(inputs, (-1, number))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate with the same anchors each time, leaving the training's random state alone.

        Args:
            eval_dataset: Rows as for the trainer, or the name of one of its evaluation sets; its own unless given.
            ignore_keys, metric_key_prefix: As for `Trainer`.
        """
        own = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else (self.eval_dataset,)
        is_new = not isinstance(eval_dataset, (str, dict, type(None)))
        if is_new and not any(eval_dataset is part for part in own):
            eval_dataset = self._packed(self._read_rows(eval_dataset, block_size=1))
        self._eval_batches = 0
        self._metrics["eval"].reset()
        self._reported = f"{metric_key_prefix}_"
        try:
            with torch.random.fork_rng(devices=[]):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            if not self.is_in_train:
                self.source.close()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the batches since the last report add up to, over all processes."""
        # In place: evaluate() returns this dictionary, and the best model is chosen from it.
        if f"{self._reported}loss" in logs:
            values = self._metrics["eval"].reduced(self.accelerator, self.loss_weights)
            logs.update({f"{self._reported}{name}": value for name, value in values.items()})
            self._metrics["eval"].reset()
        elif "loss" in logs:
            values = self._metrics["train"].reduced(self.accelerator, self.loss_weights)
            logs.update({name: value for name, value in values.items() if name != "loss"})
            self._metrics["train"].reset()
        super().log(logs, start_time)

    # Sharing

    def run_report(self) -> dict[str, Any]:
        """Return what a result file of this run holds: its arguments, rows, steps, and what it reported last."""
        arguments = self.args.to_dict()
        of_split = (
            [entry for entry in self.state.log_history if name in entry] for name in ("loss", f"{self._reported}loss")
        )
        metrics = {
            name: value if math.isfinite(value) else None  # a norm of gradients may be anything
            for entries in of_split
            for name, value in (entries[-1] if entries else {}).items()
        }
        return {
            "arguments": {name: arguments[name] for name in REPORTED_ARGUMENTS} | {"processes": self.args.world_size},
            "num_rows": len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None,
            "steps": self.state.global_step,
            "metrics": metrics,
        }

    def create_model_card(
        self, model_name: str | None = None, dataset: str | list[str] | None = None, **card: Any
    ) -> None:
        """Write what belongs to a draft's repository besides weights into `args.output_dir`.

        These are the result file of this run (`results/training.json`), the model card made of all result files in
        `results`, and the code for `trust_remote_code`. The draft must have been saved there.

        Args:
            model_name (`str`, *optional*): Title of the card; the repository's name unless given.
            dataset (`str` or `list[str]`, *optional*): Ids of the data sets on the Hub.
            card: For [`~model_card.model_card`]: `license`, `language`, `tags`, ...
        """
        if not self.is_world_process_zero():
            return
        # Of weights spread over processes, this one has a part: what was saved is whole.
        draft = type(self._draft).from_pretrained(self.args.output_dir) if self.is_fsdp_enabled else self._draft
        named = {"datasets": [dataset] if isinstance(dataset, str) else dataset} if dataset else {}
        self._draft.sharing.write_training_card(
            draft, self.target, self.args.output_dir, self.run_report(),
            repo_id=self.hub_model_id or model_name, **named, **card,
        )  # fmt: skip

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> str | Future | None:
        """Save the draft and publish it, with its card and code; nothing else of `args.output_dir` is uploaded.

        Args:
            commit_message (`str`, *optional*): Of the commit.
            blocking (`bool`): Whether to wait for the upload.
            token, revision, private (*optional*): As in `args`, which they come before.
            card: For [`~DSparkTrainer.create_model_card`].

        Returns:
            `str`: URL of the commit, or a future of it; `None` but in the main process.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**card)
        self._finish_current_push()
        upload = partial(
            self._draft.sharing.upload_repository, self.args.output_dir, self.hub_model_id, token=token,
            private=self.args.hub_private_repo if private is None else private,
            revision=self.args.hub_revision if revision is None else revision, commit_message=commit_message,
        )  # fmt: skip
        return upload() if blocking else HfApi().run_as_future(upload)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the draft of a checkpoint while training goes on.

        In place of Trainer's, which uploads all of `args.output_dir`: caches, and pickled arguments with the token.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        # What an earlier draft has left there, code, results and card, is replaced: of these weights nothing is known.
        self._draft.sharing.write_remote_code(checkpoint_folder)
        self._draft.sharing.write_card(checkpoint_folder)
        upload = partial(
            self._draft.sharing.upload_repository, checkpoint_folder, self.hub_model_id, token=self.args.hub_token,
            revision=self.args.hub_revision, commit_message=f"Training in progress, step {self.state.global_step}",
        )  # fmt: skip
        job = HfApi().run_as_future(upload)
        if self.push_in_progress is None or not busy:
            self.push_in_progress = PushInProgress([job])
        else:
            self.push_in_progress.jobs.append(job)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a resumed run must have the facts of the one it continues.

        Raises:
            ValueError: If it does not, naming each difference.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no checkpoint to resume from in {self.args.output_dir}")
        if resume_from_checkpoint:
            resume_from_checkpoint = str(resume_from_checkpoint)
            self._require_same_run(Path(resume_from_checkpoint) / RUN_FACTS_FILE)
        if self._draft.config.sts_temperatures:
            warnings.warn("the draft was calibrated before this training: calibrate it again", stacklevel=2)
            self._draft.config.sts_temperatures = None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.source.close()

    def run_facts(self) -> dict[str, Any]:
        """Return what a run must have in common with the one it continues."""
        args, config = self.args, self._draft.config.to_dict()
        facts = {
            "batches per step (processes x gradient_accumulation_steps)": args.world_size
            * args.gradient_accumulation_steps,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "seed": args.seed,
            "data_seed": args.data_seed,
            "num_anchors": args.num_anchors,
            "max_length": args.max_length,
            "packing": args.packing,
            "rows": len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None,
            "first rows": self._first_rows(),
            **{f"loss weights, {name}": value for name, value in asdict(self.loss_weights).items()},
            **{f"draft, {name}": value for name, value in config.items() if name not in NO_FACTS},
        }
        return json.loads(json.dumps(facts, default=str))

    def _first_rows(self) -> str | None:
        """Return a hash of the first rows; `None` of a stream, which is not read twice."""
        if not (hasattr(self.train_dataset, "__len__") and hasattr(self.train_dataset, "__getitem__")):
            return None
        rows = [list(self.train_dataset[place]["input_ids"]) for place in range(min(8, len(self.train_dataset)))]
        return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()

    def _require_same_run(self, path: Path) -> None:
        if not path.exists():  # a checkpoint of another trainer
            return
        before, now = read_json(path), self.run_facts()
        different = [
            f"{name}: then {before[name]}, now {now[name]}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        if different:
            raise ValueError(
                f"{path.parent} belongs to a run with other facts ({'; '.join(different)}): its loss curve cannot be "
                "continued. Restore them (half the processes need twice the gradient_accumulation_steps), or start "
                "anew from its weights with DSparkDraftModel.from_pretrained."
            )


class _RunCallback(TrainerCallback):
    """Leaves the facts of the run in each checkpoint; lets each epoch read what other processes have cached."""

    def __init__(self, trainer: DSparkTrainer) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.source.refresh()

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / RUN_FACTS_FILE).write_text(json.dumps(self._trainer.run_facts(), indent=1) + "\n")


def _tokenizer_of(target: PreTrainedModel | None) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in the target's repository; `None` if there is none: tokenised rows need none."""
    name = getattr(target, "name_or_path", "")
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
