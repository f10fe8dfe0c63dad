"""Numbers of the tree that are to fall: ``numbers.json`` says where each stands. Whoever lowers one writes it there."""

import ast
import json
from pathlib import Path

import pytest

import safe_ckpt
from kit import shape
from kit.lines import code_lines

SOURCES = Path(safe_ckpt.__file__).parent
NUMBERS = json.loads(Path(__file__).with_name("numbers.json").read_text(encoding="utf-8"))
AUDIT = SOURCES / "tools" / "audit"  # it is a program of its own, and no part of a save
STORAGE_ROOMS = (SOURCES / "core" / "home", SOURCES / "core" / "storage")
PLACES = {
    "Path",
    "PurePath",
    "ObjectPath",
    "Place",
    "FileHome",
    "ObjectHome",
}


def parsed():
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SOURCES.rglob("*.py"))}


def asks_which_storage(node):
    """Whether a node asks if something is a file or an object: ``isinstance`` on a place or a home, or ``is_object``."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return bool(PLACES & {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)})
    return "is_object" in (getattr(node, "id", None), getattr(node, "attr", None))


def storage_questions(trees):
    outside = [tree for file, tree in trees.items() if not any(room in file.parents for room in STORAGE_ROOMS)]
    return sum(asks_which_storage(node) for tree in outside for node in ast.walk(tree))


def room_of(dotted):
    """The room of the core that a dotted name lies in; None outside of it, and for the modules beside the rooms."""
    parts = dotted.split(".")
    inside = parts[:2] == ["safe_ckpt", "core"] and len(parts) > 2 and (SOURCES / "core" / parts[2]).is_dir()
    return parts[2] if inside else None


def arrows(trees):
    """How many pairs of rooms of the core are joined by an import, those for types alone too."""
    found = set()
    for file, tree in trees.items():
        here = room_of(".".join(("safe_ckpt", *file.relative_to(SOURCES).with_suffix("").parts)))
        names = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if here and isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        found |= {(here, room_of(name)) for name in names} - {(here, None), (here, here)}
    return len(found)


def fields(trees):
    """How many things a save carries: the fields of ``SaveRequest`` and of ``SaveJob``."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return sum(
        isinstance(part, ast.AnnAssign)
        for one in classes
        if one.name in {"SaveRequest", "SaveJob"}
        for part in one.body
    )


def dotted(file):
    parts = ("safe_ckpt", *file.relative_to(SOURCES).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def measured():
    trees = parsed()
    modules = {dotted(file): tree for file, tree in trees.items()}
    places = SOURCES / "core" / "home" / "places.py"
    elsewhere = [file for file in trees if file != places and STORAGE_ROOMS[1] not in file.parents]
    return {
        "circles of modules, imports for types too": len(shape.circles(shape.imports(modules))),
        "private functions of at most three lines that are used once": len(shape.jumps(modules)),
        "public names in more than one module": len(shape.shared_names(modules)),
        "public classes in more than one module": len(shape.shared_classes(modules)),
        "words that others have replaced": shape.former_words(file.read_text(encoding="utf-8") for file in trees),
        "docstrings that begin with What": shape.docstrings_with_what(modules),
        "questions which storage it is, in other spellings": shape.storage_spellings(
            file.read_text(encoding="utf-8") for file in elsewhere
        ),
        "code lines": sum(code_lines(file.read_text(encoding="utf-8")) for file in trees if AUDIT not in file.parents),
        "code lines of the audit": sum(code_lines(file.read_text(encoding="utf-8")) for file in AUDIT.rglob("*.py")),
        "questions which storage it is, outside of home and storage": storage_questions(trees),
        "arrows between rooms of the core": arrows(trees),
        "fields of SaveRequest and SaveJob": fields(trees),
    }


@pytest.fixture(scope="module")
def now():
    return measured()


@pytest.mark.parametrize("number", sorted(NUMBERS))
def test_no_number_of_the_tree_is_above_numbers_json(now, number):
    """A number of the tree is at most what ``numbers.json`` says: lower it there when it has fallen.

    None is raised but the code lines, by what the change log names as new.
    """
    assert now[number] <= NUMBERS[number]


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("isinstance(place, ObjectPath)", True),
        ("isinstance(place, (str, Path))", True),
        ("place.is_object", True),
        ("is_object(place)", True),
        ("isinstance(place, str)", False),
    ],
)
def test_a_line_that_asks_which_storage_it_is_is_counted(line, asks):
    """A count that finds nothing would hold for ever."""
    assert any(map(asks_which_storage, ast.walk(ast.parse(line)))) == asks


if __name__ == "__main__":
    print(json.dumps(measured(), indent=2))
