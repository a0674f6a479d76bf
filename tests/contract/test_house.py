"""The shape of the house: who imports whom, where recipes are named, and how long functions are."""

import ast
import functools
import io
import tokenize
from pathlib import Path

import f8sub
from scripts.tables.architecture import ROOMS, room_of

PACKAGE = Path(f8sub.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ORDER = (*ROOMS, "names")
"""In the order of imports: a module imports its own room or those before it; the package's public names import all."""
AGAINST_IT = {
    ("convert.experts", "estimator.experts"),
}
"""Imports that still run against the order. No other may."""
MOST_IMPORTS_ACROSS_ROOMS = 600
MOST_PAIRS_OF_ROOMS = 76
ASSIGNED_FROM_ELSEWHERE = {
    "convert.class_swap.extensions",
    "gradients.reduction.measured_by_module",
    "tensor.float8_tensor.OPS",
}
"""Globals that other modules set or add to: who reads the file does not see what is in them. No other may be."""
MOST_LINES_OF_A_FUNCTION = 80
MOST_QUESTIONS_FOR_EXPERTS = 2
"""How often other rooms ask whether a module is of experts, of which they would need a twin for those."""
FRAGMENTS = {"Of", "As", "Those", "That", "What", "Whether", "Which", "Where", "To", "From", "In"}
"""First words of docstrings that are no sentences: "Of a parameter.", "What multiplies."."""
MOST_FRAGMENTS = 0.02
"""The share of such docstrings in a room."""
FEWEST_COMMENTS = 0.0415
"""Comments for each line of the library. They say why, at the place, and not what."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(path: Path) -> str:
    """``f8sub.linear.saved_input`` of a file."""
    return ".".join(("f8sub", *path.relative_to(PACKAGE).with_suffix("").parts))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_at_run_time(node: ast.AST) -> list[ast.AST]:
    """Import statements anywhere in a module, those for the type checker alone aside."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            found.append(child)
        found += imports_at_run_time(child)
    return found


def imported(path: Path) -> set[str]:
    """Modules of f8sub that a file imports, in functions too."""
    found = set()
    for node in imports_at_run_time(parsed(path)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{name}" for name in names] + [node.module or ""]
        found |= {name for name in names if name in BY_NAME}
    return found - {dotted(path)}


BY_NAME = {dotted(path): path for path in MODULES if path.name != "__init__.py"}


ARROWS = [
    (name.removeprefix("f8sub."), other.removeprefix("f8sub."))
    for name, path in BY_NAME.items()
    for other in sorted(imported(path))
    if room_of(name) != room_of(other)
]


def test_a_module_imports_its_own_room_or_those_before_it():
    def place(module: str) -> int:
        return ORDER.index(room_of(f"f8sub.{module}"))

    assert {(name, other) for name, other in ARROWS if place(other) > place(name)} == AGAINST_IT


def test_rooms_know_few_others():
    """Counted between rooms, so that cutting a file makes it worse or leaves it."""
    arrows = [(room_of(f"f8sub.{name}"), room_of(f"f8sub.{other}")) for name, other in ARROWS]
    assert len(arrows) <= MOST_IMPORTS_ACROSS_ROOMS
    assert len(set(arrows)) <= MOST_PAIRS_OF_ROOMS


def test_few_ask_whether_a_module_is_of_experts():
    """Tools see products: ``convert.products.products_of``."""
    asked = [
        f"{name}:{node.lineno}"
        for name, path in BY_NAME.items()
        if room_of(name) != "experts"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if "Float8Experts" in ast.unparse(node.args[1])
    ]
    assert len(asked) <= MOST_QUESTIONS_FOR_EXPERTS, asked


ADDING = {"add", "append", "extend", "insert", "update"}


def assigned_elsewhere(path: Path) -> set[str]:
    """Globals of other modules that a module sets, or adds to by an item, ``+=`` or a method."""
    modules, names = {}, {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full, known = f"{node.module}.{alias.name}", alias.asname or alias.name
                (modules if full in BY_NAME else names)[known] = full

    def meant(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        is_of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return f"{modules[node.value.id]}.{node.attr}" if is_of_module and node.value.id in modules else None

    found = set()
    for node in ast.walk(parsed(path)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in (part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])):
                if isinstance(target, ast.Attribute):
                    found.add(meant(target))
                elif isinstance(target, ast.Subscript):
                    found.add(meant(target.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
            found.add(meant(node.func.value))
    return {name.removeprefix("f8sub.") for name in found - {None} if name.startswith("f8sub.")}


def test_few_globals_are_assigned_from_elsewhere():
    found = set().union(*(assigned_elsewhere(path) for path in BY_NAME.values()))
    assert {name for name in found if not name[0].isupper()} == ASSIGNED_FROM_ELSEWHERE


def test_imports_are_found():
    """The walk sees something: a layer imports kernels, tensors and weights."""
    assert {"tensor", "kernels", "weights"} <= {
        room_of(name) for name in imported(BY_NAME["f8sub.linear.float8_linear"])
    }


def in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """Modules that are in a cycle of imports, or between two."""
    while True:
        read = set().union(*graph.values())
        kept = {name: others & graph.keys() for name, others in graph.items() if others and name in read}
        if kept == graph:
            return set(graph)
        graph = kept


def test_modules_that_import_each_other():
    """None, neither at module level nor in functions."""
    assert not in_cycles({name: imported(path) for name, path in BY_NAME.items()})


WORDS_FOR_OTHER_THINGS = {
    "tensor": {"rowwise"},
    "formats": {"rowwise", "tensorwise"},
}
"""Names of recipes that are a usage, or tiles of a row and of a whole matrix."""


def test_no_recipe_is_named_outside_the_recipes():
    named = []
    for path in MODULES:
        module = dotted(path).removeprefix("f8sub.")
        if module.startswith("recipes"):
            continue
        meant = [words for part, words in WORDS_FOR_OTHER_THINGS.items() if module.startswith(part)]
        words = set(f8sub.recipe_names()).difference(*meant)
        named += [
            f"{name_of(path)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant) and node.value in words
        ]
    assert not named


def test_no_assert():
    """An assert vanishes under -O: the library raises typed errors."""
    nodes = {path: ast.walk(parsed(path)) for path in MODULES}
    assert not [name_of(path) for path, of in nodes.items() if any(isinstance(n, ast.Assert) for n in of)]


def test_functions_are_short():
    functions = {
        f"{name_of(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > MOST_LINES_OF_A_FUNCTION}


def first_words(path: Path) -> list[str]:
    """The first word of each docstring of a class or function in a file."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (ast.get_docstring(node) for node in ast.walk(parsed(path)) if isinstance(node, kinds))
    return [text.split()[0] for text in found if text]


def share_of_fragments(words: list[str]) -> float:
    return sum(word in FRAGMENTS for word in words) / max(1, len(words))


def test_docstrings_are_sentences():
    of_rooms: dict[str, list[str]] = {room: [] for room in ORDER}
    for path in MODULES:
        of_rooms[room_of(dotted(path).removesuffix(".__init__"))] += first_words(path)
    shares = {room: share_of_fragments(words) for room, words in of_rooms.items()}
    assert not {room: share for room, share in shares.items() if share > MOST_FRAGMENTS}


def test_comments_stand_at_the_place():
    sources = [path.read_text() for path in MODULES]
    comments = sum(
        token.type == tokenize.COMMENT
        for source in sources
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )
    assert comments >= FEWEST_COMMENTS * sum(len(source.splitlines()) for source in sources)


def test_torchs_version_is_looked_at_in_one_place():
    looked_at = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    }
    assert looked_at <= {"torch_compat.py"}


def test_tritons_names_that_may_change_are_reached_for_in_one_place():
    """All but those of ``triton`` and ``triton.language``, which are documented."""
    found = {}
    for path in MODULES:
        statements = [
            node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = {
            *(node.module for node in statements if isinstance(node, ast.ImportFrom) and not node.level),
            *(alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names),
        }
        found[name_of(path)] = {name for name in modules if name and name.split(".")[0] == "triton"}
    assert {name: used for name, used in found.items() if used - {"triton", "triton.language"}} == {}
    reached_for = {name for name in found if "triton.knobs" in (PACKAGE / name).read_text()}
    assert reached_for == {"kernels/triton/triton_compat.py"}


FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
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
