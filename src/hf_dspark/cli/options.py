"""What the subcommands can be told: one dataclass per group of options, read by transformers' `HfArgumentParser`.

Finds what is wrong with a value before anything is loaded. Knows nothing of models, nor of how the words are parsed.
"""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

THRESHOLD = "threshold="
POLICIES = f"default, full, scheduled, {THRESHOLD}T with T in [0, 1]"


class Flag(argparse.Action):
    """An option without a value. `HfArgumentParser` would let it take the next word, if that is no option, for one."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, True)


def option(help: str, default: Any = MISSING, metavar: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """Return a field for an option; one without a default must be given."""
    metadata = {"help": help, "aliases": list(aliases)} | ({} if metavar is None else {"metavar": metavar})
    return field(default=default, metadata=metadata)


def options(help: str, metavar: str, required: bool = False, aliases: tuple[str, ...] = ()) -> Any:
    """Return a field for an option that takes one word or more."""
    metadata = {"help": help, "metavar": metavar, "aliases": list(aliases)}
    return field(metadata=metadata) if required else field(default_factory=list, metadata=metadata)


def flag(help: str) -> Any:
    """Return a field for an option without a value."""
    return field(default=False, metadata={"help": help, "action": Flag})


@dataclass(kw_only=True)
class TargetOptions:
    """The target: any decoder-only causal LM that transformers loads."""

    _argument_group_name = "target"

    target: str = option("Hub id or folder of the target.", metavar="MODEL")
    target_revision: str | None = option("Branch, tag or commit of the target on the Hub.", None, "REVISION")
    tokenizer: str | None = option("Hub id or folder of the tokenizer; the target's unless given.", None, "MODEL")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "Of the target's weights; auto is that of its files. Only float32 makes greedy tokens the same to the last "
        "one: in shorter types a pass over several tokens rounds differently.",
        "auto",
    )
    device_map: str | None = option(
        "Where the target runs: auto spreads it over all devices, cpu, cuda:0 and so on name one. The accelerator if "
        "there is one, unless given.",
        None,
        "WHERE",
    )
    load_in_8bit: bool = flag("Quantise the target to 8 bits with bitsandbytes.")
    load_in_4bit: bool = flag("Quantise the target to 4 bits with bitsandbytes.")
    trust_remote_code: bool = flag(
        "Run code that comes with the target's repository, with all your rights. Read it first."
    )

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("--load_in_8bit and --load_in_4bit exclude each other: give one")
        if (self.load_in_8bit or self.load_in_4bit) and importlib.util.find_spec("bitsandbytes") is None:
            bits = "8bit" if self.load_in_8bit else "4bit"
            raise ValueError(
                f"--load_in_{bits} needs bitsandbytes, which is not installed: pip install 'hf_dspark[quantization]'"
            )


@dataclass(kw_only=True)
class AnsweringTargetOptions(TargetOptions):
    """The target of `regenerate`, which may be behind a server instead."""

    target: str | None = option("Hub id or folder of the target; not needed with --endpoint.", None, "MODEL")


@dataclass(kw_only=True)
class DraftOptions:
    """The draft of the target."""

    _argument_group_name = "draft"

    draft: str = option(
        "Hub id or folder of the draft: DSpark, DFlash or Eagle3, ours or DeepSpec's.", metavar="MODEL"
    )
    draft_revision: str | None = option("Branch, tag or commit of the draft on the Hub.", None, "REVISION")
    draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "Of the draft's weights; auto is that of its files.", "auto"
    )


@dataclass(kw_only=True)
class HelpingDraftOptions(DraftOptions):
    """The draft of `regenerate`, which only makes it faster."""

    draft: str | None = option("Hub id or folder of a draft, which makes it faster and changes no law.", None, "MODEL")


@dataclass(kw_only=True)
class EvaluatedDraftOptions(DraftOptions):
    """The draft of `eval`, which also measures a target alone."""

    draft: str | None = option("Hub id or folder of the draft; plain decoding is measured without one.", None, "MODEL")


@dataclass(kw_only=True)
class ChatOptions:
    """How texts become prompts."""

    _argument_group_name = "chat template"

    no_chat_template: bool = flag(
        "Continue texts as they are. Otherwise a text becomes a user's message if the tokenizer has a chat template."
    )
    enable_thinking: bool = flag("Tell the chat template that the target may think first (Qwen3 and others).")
    no_thinking: bool = flag("Tell the chat template that the target must answer at once.")

    def __post_init__(self) -> None:
        if self.enable_thinking and self.no_thinking:
            raise ValueError("--enable_thinking and --no_thinking exclude each other: give one")
        if self.no_chat_template and self.thinking is not None:
            raise ValueError("thinking is a matter of the chat template: drop --no_chat_template, or the other")

    @property
    def thinking(self) -> bool | None:
        """What the chat template is told; `None` for nothing."""
        return True if self.enable_thinking else False if self.no_thinking else None


@dataclass(kw_only=True)
class SamplingOptions:
    """How the target decodes."""

    _argument_group_name = "decoding"

    max_new_tokens: int = option("Longest answer, in tokens.", 256)
    temperature: float | None = option(
        "0 decodes greedily, 1 samples the target's own law. As the target's generation config recommends unless "
        "given.",
        None,
    )
    top_k: int | None = option(
        "Sample among this many most likely tokens; 0 is all. As the generation config recommends, else all.", None
    )
    top_p: float | None = option("Sample among the most likely tokens that together have this probability.", None)
    min_p: float | None = option("Sample among tokens of at least this share of the best one's probability.", None)
    seed: int = option("Of all draws.", 0)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"--temperature must be 0 or positive, got {self.temperature}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} must lie in [0, 1], got {value}")
        given = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and given:
            raise ValueError(f"--temperature 0 decodes greedily, which needs no --{given[0]}: drop one of them")


@dataclass(frozen=True)
class PolicyChoice:
    """What decides how much of a block is verified, by name.

    Args:
        name (`str`): `default`, `full`, `scheduled` or `threshold`.
        threshold (`float`, *optional*): Least confidence.
    """

    name: str
    threshold: float | None = None

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """Read what was given for `--policy`.

        Raises:
            ValueError: If it is no policy.
        """
        if text in ("default", "full", "scheduled"):
            return cls(text)
        try:
            threshold = float(text.removeprefix(THRESHOLD)) if text.startswith(THRESHOLD) else math.nan
        except ValueError:
            threshold = math.nan
        if not 0 <= threshold <= 1:
            raise ValueError(f"--policy must be one of {POLICIES}; got {text!r}")
        return cls("threshold", threshold)


@dataclass(kw_only=True)
class GenerateOptions:
    """What `generate` alone can be told."""

    prompts_file: str | None = option(
        "JSON Lines of prompts: strings, or objects with 'prompt', 'question', 'messages' or 'turns'; - is stdin.",
        None,
        "FILE",
    )
    batch_size: int = option("Prompts decoded together at most.", 8)
    policy: str = option(
        f"How much of a drafted block is verified: one of {POLICIES}. scheduled weighs confidences against what a "
        "step costs on this machine, and default does so as soon as both are known.",
        "default",
    )
    compare: bool = flag(
        "Also decode without the draft, one prompt at a time both ways; tell both times and, if greedy, whether the "
        "tokens are the same."
    )

    def __post_init__(self) -> None:
        check_positive("--batch_size", self.batch_size)
        PolicyChoice.parse(self.policy)


@dataclass(kw_only=True)
class EvalOptions:
    """What `eval` alone can be told."""

    prompts: list[str] = options(
        "Prompt files of the tasks to measure, NAME=FILE or FILE, as for generate --prompts_file. Of 'turns', each "
        "one is answered in its turn.",
        "NAME=FILE",
        required=True,
        aliases=("--tasks",),
    )
    num_prompts: int | None = option("Of each file; all unless given.", None)
    batch_size: int = option("Prompts decoded together at most.", 1)
    policy: str | None = option(
        f"How much of a drafted block is verified: one of {POLICIES}; full unless given.", None
    )
    compare: bool = flag(
        "Also decode each turn without the draft, right before; tell the speed-up and, if greedy, how many answers "
        "have the same tokens."
    )
    result_file: str = option(
        "Where the result goes, for cards, figures and comparisons. Finished turns are kept beside it until then.",
        "evaluation.json",
        "FILE",
        aliases=("--output",),
    )
    baseline: str | None = option(
        "Result of an earlier eval of the same tasks, to compare with: before and after a training.", None, "FILE"
    )
    overwrite: bool = flag("Replace the result file if it exists.")

    def __post_init__(self) -> None:
        check_positive("--batch_size", self.batch_size)
        if self.num_prompts is not None:
            check_positive("--num_prompts", self.num_prompts)
        if self.policy is not None:
            PolicyChoice.parse(self.policy)


@dataclass(kw_only=True)
class CalibrateOptions:
    """What `calibrate` alone can be told."""

    prompts_file: str = option(
        "JSON Lines of held-out prompts, as for generate --prompts_file; a few hundred.", metavar="FILE"
    )
    num_prompts: int | None = option("Of the file; all unless given.", None)
    domain: str | None = option(
        "Name that the temperatures are kept under. greedy or sampled, by the way of decoding, unless given: those "
        "two are used by themselves, others when draft.decoding names them.",
        None,
        "NAME",
    )
    output_dir: str | None = option(
        "Where the calibrated draft goes. Its own folder unless given, of which config.json alone is changed.",
        None,
        "FOLDER",
    )
    rounds_file: str | None = option(
        "Where rounds are recorded as they come; the same command goes on from there after an interruption.",
        None,
        "FILE",
    )
    result_file: str | None = option(
        "Where the result goes; results/calibration-DOMAIN.json in the draft's folder unless given.", None, "FILE"
    )

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_positive("--num_prompts", self.num_prompts)
        if self.domain is not None and (not self.domain or self.domain.startswith(("/", ".")) or "\\" in self.domain):
            raise ValueError(f"--domain must be a name such as math or math/greedy, got {self.domain!r}")


@dataclass(kw_only=True)
class RegenerateOptions:
    """What `regenerate` alone can be told."""

    prompts_file: str = option("JSON Lines of prompts, as for generate --prompts_file.", metavar="FILE")
    output_file: str = option(
        "JSON Lines of answers. The same command goes on where it was interrupted, and tries failed prompts again.",
        metavar="FILE",
    )
    num_prompts: int | None = option("Of the file; all unless given.", None)
    num_samples: int = option("Answers per prompt.", 1)
    batch_size: int = option("Prompts answered together at most.", 8)
    endpoint: str | None = option(
        "OpenAI-compatible server that answers instead, such as http://localhost:8000/v1.", None, "URL"
    )
    model: str | None = option("Name by which that server knows the target.", None, "NAME")
    concurrency: int = option("Requests to the server under way at the same time.", 8)
    api_key_env: str | None = option(
        "Environment variable that holds the server's key; no key is sent unless given.", None, "VARIABLE"
    )
    timeout: float = option("Seconds that a request may take.", 600.0)

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "concurrency"):
            check_positive(f"--{name}", getattr(self, name))
        if self.num_prompts is not None:
            check_positive("--num_prompts", self.num_prompts)
        if (self.endpoint is None) != (self.model is None):
            raise ValueError("--endpoint and --model belong together: give both, or --target")


@dataclass(kw_only=True)
class ProfileOptions:
    """What `profile` alone can be told."""

    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "Requests per pass, increasing from 1."}
    )
    context_lengths: list[int] = field(
        default_factory=lambda: [64, 512], metadata={"help": "Cached tokens per request, increasing."}
    )
    repetitions: int = option("Timed passes per setting.", 5)
    output_file: str | None = option("Also write the table to this file.", None, "FILE")
    format: Literal["hf_dspark", "sglang"] = option(
        "Of that file: hf_dspark holds what the table was made from, too; sglang is SGLang's SPS table alone.",
        "hf_dspark",
    )
    no_cache: bool = flag("Do not remember the table for generate() on this machine.")
    overwrite: bool = flag("Replace the file if it exists.")


@dataclass(kw_only=True)
class TrainOptions:
    """What `train` can be told besides `DSparkTrainingArguments`."""

    _argument_group_name = "data and draft"

    train_file: str = option(
        "Rows as `regenerate` writes them, or with 'messages', 'prompt' and 'completion', or 'text': JSON Lines, or "
        "a Parquet file (needs datasets).",
        metavar="FILE",
    )
    eval_file: str | None = option("Held-out rows.", None, "FILE")
    eval_rows: int = option("Rows held out of the training file, drawn by --seed; 0 is none.", 0)
    draft: str | None = option("A draft to fine-tune; a new one is made for the target unless given.", None, "MODEL")
    draft_kind: Literal["dspark", "dflash", "eagle3"] = option(
        "Of a new draft. For dflash and eagle3, the loss weights become those of their objectives unless some are "
        "given.",
        "dspark",
    )
    num_hidden_layers: int | None = option(
        "Of a new draft. By the target's depth, 5 at most; 1 for eagle3, unless given.", None
    )
    block_size: int = option("Tokens per block of a new draft.", 7)
    markov_rank: int = option("Rank of a new dspark draft's Markov head.", 256)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = option("Of a new dspark draft.", "vanilla")
    target_layer_ids: list[int] = options(
        "Layers of the target that a new draft reads; five evenly spaced ones unless given.", "LAYER"
    )

    def __post_init__(self) -> None:
        if self.eval_rows < 0:
            raise ValueError(f"--eval_rows must be 0 or positive, got {self.eval_rows}")
        if self.eval_rows and self.eval_file is not None:
            raise ValueError("--eval_rows and --eval_file exclude each other: give one")
        if self.draft_kind == "dspark" and self.draft is None and self.markov_rank < 1:
            raise ValueError(
                f"--markov_rank must be at least 1, got {self.markov_rank}: a draft without a Markov head is "
                "--draft_kind dflash"
            )


@dataclass(kw_only=True)
class ConvertOptions:
    """What `convert` can be told."""

    to: Literal["hf_dspark", "deepspec", "speculators", "sglang", "transformers"] = option("Format to write.")
    target: str | None = option(
        "Hub id or folder of the target, for what a format says or copies of it: DeepSpec's holds its embedding and "
        "LM head.",
        None,
        "MODEL",
    )
    engine: str | None = option("An engine that must be able to run the result, such as vllm.", None, "NAME")
    block_layout: Literal["anchor", "fill_in"] | None = option(
        "Of the source, where its files do not say: whether the slot of the anchor predicts the first token (anchor), "
        "or nothing (fill_in).",
        None,
    )


@dataclass(kw_only=True)
class CardFacts:
    """What a card is made of."""

    results: list[str] = options(
        "Result files, or folders of them, that the card is made from; FOLDER/results unless given.", "FILE"
    )
    target: str | None = option(
        "Hub id of the target; the name that the results agree on, unless given.", None, "MODEL"
    )
    license: str | None = option("Of the draft, as the Hub abbreviates it, such as mit.", None, "ID")


@dataclass(kw_only=True)
class PushOptions(CardFacts):
    """What `push` can be told."""

    private: bool = flag("Make a new repository private.")


@dataclass(kw_only=True)
class CardOptions(CardFacts):
    """What `card` can be told."""

    output: str | None = option("Where the card goes; README.md in the folder unless given.", None, "FILE")
    overwrite: bool = flag("Replace the card if it exists.")


def check_positive(name: str, value: int) -> None:
    """Raise a `ValueError` unless a number is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
