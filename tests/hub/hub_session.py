"""What test_repository.py does in processes of their own: publish drafts, train one, decode with published ones.

python tests/hub/hub_session.py {publish,train} FOLDER | {package,alone} REPOSITORY... | attach [REPOSITORY]

The last line of the output is JSON.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
TRAINED = Path(__file__).parents[1] / "fixtures" / "deepspec" / "trained"
# Whole blocks: the default learns by the clock, and a seed alone would not repeat its samples.
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20, "assistant_confidence_threshold": 0.0}
CALLS = {"greedy": {"do_sample": False}, "sampled": SAMPLED, "cut": SAMPLED | {"num_assistant_tokens": 2}}
ROWS = torch.tensor([[3, 9, 12, 30], [5, 11, 4, 8]])


def load_target():
    return AutoModelForCausalLM.from_pretrained(TRAINED / "target").eval()


def decoded(target, names=tuple(CALLS), ids=ROWS, **how) -> dict:
    """Tokens of each kind of call."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        call = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0} | CALLS[name] | how
        found[name] = target.generate(ids, attention_mask=torch.ones_like(ids), **call).tolist()
    return found


def make_drafts(target) -> dict:
    from hf_dspark import DSparkDraftModel, Eagle3Config, Eagle3DraftModel

    torch.manual_seed(1)
    dspark = DSparkDraftModel.from_pretrained(TRAINED / "draft").eval()
    dspark.config.sts_temperatures = {"default": [1.5] * dspark.config.block_size}
    eagle3 = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=3)).eval()
    return {"someone/my-draft.v1": dspark, "someone/eagle3": eagle3}


def publish_drafts(words: list[str]) -> dict:
    from hf_dspark.measuring.results import describe_draft, describe_target, write_result

    target = load_target()
    report = {"tokens": {}, "urls": []}
    for repo_id, draft in make_drafts(target).items():
        report["tokens"][repo_id] = decoded(target, assistant_model=draft)
        path = Path(words[0], repo_id, "acceptance.json")
        found = {"sampling": {"do_sample": False}, "policy": "FullBlock()", "domains": {"math": {"tau": 3.25}}}
        write_result(path, "acceptance", describe_target(target), describe_draft(draft), **found)
        for options in ({"private": True, "max_shard_size": "20KB"}, {"results": [path], "license": "mit"}):
            report["urls"].append(draft.push_to_hub(repo_id, **options))
    report["branch"] = draft.push_to_hub("someone/eagle3", revision="v2")
    dspark = make_drafts(target)["someone/my-draft.v1"]
    with torch.no_grad():
        dspark.fc.weight.zero_()
    dspark.push_to_hub("someone/my-draft.v1", revision="worse")
    try:
        draft.push_to_hub("someone/refused")
    except OSError as error:
        report["refused"] = str(error)
    return report


def train(words: list[str]) -> dict:
    from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments

    target = load_target()
    config = DSparkConfig.from_target(target.config, num_hidden_layers=1, block_size=3, markov_rank=4)
    rows = [{"input_ids": list(range(start, start + 16)), "loss_mask": [1] * 16} for start in range(8)]
    args = DSparkTrainingArguments(
        words[0], max_steps=2, num_anchors=4, report_to="none", logging_steps=1, disable_tqdm=True,
        use_cpu=True, push_to_hub=True, hub_model_id="someone/trained", hub_private_repo=True, save_steps=1,
        hub_always_push=True,
    )  # fmt: skip
    trainer = DSparkTrainer(DSparkDraftModel(config), target, args, train_dataset=rows)
    trainer.train()
    url = trainer.push_to_hub(license="mit", dataset="someone/rows")
    waiting = trainer.push_to_hub(blocking=False)
    again = decoded(target, assistant_model=AutoModel.from_pretrained("someone/trained"))
    return {"url": url, "later": waiting.result(), "tokens": decoded(target, assistant_model=trainer.model) == again}


def decode_with_package(repositories: list[str]) -> dict:
    import hf_dspark

    target = load_target()
    report = {}
    for repository in repositories:
        draft = AutoModel.from_pretrained(repository, dtype="auto").eval()
        assert type(draft).__module__.startswith(hf_dspark.__name__)
        report[repository] = {
            "assistant": decoded(target, assistant_model=draft),
            "custom_generate": decoded(target, custom_generate=repository, trust_remote_code=True),
            "temperatures": draft.config.sts_temperatures,
        }
    return report


def attach_what_is_found(words: list[str]) -> dict:
    """Publish a draft for a target of some name, if a repository is given, and attach to that target."""
    import hf_dspark

    target = load_target()
    target.name_or_path = "someone/target"
    for repository in words:
        make_drafts(target)["someone/my-draft.v1"].push_to_hub(repository, target=target.name_or_path, license="mit")
    attached = hf_dspark.attach(target)
    return {"draft": attached.draft.name_or_path, "tokens": decoded(target), "assisted": attached.num_assisted}


def decode_with_transformers_alone(repositories: list[str]) -> dict:
    """Greedy tokens of both rows, one after the other, by the one file of each repository; the last one is refused."""
    sys.modules["hf_dspark"] = None  # installed in this environment; importing it fails from now on
    target = load_target()
    *repositories, unsupported = repositories

    def greedy(**how) -> list:
        how["trust_remote_code"] = True
        return [decoded(target, ["greedy"], row[None], **how)["greedy"][0] for row in ROWS]

    report = {"tokens": {repository: greedy(custom_generate=repository) for repository in repositories}}
    report["worse"] = greedy(custom_generate=repositories[0], revision="worse")
    modules = [module for name, module in sys.modules.items() if name.endswith("custom_generate.generate")]
    kept = [draft for module in modules for draft in getattr(module, "_drafts", {}).get(target, {}).values()]
    report["weights"] = [float(draft.fc.weight.abs().sum()) for draft in kept]
    report["refusals"] = []
    for refused in (
        lambda: greedy(custom_generate=unsupported),
        lambda: decoded(target, ["greedy"], custom_generate=repositories[0], trust_remote_code=True),
        lambda: AutoModel.from_pretrained(repositories[0], trust_remote_code=False),
    ):
        try:
            refused()
        except ValueError as error:
            report["refusals"].append(str(error))
    draft = AutoModel.from_pretrained(repositories[0], trust_remote_code=True).eval()
    report["loaded"] = greedy(custom_generate=repositories[0], assistant_model=draft)
    report["rounds"] = draft.rounds
    return report


if __name__ == "__main__":
    commands = {
        "publish": publish_drafts, "train": train, "package": decode_with_package,
        "alone": decode_with_transformers_alone, "attach": attach_what_is_found,
    }  # fmt: skip
    print(json.dumps(commands[sys.argv[1]](sys.argv[2:])))
