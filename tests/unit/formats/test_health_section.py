"""What a manifest says of the numbers: read as it was written, and refused wherever anything in it is of another type."""

import copy

import pytest

from safe_ckpt.core.formats.manifest import checked_health

FACTS = {
    "norm": 1.5,
    "sick_tensors": 1,
    "jump": 12.0,
    "sick": [{"name": "w", "numbers": 4, "nan": 1, "inf": 0}],
    "changed": [{"name": "b", "where": "the host"}],
    "learnt": {"layer": ["layer.*", 3]},
    "hashes": {"w": "0f"},
    "layout": "one",
    "ignored": "",
    "largest": "w",
}
GOOD = {"healthy": False, "marked": True, "files": {"model.safetensors": FACTS}}


def places(value, path=()):
    """The way to each value within, containers before what is in them."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def with_value(path, value):
    changed = copy.deepcopy(GOOD)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def without(path):
    changed = with_value(path, None)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return changed


def test_what_was_found_is_read_as_it_was_written():
    """The whole section, and one that says nothing."""
    assert checked_health(copy.deepcopy(GOOD)) == GOOD
    assert checked_health({}) == {}


@pytest.mark.parametrize("path", list(places(GOOD)), ids=lambda path: "/".join(map(str, path)))
def test_any_value_of_another_type_is_refused(path):
    """A reader may rely on each: no null, no text for a number or number for a text, no list for a table."""
    own = GOOD
    for key in path:
        own = own[key]
    for other in (None, "x", 1, 1.5, True, [], {}):
        is_number = type(own) in (int, float) and len(path) == 3  # a fact of the numbers may be any of the two
        if type(other) is type(own) or (is_number and type(other) in (int, float)):
            continue
        with pytest.raises((TypeError, ValueError, KeyError)):
            checked_health(with_value(path, other))


@pytest.mark.parametrize("path", [one for one in places(GOOD) if len(one) == 1 or one[-1] in ("name", "nan", "where")])
def test_a_value_that_is_missing_is_refused(path):
    """What says whether it is healthy, and what each row needs."""
    with pytest.raises(KeyError):
        checked_health(without(path))
