"""The shape of a tree of sources, as numbers: circles of modules, names that stand in several places, jumps, words."""

import ast
import io
import itertools
import re
import tokenize
from collections import Counter, defaultdict

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_FUNCTION, ast.ClassDef, ast.Module)
_SMALL = 3  # lines: a private function that is no longer, and used once, costs a jump and saves nothing
_FORMER = {
    *(
        "workspace",
        "workspaces",
        "Workspaces",
        "image",
        "images",
        "movers",
        "lacks",
        "take_stock",
        "let_go",
        "fruitless",
    ),
    *("is_for_one_name", "HeldDirectories", "carry", "settle"),
}
_STORAGE = re.compile(
    r"\bsingledispatch\b|\bin_files\(|\bin_store\(|\.bucket\b|\bis_url\(|\bis_mounted\(|\.lacks\b|\.unsupported\b"
)


def imports(trees):
    """Module -> the modules of the tree that it imports, those for types alone and those within functions too.

    Args:
        trees: dotted name -> parsed module.
    """
    return {here: set(_imported(tree, trees)) - {here} for here, tree in trees.items()}


def _imported(tree, trees):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (full if (full := f"{node.module}.{one.name}") in trees else node.module for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def circles(graph):
    """The groups of modules of which each imports, by a way, every other one of its group."""
    reach = {}
    for module in graph:
        seen, left = set(), [module]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reach[module] = seen
    return {frozenset(two for two in reach[one] if one in reach.get(two, ())) for one in graph if one in reach[one]}


def jumps(trees):
    """The private functions with a body of at most three lines that their module calls in one place: each costs a jump.

    Not those that are passed on by name, or that a framework or a subclass elsewhere calls, nor a generator, nor what has a
    decorator.
    """
    used = {module: _uses(tree) for module, tree in trees.items()}
    used_anywhere = sum(used.values(), Counter())
    return [
        f"{module}.{node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTION) and re.match("_[^_]", node.name) and not node.decorator_list
        if 0 < _lines(node) <= _SMALL and not any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))
        if (used_anywhere if _is_method(tree, node) else used[module])[node.name] == 1 and _is_called(tree, node)
    ]


def _lines(function):
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def _uses(tree):
    return Counter(map(_name, _names(tree)))


def _names(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))


def _name(node):
    return node.id if isinstance(node, ast.Name) else node.attr


def _is_method(tree, function):
    return any(function in one.body for one in ast.walk(tree) if isinstance(one, ast.ClassDef))


def _is_called(tree, function):
    """Whether a call outside of it has its name: ``super`` calls within it what it overrides."""
    within = {id(node) for node in _names(function)}
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        _name(called) == function.name and id(called) not in within
        for called in calls
        if isinstance(called, ast.Name | ast.Attribute)
    )


def shared_names(trees, kinds=(*_FUNCTION, ast.ClassDef)):
    """The public functions and classes that more than one module defines under one name."""
    homes = defaultdict(set)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                homes[node.name].add(module)
    return sorted(name for name, modules in homes.items() if len(modules) > 1)


def shared_classes(trees):
    """Of ``shared_names`` the classes."""
    return shared_names(trees, (ast.ClassDef,))


def docstrings_with_what(trees):
    """How many docstrings, those below attributes too, begin with "What": with neither a verb nor a noun of the field."""
    return sum(bool(re.match(r"\s*What\b", text)) for tree in trees.values() for text in _documentation(tree))


def _documentation(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, here in itertools.pairwise([node, *body] if isinstance(body, list) else ()):
            if isinstance(before, (*_DOCUMENTED, ast.Assign, ast.AnnAssign)) and isinstance(here, ast.Expr):
                yield here.value.value if isinstance(getattr(here.value, "value", None), str) else ""


def former_words(texts):
    """How often a name is a word that another one has replaced, so that one thing has one word."""
    names = (token.string for text in texts for token in tokenize.generate_tokens(io.StringIO(text).readline))
    return sum(name in _FORMER for name in names)


def storage_spellings(texts):
    """How often these texts ask which storage it is, by other means than ``isinstance``."""
    return sum(len(_STORAGE.findall(text)) for text in texts)
