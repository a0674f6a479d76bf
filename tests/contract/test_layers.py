"""The shape of the house: who imports whom, where recipes are named, and how long things are."""

import ast
import functools
from pathlib import Path

import f8sub

PACKAGE = Path(f8sub.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {
    "errors": 0,
    "formats": 0,
    "host_copy": 0,
    "recipe": 0,
    "recipes": 0,
    "torch_compat": 0,
    "version": 0,
    "kernels": 1,
    "backends": 2,
    "tensor": 3,
    "linear": 4,
    "context": 4,
    "extensions": 4,
    "layers": 4,
    "saved_input": 4,
    "shared_input": 4,
    "spread": 4,
    "scaling_state": 4,
    "fsdp": 5,
    "tensor_parallel": 5,
    "byte_account": 6,
    "conversion_checks": 6,
    "convert": 6,
    "defaults": 6,
    "filters": 6,
    "foreign_calls": 6,
    "other_weights": 6,
    "patterns": 6,
    "report": 6,
    "autocast": 6,
    "primary_weights": 6,
    "optim": 6,
    "step_guard": 6,
    "find_nonfinite": 6,
    "integrations": 7,
    "titan": 7,
    "monitor": 7,
    "cli": 7,
    "__main__": 7,
    "__init__": 8,
}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 80


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """The module or folder right under f8sub that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_at_run_time(node: ast.AST) -> list[ast.AST]:
    """Import statements anywhere in a module, those for the type checker alone aside."""
    found = []
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            found.append(child)
        found += imports_at_run_time(child)
    return found


def parts_imported(path: Path) -> set[str]:
    """Parts of f8sub that a file imports."""
    found = set()
    for node in imports_at_run_time(parsed(path)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            names = [f"f8sub.{name}" for name in names] if module == "f8sub" else [module]
        found |= {name.split(".")[1] for name in names if name.startswith("f8sub.")}
        if "f8sub" in names:
            found.add("__init__")
    return found


def test_every_part_has_a_layer():
    assert {part_of(path) for path in MODULES} <= set(LAYERS)


def test_a_module_imports_its_own_layer_or_lower():
    wrong = [
        f"{name_of(path)}, layer {LAYERS[part_of(path)]}, imports {part}, layer {LAYERS[part]}"
        for path in MODULES
        for part in sorted(parts_imported(path))
        if LAYERS[part] > LAYERS[part_of(path)]
    ]
    assert not wrong


def test_imports_are_found():
    """The walk sees something: linear imports the tensors, and convert is for the package and the integrations."""
    assert {"tensor", "kernels", "backends"} <= parts_imported(PACKAGE / "linear.py")
    importers = {part_of(path) for path in MODULES if "convert" in parts_imported(path)}
    assert importers == {"__init__", "integrations"}


def test_the_docstring_says_the_layer():
    wrong = []
    for path in MODULES:
        text = ast.get_docstring(parsed(path)) or ""
        expected = f"Layer {LAYERS[part_of(path)]}."
        own_text = path.parent.name == "recipes" or path == PACKAGE / "__init__.py"
        if not own_text and not text.startswith(expected):
            wrong.append(f"{path.relative_to(PACKAGE)}: {text[:20]!r}, not {expected!r}")
    assert not wrong


WORDS_FOR_OTHER_THINGS = {"tensor": {"rowwise"}, "formats": {"rowwise", "tensorwise"}}
"""Names of recipes that are a usage, or tiles of a row and of a whole matrix."""


def test_no_recipe_is_named_outside_the_recipes():
    named = []
    for path in MODULES:
        if part_of(path) == "recipes":
            continue
        words = set(f8sub.recipe_names()) - WORDS_FOR_OTHER_THINGS.get(part_of(path), set())
        named += [
            f"{name_of(path)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and node.value in words
        ]
    assert not named


def test_no_assert():
    """An assert vanishes under -O: the library raises typed errors."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_files_and_functions_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE}
    functions = {
        f"{name_of(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > MOST_LINES_OF_A_FUNCTION}


def test_torchs_version_is_looked_at_in_one_place():
    looked_at = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    }
    assert looked_at <= {"torch_compat.py"}


FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}
CLASSES = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"}


def torchs_calls(path: Path, names: set[str]) -> list[ast.Call]:
    """Calls of ``torch.NAME``."""
    calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    functions = {f"torch.{name}" for name in names}
    return [call for call in calls if ast.unparse(call.func) in functions]


def test_every_factory_names_its_dtype_and_its_device():
    """Else the tensor is of whatever dtype and device the user made the default where it happens to be made first."""
    calls = {path: torchs_calls(path, FACTORIES) for path in MODULES}
    unnamed = [
        f"{name_of(path)}:{call.lineno}: {ast.unparse(call)}"
        for path, found in calls.items()
        for call in found
        if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]
    unnamed += [f"{name_of(path)}:{call.lineno}" for path in MODULES for call in torchs_calls(path, CLASSES)]
    assert not unnamed
    assert sum(map(len, calls.values())) > 20
