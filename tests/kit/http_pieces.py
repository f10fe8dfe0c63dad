"""Just enough of HTTP/1.1 to pass messages on as they are: where a head ends, and where a body does."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

PIECE = 256 << 10
CHUNKED, OPEN = -2, -1  # sizes of a body: its chunks tell; the end of the connection does
_END = b"\r\n"


class GoneError(Exception):
    """A connection is over."""


@dataclass(frozen=True)
class Head:
    """The head of a request or an answer.

    Attributes:
        raw: as it came.
        first: the three words of its first line.
        headers: names in small letters.
    """

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @classmethod
    def of(cls, raw: bytes) -> Head:
        """Read it."""
        lines = raw.decode("latin-1").strip("\r\n").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(raw, [*lines[0].split(" ", 2), "", ""][:3], headers)

    @property
    def ends_connection(self) -> bool:
        """Whether the one who sent it closes the connection after it."""
        usual = "close" if "HTTP/1.0" in self.first else "keep-alive"
        return self.headers.get("connection", usual).lower() == "close"

    def size(self, default: int = 0) -> int:
        """Of the body, in bytes, or CHUNKED; the default when the head does not say it."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return CHUNKED
        return int(self.headers.get("content-length", default))

    def size_as_answer_to(self, method: str) -> int:
        """Of the body, or CHUNKED or OPEN."""
        bare = method == "HEAD" or self.first[1] in {"204", "304"}
        return 0 if bare else self.size(OPEN)


class Side:
    """A socket with a buffer. Pieces of it are views, good until the next is asked for."""

    def __init__(self, socket_: socket.socket) -> None:
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = socket_
        self._view = memoryview(bytearray(PIECE))
        self._start = self._end = 0

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing has come that nobody has read."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return self._start == self._end
        except OSError:
            pass
        return False

    def head(self) -> Head:
        """The next one."""
        return Head.of(self._until(_END + _END))

    def answer(self) -> Head:
        """The next head that is an answer, without those that only tell to go on."""
        while (answer := self.head()).first[1] == "100":
            pass
        return answer

    def body(self, size: int, most: int = PIECE) -> Iterator[memoryview | bytes]:
        """So many bytes, or what CHUNKED or OPEN stands for, in pieces of at most that many."""
        return self._chunks(most) if size == CHUNKED else self._pieces(size, most)

    def send(self, data: memoryview | bytes) -> None:
        """All of it."""
        self.socket.sendall(data)

    def _more(self) -> bool:
        """Receive something; whether anything came."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._end == PIECE:
            raise GoneError  # no mark in so much
        got = self.socket.recv_into(self._view[self._end :])
        self._end += got
        return got > 0

    def _until(self, mark: bytes) -> bytes:
        if self._start:
            left = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, len(left)
            self._view[: len(left)] = left
        while (found := bytes(self._view[: self._end]).find(mark)) < 0:
            if not self._more():
                raise GoneError
        self._start = found + len(mark)
        return bytes(self._view[: self._start])

    def _pieces(self, size: int, most: int) -> Iterator[memoryview]:
        while size != 0:
            if self._start == self._end and not self._more():
                if size == OPEN:
                    return
                raise GoneError
            count = min(self._end - self._start, most, size if size > 0 else most)
            self._start += count
            size -= count if size > 0 else 0
            yield self._view[self._start - count : self._start]

    def _chunks(self, most: int) -> Iterator[memoryview | bytes]:
        """As they came, with their sizes and trailers."""
        size = -1
        while size != 0:
            line = self._until(_END)
            yield line
            size = int(line.split(b";")[0], 16)
            yield from self._pieces(size + len(_END) if size else 0, most)
        while line != _END:
            line = self._until(_END)
            yield line


def close_with_reset(socket_: socket.socket) -> None:
    """Who is at the other end gets a reset."""
    with contextlib.suppress(OSError):
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket_.close()


__all__ = ["CHUNKED", "OPEN", "PIECE", "GoneError", "Head", "Side", "close_with_reset"]
