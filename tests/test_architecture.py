"""What may import what, read from the syntax tree, and what documents link to."""

import ast
import re
import sys
from pathlib import Path

import pytest
import transformers
from transformers.generation import GenerationMixin

import hf_dspark
from hf_dspark.decoding.install import WRAPPED_PARAMETERS

PACKAGE = Path(hf_dspark.__file__).parent
ROOT = Path(__file__).parent.parent

# The house. A folder may import itself and the folders named after it, and nothing else. "" is the root.
FLOORS = {
    "": set(),
    "sampling": set(),
    "scheduling": {"sampling", "cpu", ""},
    "cpu": set(),
    "formats": {""},
    "data": {""},
    "models": {"", "sampling", "scheduling", "formats", "data"},
    "targets": {"", "sampling", "cpu", "models"},
    "training": {"", "sampling", "scheduling", "formats", "data", "models", "targets"},
    "decoding": {"", "sampling", "scheduling", "cpu", "data", "models", "targets"},
    "measuring": {"", "sampling", "scheduling", "formats", "cpu", "data", "models", "targets", "decoding"},
    "hub": {"", "sampling", "scheduling", "formats", "data", "models", "targets", "training", "decoding", "measuring"},
    "hub.custom_generate": set(),
}
FRONT = {"__init__", "__main__"}  # they may import everything
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
RULED = sorted(MODULES.keys() - FRONT)
IMPORTED_WHERE_USED = {"matplotlib", "datasets", "bitsandbytes", "peft"}

PRIVATE_GENERATION_NAMES = {
    name
    for name in vars(GenerationMixin)
    if name.startswith("_") and not name.startswith("__") and callable(getattr(GenerationMixin, name))
}

# Of its generation configurations, caches and processors.
PRIVATE_ATTRIBUTES = {
    "_eos_token_tensor", "_pad_token_tensor", "_mask_length", "_is_user_defined", "_prefix_allowed_tokens_fn",
    "_num_beams",
}  # fmt: skip


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def imports(nodes, module: str) -> tuple[set[str], set[str]]:
    """Return imported modules of this package, by their dotted names, and imported top-level packages."""
    own, foreign = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            foreign |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            parts = module.split(".")[: -node.level]
            base = [*parts, *(node.module.split(".") if node.module else [])]
            own |= {".".join([*base, alias.name]) for alias in node.names} if is_folder(base) else {".".join(base)}
        elif isinstance(node, ast.ImportFrom):
            foreign.add(node.module.split(".")[0])
            if node.module.startswith("hf_dspark."):
                own.add(node.module.removeprefix("hf_dspark."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0]
            if not isinstance(name, ast.Constant):
                own.add(f"({ast.unparse(name)})")  # unreadable here: stands on no floor
            elif name.value.startswith((".", "hf_dspark.")):
                parts = module.split(".")[: -(len(name.value) - len(name.value.lstrip(".")))]
                base = parts if name.value.startswith(".") else []
                own.add(".".join([*base, name.value.removeprefix("hf_dspark").lstrip(".")]))
            else:
                foreign.add(name.value.split(".")[0])
    return own, foreign


def is_folder(parts: list[str]) -> bool:
    return not parts or ".".join([*parts, "__init__"]) in MODULES


def at_import_time(tree: ast.AST):
    """Yield the nodes that run when the module is imported: all but functions and what only type checkers read."""
    for child in ast.iter_child_nodes(tree):
        only_for_editors = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not only_for_editors and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import_time(child)


def written_attributes(tree: ast.AST):
    """Yield the names of attributes that a module assigns to, wholly or an item of them."""
    for node in ast.walk(tree):
        target = node.value if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else node
        if isinstance(target, ast.Attribute) and (target is not node or isinstance(node.ctx, ast.Store)):
            yield target.attr


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


def test_every_module_stands_on_a_floor():
    assert {folder_of(module) for module in RULED} == FLOORS.keys()


def test_modules_import_the_floors_below_only():
    for module in RULED:
        own, foreign = imports(ast.walk(MODULES[module]), module)
        folder = folder_of(module)
        wrong = {name for name in own if "(" in name or folder_of(name) not in FLOORS[folder] | {folder}}
        assert not wrong and "hf_dspark_cli" not in foreign, f"{module} imports {sorted(wrong | foreign)}"


def test_no_modules_import_each_other_in_a_circle():
    arrows = {module: imports(ast.walk(MODULES[module]), module)[0] & MODULES.keys() for module in RULED}
    while arrows:
        leaves = {module for module, targets in arrows.items() if not targets & arrows.keys()}
        assert leaves, f"a circle among {sorted(arrows)}"
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}


def test_sampling_needs_torch_numpy_and_the_standard_library_only():
    for module in RULED:
        if folder_of(module) == "sampling":
            _, foreign = imports(ast.walk(MODULES[module]), module)
            assert foreign <= set(sys.stdlib_module_names) | {"torch", "numpy"}, module


def test_files_are_short_enough_to_be_read():
    for module in RULED:
        assert len((PACKAGE / f"{module.replace('.', '/')}.py").read_text().splitlines()) <= 500, module


def test_private_generation_api_is_named_where_it_is_wrapped_only():
    for module in MODULES.keys() - {"decoding.assisted", "decoding.install", "targets.transformers_api"}:
        assert not names_in(MODULES[module]) & PRIVATE_GENERATION_NAMES, module


def test_private_attributes_of_transformers_are_named_in_one_place_only():
    for module in MODULES.keys() - {"targets.transformers_api"}:
        assert not names_in(MODULES[module]) & PRIVATE_ATTRIBUTES, module


def test_private_attributes_of_transformers_are_there():
    assert names_in(MODULES["targets.transformers_api"]) >= PRIVATE_ATTRIBUTES


def test_the_wraps_name_private_generation_api():
    wrapped = WRAPPED_PARAMETERS.keys() - {"generate", "generate_batch"}
    assert wrapped <= PRIVATE_GENERATION_NAMES, f"transformers {transformers.__version__} renamed them"
    assert wrapped <= names_in(MODULES["decoding.install"])


def test_lengths_of_a_cache_are_written_by_the_cache_alone():
    for module in MODULES.keys() - {"models.slot_cache"}:
        assert not {"lengths", "_lengths"} & set(written_attributes(MODULES[module])), module


def test_heavy_packages_are_imported_where_they_are_used():
    for module, tree in MODULES.items():
        _, foreign = imports(at_import_time(tree), module)
        assert not foreign & IMPORTED_WHERE_USED, module


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "THIRD_PARTY.md", "benchmarks/README.md"])
def test_documents_link_to_files_that_are_there(page):
    path = ROOT / page
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


PLACES = re.findall(r"\]\((src/[\w/]+\.py)\): (`\w+`(?:, `\w+`)*)", (ROOT / "README.md").read_text())


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PLACES for name in names.split("`")[1::2]])
def test_readme_names_what_its_files_define(path, name):
    assert re.search(rf"^ *(def |class |){name}\b", (ROOT / path).read_text(), re.MULTILINE)


# ---- the checker itself


def test_import_reader_tells_own_from_foreign_and_early_from_late():
    tree = ast.parse(
        "import torch.nn\nfrom .losses import x\nfrom . import data\nclass A:\n    import datasets\n"
        "def f():\n    import matplotlib\nif TYPE_CHECKING:\n    import peft\n"
        "import_module('..hub.card', __package__)\nimportlib.import_module('hf_dspark.hub.picture')\n"
        "import_module('accelerate.utils')\nimport_module(f'.{name}', __name__)\n"
    )
    assert imports(ast.walk(tree), "sampling.x") == (
        {"sampling.losses", "sampling.data", "hub.card", "hub.picture", "(f'.{name}')"},
        {"torch", "datasets", "matplotlib", "peft", "accelerate"},
    )
    assert imports(at_import_time(tree), "sampling.x")[1] == {"torch", "datasets", "accelerate"}


def test_writes_are_told_from_reads():
    tree = ast.parse("a.b = c.d\na.e[0] += a.f[1]\n(a.g, h), *a.i[2:] = a.j, 0")
    assert sorted(written_attributes(tree)) == ["b", "e", "g", "i"]
