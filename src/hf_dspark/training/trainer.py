"""transformers' `Trainer` for drafts; one training step reads top to bottom in [`DSparkTrainer.compute_loss`]."""

import hashlib
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, PredictionOutput, rotate_checkpoints
from transformers.utils import PushInProgress

from ..data.examples import Stream, prepare_examples
from ..files import shortened
from ..formats.translate import exports_of, not_exported
from ..models import publisher
from ..models.auto import load_draft, require_draft
from ..models.block_attention import BlockLayout
from ..models.configuration_draft import CALIBRATED
from ..models.losses import BlockLosses, LossWeights
from ..models.modeling_draft import AnchoredBlocks, DraftModel
from .arguments import DSparkTrainingArguments
from .blocks import cut_blocks, label_hidden, sample_anchors
from .metrics import BlockMetrics
from .resume import RUN_FACTS_FILE, last_checkpoint, require_continuable, write_run_facts
from .rows import COLUMNS, PackedRows, collate, packed_in_order
from .target_states import TargetSource

FEW_STEPS = 50  # fewer train little
# Arguments of `Trainer` that would do nothing here, or something else, and what does what is wanted.
_OWN_LOSS = "the losses of a draft are its own: set cross_entropy_weight, l1_weight, ... in DSparkTrainingArguments"
_OWN_METRICS = (
    "no logits of whole rows are kept, from which it could be computed: evaluate() and predict() report loss, tau and "
    "acceptance_k, a callback's on_evaluate gets them, and hf_dspark.evaluate() measures whole answers"
)
REFUSED = {
    "compute_metrics": _OWN_METRICS,
    "preprocess_logits_for_metrics": _OWN_METRICS,
    "compute_loss_func": _OWN_LOSS,
    "label_smoothing_factor": _OWN_LOSS,
    "neftune_noise_alpha": "a draft has no embedding of its own that noise could be added to",
    "model_init": "a draft is made before its trainer: pass it as model, one trainer for each trial",
}


class DSparkTrainer(Trainer):
    """Trains a draft, DSpark, DFlash or Eagle3, on conversations that its target wrote.

    Args:
        model ([`DraftModel`] or `str`): The draft, or where it is loaded from. Only its own parameters are trained.
        target (`PreTrainedModel`, `str`, *optional*): The frozen target, in process: any causal LM, quantised or
            spread over devices as it may be. Without one, `args.feature_cache_dir` must hold its states.
        args ([`DSparkTrainingArguments`], *optional*): Run facts.
        train_dataset, eval_dataset (*optional*): Rows of `messages`, of `prompt` and `completion`, of `text`, or of
            `input_ids` and `loss_mask`; see [`~examples.prepare_examples`]. `eval_dataset` may be a dictionary.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; that of the target's
            repository unless given.
        kwargs: As for `Trainer`, without those of its loss and of its metrics.

    Raises:
        ValueError: If draft, target, cached states and data do not fit, or an argument of `Trainer` would do nothing
            here, before anything is trained.

    Example:

    ```python
    regenerate(target, prompts, tokenizer, "answers.jsonl", max_new_tokens=256)
    rows = [json.loads(line) for line in open("answers.jsonl")]
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config))
    arguments = DSparkTrainingArguments("out/draft", num_train_epochs=4)
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    ```

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
        for name, reason in REFUSED.items():
            if given := kwargs.get(name) or getattr(args, name, None):
                raise ValueError(f"DSparkTrainer cannot use {name}={shortened(given)}. Leave it out: {reason}")
        if args.n_gpu > 1:  # DataParallel cannot split blocks, nor place a borrowed head
            warnings.warn("training on one GPU of several: start it with `accelerate launch` to use all", stacklevel=2)
            args._n_gpu = 1
        self.args = args
        draft = _draft_to_train(model, args)
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype="auto") if isinstance(target, str) else target
        self.processing_class = _tokenizer_of(self.target) if processing_class is None else processing_class
        self.source = TargetSource(draft, self.target, args)
        self.loss_weights = LossWeights(*(getattr(args, part.name) for part in fields(LossWeights)))
        self._metrics = {split: BlockMetrics(draft.config.block_size) for split in ("train", "eval")}
        self._eval_batches = 0
        train_dataset, eval_dataset = self._prepared(train_dataset, eval_dataset, draft)
        pad_token_id = getattr(self.processing_class, "pad_token_id", None) or 0
        kwargs.setdefault("data_collator", partial(collate, pad_token_id=pad_token_id))
        super().__init__(
            model=draft, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=self.processing_class, **kwargs,
        )  # fmt: skip
        # compute_loss divides by the weights of the whole step, over accumulation steps and processes.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True

    def _prepared(self, train_dataset: Any, eval_dataset: Any, draft: DraftModel) -> tuple[Any, Any]:
        """Return both data sets as packed or plain rows of tokens, once their target states are known to be there."""
        several = isinstance(eval_dataset, dict)
        held_out = eval_dataset if several else {None: eval_dataset}
        names = ["eval_dataset" if name is None else f"eval_dataset[{name!r}]" for name in held_out]
        with self.args.main_process_first():  # it tokenises for all
            # A block need not fit into rows that only evaluate.
            rows = [self._tokenised("train_dataset", train_dataset, draft, draft.config.block_size)]
            rows += [self._tokenised(*part, draft) for part in zip(names, held_out.values(), strict=True)]
        self.source.fill(part for part in rows if part is not None)
        train_dataset, *evaluated = map(self._packed, rows)
        if any(isinstance(part, IterableDataset) for part in (train_dataset, *evaluated)):
            # Else accelerate joins the batches of several processes, which are of different lengths.
            config = self.args.accelerator_config
            config.dispatch_batches = config.dispatch_batches or False
        return train_dataset, dict(zip(eval_dataset, evaluated, strict=True)) if several else evaluated[0]

    def _tokenised(self, name: str, rows: Any, draft: DraftModel, block_size: int = 1) -> Any:
        if rows is None:
            return None
        try:
            return prepare_examples(
                rows, self.processing_class, block_size=block_size, vocab_size=draft.config.vocab_size,
                max_length=self.args.max_length, chat_template_kwargs=self.args.chat_template_kwargs,
                num_proc=self.args.dataset_num_proc,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _packed(self, rows: Any) -> Any:
        if rows is None or not self.args.packing:
            return rows
        if hasattr(rows, "__len__"):
            return PackedRows(rows, self.args.max_length)
        return Stream(rows, partial(packed_in_order, max_length=self.args.max_length))

    @property
    def draft(self) -> DraftModel:
        return self.accelerator.unwrap_model(self.model)

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
            weight_sum += batch["blocks"].weights.sum().to(device)
        return batches, self.accelerator.reduce(weight_sum, "sum")

    def _sample_blocks(self, batch: dict[str, torch.Tensor], key: tuple[int, ...]) -> AnchoredBlocks:
        if missing := [name for name in COLUMNS if name not in batch]:
            raise ValueError(f"the data_collator returns batches without {', '.join(missing)}: leave it out")
        # Keyed, not drawn from the global state: a resumed run has the same anchors without replaying any.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        anchors, real = sample_anchors(batch["loss_mask"], batch["position_ids"], self.args.num_anchors, generator)
        layout = BlockLayout(anchors, real, batch["position_ids"], self.draft.config.block_size)
        return cut_blocks(batch["input_ids"], batch["loss_mask"], layout, self.loss_weights.position_decay)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, BlockLosses]:
        """One training step: the target's states, anchored blocks, the draft's losses.

        `inputs` is a batch with its sampled `blocks`, `num_items_in_batch` the sum of all slots' weights of the step,
        over accumulation steps and processes.
        """
        blocks: AnchoredBlocks = inputs["blocks"]  # anchors by key, contiguous supervised prefixes (Section 3.3)
        states = self.source.states(inputs, self.draft)  # in process, or from disk (Section 5.1)
        losses: BlockLosses = model(  # Eq. 2-7, teacher-forced; Eq. 8-12, a chunk of logits at a time
            inputs["input_ids"], states.features, label_hidden(states.last_hidden, blocks), blocks,
            self.loss_weights, num_items_in_batch,
        )  # fmt: skip
        self._metrics["train" if model.training else "eval"].add(losses, blocks.supervised)
        loss = losses.loss
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, losses) if return_outputs else loss

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One forward and backward pass; stops before a loss that is not a number reaches the weights."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        bad = (~torch.isfinite(loss)).float()
        if self.args.world_size > 1:  # all processes stop, or the others would wait for ever
            bad = self.accelerator.reduce(bad, "sum")
        if bad:
            finite = all(torch.isfinite(part).all() for part in self.source.states(inputs, self.draft))
            cure = "lower learning_rate, set max_grad_norm, or train in bfloat16 instead of float16"
            if not finite:
                cure = "the target's own states are not finite: load it in bfloat16 or float32 instead of float16"
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {self.state.global_step}; the weights were not changed by it. "
                f"Likely cure: {cure}"
            )
        return loss

    # Evaluation and reports

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
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
        """Evaluate as `Trainer` does, with the same anchors each time, leaving the training's random state alone."""
        if isinstance(eval_dataset, str):
            self._held_out(eval_dataset)
        elif not isinstance(eval_dataset, (dict, type(None))):
            eval_dataset = self._evaluable("eval_dataset", eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Evaluate other rows, of any form that `evaluate` takes. There are metrics as there, and no predictions."""
        if test_dataset is None:
            raise ValueError("predict() needs rows, got None; evaluate() takes the eval_dataset of the trainer")
        if isinstance(test_dataset, dict):
            parts = test_dataset.items()
            found = [self.predict(part, ignore_keys, f"{metric_key_prefix}_{name}").metrics for name, part in parts]
            return PredictionOutput(None, None, {name: value for metrics in found for name, value in metrics.items()})
        test_dataset = self._held_out(test_dataset) if isinstance(test_dataset, str) else test_dataset
        return super().predict(self._evaluable("test_dataset", test_dataset), ignore_keys, metric_key_prefix)

    def _held_out(self, name: str) -> Any:
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        if name not in sets:
            raise ValueError(f"eval_dataset must be a dictionary with {name!r}, it has {[*sets]}: pass rows")
        return sets[name]

    def _evaluable(self, name: str, rows: Any) -> Any:
        """Return rows as batches are made of them; those of the trainer itself are so already."""
        held = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else (self.eval_dataset,)
        if any(rows is part for part in (*held, self.train_dataset)):
            return rows
        rows = self._tokenised(name, rows, self.draft)
        self.source.fill([rows])
        return self._packed(rows)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """As `Trainer`'s, which `evaluate` and `predict` share, with the metrics of blocks besides the loss."""
        self._eval_batches = 0
        self._metrics["eval"].reset()
        with torch.random.fork_rng(devices=[]):
            loop = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        values = self._metrics["eval"].reduced(self.accelerator, self.loss_weights)
        loop.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in values.items()})
        return loop

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._metrics["train"].reduced(self.accelerator, self.loss_weights) | {"loss": logs["loss"]})
        super().log(logs, start_time)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint` is a checkpoint, or `True` for the last whole one in `args.output_dir`.

        A `ValueError` names a damaged file of it, or the facts in which its run differs from this one.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no whole checkpoint to resume from in {self.args.output_dir}")
        if resume_from_checkpoint:
            resume_from_checkpoint = str(resume_from_checkpoint)
            require_continuable(Path(resume_from_checkpoint), self)
        self._metrics["train"].reset()  # a run may have been interrupted between two reports
        config = self.draft.config
        if any(getattr(config, name) for name in CALIBRATED):
            config.update(dict.fromkeys(CALIBRATED))
            warnings.warn("the draft was calibrated before this training: calibrate it again", stacklevel=2)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As `Trainer` does; warns of a run so short that it trains little, unless `max_steps` asks for it."""
        if self.args.max_steps <= 0 and num_training_steps < FEW_STEPS:
            steps = "1 step trains" if num_training_steps == 1 else f"{num_training_steps} steps train"
            warnings.warn(f"{steps} little: give more examples or epochs", stacklevel=2)
        return super().create_scheduler(num_training_steps, optimizer)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the draft; a checkpoint that is written over is whole again when everything else is saved, too."""
        if self.is_world_process_zero():
            Path(output_dir or self.args.output_dir, RUN_FACTS_FILE).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint; older ones are deleted once it is whole, so that there always is one to go on from."""
        folder, limit = self._get_output_dir(trial), self.args.save_total_limit
        self.args.save_total_limit = None  # `Trainer` would delete before the facts are written
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            write_run_facts(Path(folder, f"checkpoint-{self.state.global_step}"), self)
        if self.args.should_save:
            rotate_checkpoints(folder, limit, self.state.best_model_checkpoint, use_mtime=True)

    # Publishing

    def create_model_card(
        self, model_name: str | None = None, dataset: str | list[str] | None = None, **card: Any
    ) -> None:
        """Write the result file of this run, the model card and the one-file decoder beside the saved draft.

        The card is made of all result files in `args.output_dir/results`, where this run's is `training.json`.
        Arguments are those of `Trainer.create_model_card`: names of repository and data sets, `license`, `tags`, ...
        A `FileNotFoundError` says that no draft has been saved there.
        """
        if self.is_world_process_zero():
            publisher.load().write_training_card(self, model_name, dataset, **card)

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

        Arguments are those of `Trainer.push_to_hub`; `card` is for [`~DSparkTrainer.create_model_card`]. Returns the
        URL of the commit, or a future of it if not `blocking`; `None` but in the main process.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**card)
        self._finish_current_push()
        upload = partial(
            publisher.load().upload_repository, self.args.output_dir, self.hub_model_id, token=token,
            private=self.args.hub_private_repo if private is None else private,
            revision=revision or self.args.hub_revision, commit_message=commit_message,
        )  # fmt: skip
        return upload() if blocking else HfApi().run_as_future(upload)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the draft of a checkpoint while training goes on.

        In place of Trainer's, which uploads all of `args.output_dir`: caches, and pickled arguments with the token.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self.push_in_progress is None:
            self.push_in_progress = PushInProgress([])
        if not (self.args.hub_always_push or self.push_in_progress.is_done()):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        job = publisher.load().push_checkpoint(
            checkpoint_folder, self.hub_model_id, token=self.args.hub_token, revision=self.args.hub_revision,
            commit_message=f"Training in progress, step {self.state.global_step}",
        )  # fmt: skip
        self.push_in_progress.jobs.append(job)


def _draft_to_train(model: DraftModel | str, args: DSparkTrainingArguments) -> DraftModel:
    # Updates are smaller than half precision can hold: autocast computes in it, the weights stay wide.
    draft = load_draft(model, dtype=torch.float32) if isinstance(model, str) else model
    require_draft(draft)
    if not any(each.requires_grad for each in draft.parameters()):
        raise ValueError("nothing of the draft can be trained, all is frozen: call draft.requires_grad_(True)")
    if draft.dtype in (torch.float16, torch.bfloat16):
        cure = "load it with dtype=torch.float32, and set bf16=True to compute in bfloat16"
        warnings.warn(f"small updates are lost in the draft's {draft.dtype}: {cure}", stacklevel=3)
    if args.soft_cross_entropy_weight > 0 and draft.draft_token_ids() is not None:
        raise ValueError(
            "a pruned vocabulary gives some tokens no probability, so the cross-entropy to the target's distribution "
            f"is infinite: set soft_cross_entropy_weight=0, got {args.soft_cross_entropy_weight}"
        )
    exports = exports_of(draft.config)
    if not any(engines for engines, _ in exports.values()):
        warnings.warn(f"only hf_dspark will run this draft. {not_exported(exports)}", stacklevel=3)
    return draft


def _tokenizer_of(target: PreTrainedModel | None) -> PreTrainedTokenizerBase | None:
    name = getattr(target, "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name) if name else None
    except (OSError, ValueError):  # the repository has none: tokenised rows need none
        return None
