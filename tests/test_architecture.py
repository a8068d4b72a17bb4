"""Who may import whom, read from the syntax tree, and what documents link to."""

import ast
import re
import sys
from pathlib import Path

import pytest
import transformers
from transformers.generation import GenerationMixin

import hf_dspark

PACKAGE = Path(hf_dspark.__file__).parent
ROOT = Path(__file__).parent.parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}

MATHS = {"sampling", "noise", "throughput", "policies", "calibration", "losses"}
MODELS = {
    "adapters",
    "block_attention",
    "borrowed_weights",
    "checkpoint_engines",
    "checkpoint_files",
    "checkpoint_formats",
    "checkpoint_rows",
    "configuration_dspark",
    "configuration_eagle3",
    "draft_config",
    "draft_heads",
    "draft_kinds",
    "draft_model",
    "few_rows",
    "fingerprint",
    "int8_copy",
    "int8_outliers",
    "modeling_dspark",
    "modeling_eagle3",
    "packed_weights",
    "range_attention",
    "rope_parameters",
    "slot_attention",
    "slot_cache",
    "successors",
}
FILES = {"journal"}
SHARED = {"feature_capture", "profiling", "collection", "target_check"}
DECODING = {
    "candidate_generator",
    "decoding",
    "generate_hook",
    "generate_many",
    "generation",
    "processing",
    "request",
}
TRAINING = {"conversations", "data", "feature_cache", "shards", "target_source", "trainer", "training_metrics"}
GROUPS = {
    "maths": MATHS, "models": MODELS, "files": FILES, "shared": SHARED, "decoding": DECODING, "training": TRAINING,
}  # fmt: skip
MAY_IMPORT = {
    "maths": MATHS,
    "models": MATHS | MODELS,
    "files": set(),
    "shared": MATHS | MODELS | FILES,
    "decoding": MATHS | MODELS | SHARED | DECODING,
    "training": MATHS | MODELS | SHARED | TRAINING,
}
RULED = sorted(name for name in MODULES if any(name in group for group in GROUPS.values()))
IMPORTED_WHERE_USED = {"matplotlib", "datasets", "bitsandbytes", "peft"}

PRIVATE_GENERATION_NAMES = {
    name
    for name in vars(GenerationMixin)
    if name.startswith("_") and not name.startswith("__") and callable(getattr(GenerationMixin, name))
}


def group_of(module: str) -> str:
    return next(group for group, members in GROUPS.items() if module in members)


def imports(nodes) -> tuple[set[str], set[str]]:
    """Return imported modules of this package, and imported top-level packages."""
    own, foreign = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            own |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            foreign.add(node.module.split(".")[0])
            if node.module.startswith("hf_dspark."):
                own.add(node.module.split(".")[1])
    return own, foreign


def at_import_time(tree: ast.AST):
    """Yield the nodes that run when the module is imported: everything outside of functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import_time(child)


def names_in(tree: ast.AST) -> set[str]:
    """Return every identifier and every string in a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_every_group_has_the_modules_the_rules_are_about():
    assert {"sampling", "policies", "losses", "configuration_dspark", "modeling_dspark"} <= set(RULED)
    assert {"feature_capture", "candidate_generator", "generate_hook", "data", "trainer"} <= set(RULED)


@pytest.mark.parametrize("module", RULED)
def test_module_imports_downward_only(module):
    own, _ = imports(ast.walk(MODULES[module]))
    assert own <= MAY_IMPORT[group_of(module)], f"{module} imports {own - MAY_IMPORT[group_of(module)]}"


@pytest.mark.parametrize("module", sorted(MATHS & MODULES.keys()))
def test_maths_needs_torch_and_the_standard_library_only(module):
    _, foreign = imports(ast.walk(MODULES[module]))
    standard = set(sys.stdlib_module_names)
    assert foreign <= standard | {"torch", "numpy"}, f"{module} imports {foreign - standard}"


def test_decoding_and_training_never_import_each_other():
    for module in MODULES:
        own, _ = imports(ast.walk(MODULES[module]))
        if module in DECODING | SHARED:
            assert not own & TRAINING, module
        if module in TRAINING | SHARED:
            assert not own & DECODING, module


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"generate_hook"}))
def test_private_generation_api_is_named_in_the_hook_only(module):
    assert not names_in(MODULES[module]) & PRIVATE_GENERATION_NAMES


def test_the_hook_names_private_generation_api():
    wrapped = {
        "_assisted_decoding",
        "_get_candidate_generator",
        "_validate_generation_mode",
        "_prepare_generation_config",
    }
    assert wrapped <= PRIVATE_GENERATION_NAMES, f"transformers {transformers.__version__} renamed them"
    assert wrapped <= names_in(MODULES["generate_hook"])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_packages_are_imported_where_they_are_used(module):
    _, foreign = imports(at_import_time(MODULES[module]))
    assert not foreign & IMPORTED_WHERE_USED


def test_trainer_is_not_imported_with_the_package():
    own, _ = imports(at_import_time(MODULES["__init__"]))
    assert not own & TRAINING
    assert hf_dspark.DSparkTrainer.__module__ == "hf_dspark.trainer"


def test_public_names_exist_and_are_sorted():
    assert hf_dspark.__all__ == sorted(hf_dspark.__all__)
    for name in hf_dspark.__all__:
        assert getattr(hf_dspark, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hf_dspark.nonsense  # noqa: B018


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "THIRD_PARTY.md", "benchmarks/README.md"])
def test_documents_link_to_files_that_are_there(page):
    path = ROOT / page
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


# ---- the checker itself


def test_import_reader_tells_own_from_foreign_and_early_from_late():
    tree = ast.parse(
        "import torch.nn\nfrom .losses import x\nfrom . import data\nclass A:\n    import datasets\n"
        "def f():\n    import matplotlib\n"
    )
    assert imports(ast.walk(tree)) == ({"losses", "data"}, {"torch", "datasets", "matplotlib"})
    assert imports(at_import_time(tree)) == ({"losses", "data"}, {"torch", "datasets"})
