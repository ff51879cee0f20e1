"""What the installed transformers can model with experts, less what moescope reads.

Kept in unclaimed.txt, so that a newcomer is noticed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import transformers

from moescope.families import MODELS
from moescope.families.lab import LAB
from moescope.families.replaced import REPLACED

UNCLAIMED = Path(__file__).with_name("unclaimed.txt")
COUNT = re.compile(r"(num|n|moe_num|num_local|n_routed|num_routed|moe_n)_(\w+_)?experts")
NOT_A_COUNT = re.compile(r"shared|per_tok|top|zero")
SOURCES = Path(transformers.__file__).parent / "models"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PINNED = re.search(r"^transformers==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[1]


def words(node: ast.ClassDef) -> set[str]:
    """Names of the class's fields, of its __init__'s arguments and the words of its attribute_map."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Assign) and any(
            getattr(target, "id", "") == "attribute_map" for target in part.targets
        ):
            found |= {text.value for text in ast.walk(part.value) if isinstance(text, ast.Constant)}
    return found


def assigned(node: ast.ClassDef, name: str) -> list[ast.expr]:
    """What the class body gives to names that begin so."""
    found = []
    for part in node.body:
        target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
        if (
            isinstance(target, ast.Name)
            and target.id.startswith(name)
            and getattr(part, "value", None) is not None
        ):
            found.append(part.value)  # type: ignore[attr-defined]
    return found


def model_type(node: ast.ClassDef) -> str | None:
    return next(
        (value.value for value in assigned(node, "model_type") if isinstance(value, ast.Constant)), None
    )


def refers_to(node: ast.ClassDef) -> set[str]:
    """Names of the classes it extends or holds, and the words beside them, a model_type among them."""
    held = [part for value in assigned(node, "sub_configs") for part in ast.walk(value)]
    names = {part.id for part in (*node.bases, *held) if isinstance(part, ast.Name)}
    return names | {str(part.value) for part in held if isinstance(part, ast.Constant)}


def config_classes() -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for file in sorted(SOURCES.glob("*/configuration_*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def counts_experts(node: ast.ClassDef) -> bool:
    return any(COUNT.fullmatch(word) and not NOT_A_COUNT.search(word) for word in words(node))


def moe_model_types() -> set[str]:
    """Model types whose config counts experts, or holds or extends a config that does."""
    classes = config_classes()
    moe = {name for name, node in classes.items() if counts_experts(node)}
    while True:
        kinds = {model_type(classes[name]) for name in moe} - {None}
        wider = {name for name, node in classes.items() if refers_to(node) & (moe | kinds)}
        if wider <= moe:
            return {kind for kind in kinds if kind}
        moe |= wider


def folders_with_experts() -> set[str]:
    return {
        file.parent.name
        for file in SOURCES.glob("*/modeling_*.py")
        if re.search(
            r"^class \w*(Experts|SparseMoe\w*|MoE|SparseMLP)\(",
            file.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    }


def folders_counting_experts() -> set[str]:
    return {
        file.parent.name
        for file in SOURCES.glob("*/configuration_*.py")
        if any(
            counts_experts(node)
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef)
        )
    }


def test_every_model_with_experts_is_read_or_listed_as_unclaimed():
    listed = set(UNCLAIMED.read_text().split())
    unread = moe_model_types() - set(MODELS)
    new, gone = sorted(unread - listed), sorted(listed - unread)
    assert not new, (
        f"transformers {transformers.__version__} has these with experts; read them, or list them: {new}"
    )
    if transformers.__version__ != PINNED:  # an older one lacks newcomers
        gone = [name for name in gone if name in MODELS]
    assert not gone, (
        f"read by now, or no longer in transformers {transformers.__version__}; strike them out: {gone}"
    )


def test_no_modelling_code_with_experts_escapes_the_search_for_their_count():
    assert folders_with_experts() - folders_counting_experts() == set()


def test_every_model_read_is_one_that_the_search_finds():
    assert set(MODELS) - moe_model_types() == {"kimi_k2", *LAB.models, *REPLACED.models}, (
        "kimi_k2 and the lab are code of their own, not of transformers"
    )


def test_a_new_model_type_is_named():
    node = ast.parse(
        "class NewConfig(PreTrainedConfig):\n    model_type = 'new'\n    num_local_experts: int = 8\n"
    ).body[0]
    assert isinstance(node, ast.ClassDef)
    assert counts_experts(node)
    dense = ast.parse("class OldConfig(PreTrainedConfig):\n    num_shared_experts: int = 1\n").body[0]
    assert isinstance(dense, ast.ClassDef)
    assert not counts_experts(dense)
