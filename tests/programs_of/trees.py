"""Random trees of containers, tensors, numbers, text, arrays. The same choices with other values give a likeness."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from kit.states import DTYPES
from programs_of.draw import Draw

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
NARROW = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


class Point(NamedTuple):
    """A named tuple of the user's."""

    x: Any
    y: Any


@dataclasses.dataclass
class Place:
    """A dataclass of the user's."""

    x: Any
    y: Any


class Mine(torch.Tensor):
    """A subclass of the user's."""


class Stateful:
    """What has a state dict, and counts how often it was given one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        """As is."""
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As is."""
        self.inner = state["inner"]


class Trees:
    """Makes a tree, and with ``values`` another one of the same kinds and shapes, with other numbers.

    Args:
        draw: says what it is made of.
        values: which numbers.
    """

    def __init__(self, draw: Draw, values: int) -> None:
        self._draw, self._values = draw, values
        self._tensors: list[torch.Tensor] = []
        self._containers: list[Any] = []

    def tree(self, name: str, depth: int) -> Any:
        """A value; with depth 0 one that holds no others."""
        kinds: list[Callable[[str, int], Any]] = [self._tensor, self._plain]
        if depth:
            kinds = [self._dict, *kinds, self._dict, self._list, self._tuple, self._other, self._again]
        return self._draw.among(f"{name}/kind", *kinds)(name, depth)

    def tensors(self, name: str, count: int) -> dict[str, torch.Tensor]:
        """A mapping of tensors only, as a state dict is; most of them without any that no state dict has."""
        how = self._draw.among(f"{name}/as of a model", LAYOUTS, OF_MODELS, OF_MODELS)
        made = {self._key(f"{name}.{n}", n): self._tensor(f"{name}.{n}", 0, how) for n in range(count)}
        return self._draw.among(f"{name}/mapping of tensors", dict, OrderedDict)(made)  # type: ignore[no-any-return]

    def _inner(self, name: str, depth: int) -> list[Any]:
        return [self.tree(f"{name}.{n}", depth - 1) for n in range(self._draw.number(f"{name}/count", 0, 3))]

    def _key(self, name: str, n: int) -> Any:
        return f"k{n}" if self._draw.among(f"{name}/key", 0, 0, 1) == 0 else ["a.b", "ü/ x", "k10", "step"][n % 4]

    def _dict(self, name: str, depth: int) -> Any:
        pairs = {self._key(f"{name}.{n}", n): one for n, one in enumerate(self._inner(name, depth))}
        if self._draw.flag(f"{name}/numbers", of=4):
            pairs = dict(enumerate(pairs.values()))
        if self._draw.flag(f"{name}/turned", of=3):
            pairs = dict(reversed(pairs.items()))
        return self._keep(self._draw.among(f"{name}/mapping", dict, dict, OrderedDict)(pairs))

    def _list(self, name: str, depth: int) -> Any:
        return self._keep(self._inner(name, depth))

    def _tuple(self, name: str, depth: int) -> Any:
        return tuple(self._inner(name, depth))

    def _other(self, name: str, depth: int) -> Any:
        one, other = (self.tree(f"{name}.{n}", depth - 1) for n in (0, 1))
        return self._draw.among(
            f"{name}/other",
            lambda: (one, other),
            lambda: Point(one, other),
            lambda: Place(one, other),
            lambda: defaultdict(list, {"k": one}),
            lambda: deque([one, other]),
            lambda: Counter("abca"),
            lambda: {1, "two", (3, 4)},
            lambda: frozenset([1, 2]),
        )()

    def _again(self, name: str, depth: int) -> Any:
        """What was there before, a second time."""
        return self._containers[-1] if self._containers else self._list(name, depth)

    def _keep(self, one: Any) -> Any:
        self._containers.append(one)
        return one

    def _plain(self, name: str, depth: int) -> Any:
        n = self._random(name).randrange(1, 100)
        array = (
            numpy.arange(6).astype(self._draw.among(f"{name}/array", "f4", "i8", "f2", ">i4", "c8", "?")).reshape(2, 3)
        )
        return self._draw.among(
            f"{name}/plain", n, n / 7, f"text {n} ü\n", None, True, b"\0bytes", bytearray(b"ab"), float("inf"), float("nan"),
            -0.0, 1 << (70 + n % 5), complex(n, 2), "", array, array.T, numpy.float32(n), numpy.int64(n), torch.bfloat16,
            torch.Size([n, 2]), torch.device("cpu"), pathlib.PurePosixPath("a/b"), datetime.timedelta(seconds=n), range(n),
            slice(1, n), "\ud800",
        )  # fmt: skip

    def _random(self, name: str) -> random.Random:
        return self._draw.random(f"{name}/values {self._values}")

    def numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """With values of this tree."""
        of = torch.Generator().manual_seed(self._random(name).randrange(1 << 30))
        return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=of).to(dtype)

    def _tensor(self, name: str, depth: int, layouts: Sequence[Callable[[Any], Any]] = ()) -> Any:
        is_of_model = layouts is OF_MODELS
        dtype = self._draw.among(f"{name}/dtype", *NARROW, *NARROW, *(() if is_of_model else DTYPES))
        shapes = ((3, 4), (2, 3, 4, 5), (7, 2), ()) if is_of_model else SHAPES
        shape = self._draw.among(f"{name}/shape", *shapes)
        made = self.numbers(name, shape, dtype)
        how = self._draw.among(f"{name}/layout", *(layouts or LAYOUTS))
        if not is_of_model and self._draw.flag(f"{name}/eight bits", of=12):
            made = self.numbers(name, shape, self._draw.among(f"{name}/kind of eight bits", *EIGHT_BITS))
            how = self._draw.among(f"{name}/trained", _needs_gradient, _parameter, _as_is)
        if not is_of_model and self._draw.flag(f"{name}/odd", of=25):  # most saves refuse them
            how = self._draw.among(f"{name}/how odd", _subclass, _on_meta)
        found = how(made)
        others = () if is_of_model else ("view", "part", "bytes")
        again = self._draw.among(f"{name}/again", "", "", "", "same", *others)
        if again and self._tensors:
            before = self._tensors[-1]
            found = {
                "same": lambda one: one,
                "view": _view,
                "part": lambda one: one[:1] if one.ndim and one.layout is torch.strided else one,
                "bytes": _bytes,
            }[again](before)
        self._tensors.append(found)
        return found


def _as_is(one: torch.Tensor) -> torch.Tensor:
    return one


def _turned(one: torch.Tensor) -> torch.Tensor:
    return one.mT if one.ndim > 1 else one


def _strided(one: torch.Tensor) -> torch.Tensor:
    return one[::2] if one.ndim else one


def _expanded(one: torch.Tensor) -> torch.Tensor:
    return one.unsqueeze(0).expand(2, *one.shape)


def _channels_last(one: torch.Tensor) -> torch.Tensor:
    one = one.reshape(*one.shape, *[1] * (4 - one.ndim)) if one.ndim < 4 else one
    return one.contiguous(memory_format=torch.channels_last)


def _behind(one: torch.Tensor) -> torch.Tensor:
    return one.flatten()[1:]


def _conjugated(one: torch.Tensor) -> torch.Tensor:
    return torch.complex(one.float(), one.float() + 1).conj()


def _negated(one: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(one.float())


def _sparse(one: torch.Tensor) -> torch.Tensor:
    return one.float().to_sparse()


def _csr(one: torch.Tensor) -> torch.Tensor:
    return one.float().to_sparse_csr() if one.ndim == 2 and one.numel() else one


def _parameter(one: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(one if one.is_floating_point() else one.float())


def _frozen_parameter(one: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(one, requires_grad=False)


def _needs_gradient(one: torch.Tensor) -> torch.Tensor:
    return (one if one.is_floating_point() else one.float()).requires_grad_()


def _on_meta(one: torch.Tensor) -> torch.Tensor:
    return one.to("meta")


def _subclass(one: torch.Tensor) -> torch.Tensor:
    return one.as_subclass(Mine)


def _with_attribute(one: torch.Tensor) -> torch.Tensor:
    one.mine = "text"  # type: ignore[attr-defined]
    return one


def _view(one: torch.Tensor) -> torch.Tensor:
    return one.detach().view(one.shape) if one.layout is torch.strided else one


def _bytes(one: torch.Tensor) -> torch.Tensor:
    is_plain = one.layout is torch.strided and one.is_contiguous() and one.ndim and not (one.is_conj() or one.is_neg())
    return one.detach().view(torch.uint8) if is_plain and one.stride(-1) == 1 else one


SHAPES = ((3, 4), (3, 4), (), (0, 4), (1,), (2, 3, 4, 5), (7,), (300, 1000))
LAYOUTS = (
    _as_is, _as_is, _turned, _strided, _expanded, _channels_last, _behind, _conjugated, _negated, _sparse, _csr, _parameter,
    _needs_gradient, _with_attribute, _frozen_parameter,
)  # fmt: skip
OF_MODELS = (_as_is, _parameter, _turned, _channels_last, _channels_last, _frozen_parameter, _needs_gradient)
"""Those that state dicts have; one of the others takes a whole mapping to another format."""
