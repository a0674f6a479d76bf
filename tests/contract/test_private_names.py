"""Private names of torch are reached in f8sub/torch_compat.py alone, which looks whether they are there."""

import ast
import re
from collections.abc import Iterator

from f8sub import torch_compat
from tests.contract.test_house import MODULES, name_of, parsed

COMPAT = "torch_compat.py"

ACCEPTED = {
    # torch's notes on extending it tell to call these in ``__new__``, and all wrapper subclasses do.
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    # torch's documentation lists them, with what they do.
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_sub_",
    "torch._foreach_zero_",
    # Operators, by whose schemas dispatch, exported programs and other backends go.
    "aten._pin_memory",
    "aten._to_copy",
    "torch.ops.aten._unsafe_view",
}

OF_OBJECTS = {
    # DTensor's: to_local() is a view that autograd sees.
    "_local_tensor",
    # Tensor's, and in its pickles or copies.
    *("_backward_hooks", "_base", "_cdata", "_post_accumulate_grad_hooks", "_version"),
    # nn.Module's, and in its pickles; hooks are what a user may have set.
    *("_buffers", "_compiled_call_impl", "_modules", "_non_persistent_buffers_set", "_parameters"),
    *("_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks"),
    # Optimizer's: the hooks that register_step_pre_hook and _post_hook made, and what a GradScaler asks for.
    *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_step_supports_amp_scaling"),
    # An operator's: what it is given and what it writes to.
    "_schema",
    # Python's, torchtitan's and transformers'.
    *("_actions", "_apply_gate", "_asdict", "_from_config", "_getframe", "_manager", "_warmup_remaining"),
    *("_attn_implementation", "_keys_to_ignore_on_save", "_weight_conversions"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def dotted(node: ast.expr) -> str | None:
    """``torch.ops.aten`` of an attribute of a name; None of one of anything else."""
    text = ast.unparse(node)
    return text if re.fullmatch(r"\w+(\.\w+)*", text) else None


def names_of_own() -> set[str]:
    """What f8sub defines itself: functions, classes, variables, and attributes of its own objects."""
    found = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls", "ctx", "made") else set()
    return found


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("torch.") and any(map(is_private, name.split("."))):
                yield node.lineno, name


def private_attributes(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Chains from a module of torch's, whole; of other objects the attribute. ``getattr`` with a name, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = dotted(node)
            if chain is not None and chain.partition(".")[0] in ("torch", "aten", "dist", "nn", "F"):
                yield node.lineno, chain
            elif node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in own:
                yield node.lineno, name.value


def names_of_fsdp(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Its operators, by name or as attributes of ``torch.ops``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("fsdp::"):
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.ops.fsdp":
            yield node.lineno, "torch.ops.fsdp"


def test_private_names_of_torch_are_in_one_file():
    own, wrong, seen = names_of_own() - OF_OBJECTS, [], set()
    for path in MODULES:
        if path.name == COMPAT:
            continue
        tree = parsed(path)
        found = [*private_imports(tree), *private_attributes(tree, own), *names_of_fsdp(tree)]
        seen |= {name for _, name in found}
        wrong += [
            f"{name_of(path)}:{line}: {name}" for line, name in found if name not in ACCEPTED | OF_OBJECTS
        ]
    assert wrong == [], "bind or wrap them in torch_compat.py, with a line in what it needs"
    assert (ACCEPTED | OF_OBJECTS) - seen == set(), "accepted, and no longer used"


MARKS = {"_dynamo_marked_constant", "_torchdynamo_disable", "_dynamo", "_C"}
"""What dynamo looks for on functions, which changes nothing where it is not known; modules on the way to names."""
EITHER = {"_fsdp_param_group", "_fsdp_param_groups"}
"""One of these; ``_groups_of`` raises where there is neither."""
NEWER = {"_reset_iter_state"}
"""Of torch 2.14 and newer, and looked for where it is called."""


def test_what_that_file_reaches_is_looked_at():
    """Each private name in it is in the table of a need."""
    tree = parsed(next(path for path in MODULES if path.name == COMPAT))
    paths = [path for need in torch_compat.NEEDS for path in need.names]
    attributes = [
        name for need in torch_compat.NEEDS for of in need.attributes.values() for name in of.split()
    ]
    listed = {part for path in [*paths, *attributes] for part in path.split(".")}
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
    reached = {name.rpartition(".")[2] for _, name in private_attributes(tree, own)}
    reached |= {part for _, name in private_imports(tree) for part in name.split(".") if is_private(part)}
    assert reached - listed - MARKS - EITHER - NEWER - OF_OBJECTS == set()
    bound = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_private"
    }
    assert len(bound) > 15
    assert not bound - set(paths) - {"torch.ops._c10d_functional.all_reduce.default"}


def test_this_torch_has_all_of_it():
    assert {need.purpose: torch_compat.problems(need) for need in torch_compat.NEEDS} == {
        need.purpose: () for need in torch_compat.NEEDS
    }
