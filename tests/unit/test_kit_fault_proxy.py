"""The proxy of the test kit: what it does not fail passes as it is, and each fault is the one that it is called."""

import contextlib
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import obstore
import pytest
from obstore.store import from_url

from kit import object_servers
from kit.fault_proxy import FaultProxy

BODY = bytes(range(256)) * 4096


class Answers(http.server.BaseHTTPRequestHandler):
    """Keeps what it is asked; answers a request with its body, or as the path says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self):
        body = self._body()
        self.server.heard.append((self.command, self.path, self.headers.items(), body))
        self.server.connections.add(self.client_address)
        self.server.times.append(time.monotonic())
        self.send_response(204 if self.path == "/none" else 200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (b"one", BODY, b"two")))
            self.wfile.write(b"0\r\nAfter: all\r\n\r\n")
            return
        self.close_connection = self.path in {"/open", "/leaves", "/vanishes"}
        if self.path == "/leaves":
            self.send_header("Connection", "close")
        if self.path not in {"/none", "/open"}:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size + 2)[:-2]
        self.rfile.readline()
        return body

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

    def log_message(self, *args):
        """Nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Says when it has closed a connection."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.heard, self.connections, self.times = [], set(), []
        self.left = threading.Event()

    def shutdown_request(self, request):
        super().shutdown_request(request)
        self.left.set()


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server):
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)) as client:
        yield client


def ask(client, method="PUT", path="/a", body=b"x" * 1000, **more):
    client.request(method, path, body, **more)
    answer = client.getresponse()
    return answer.status, answer.read()


def test_the_fault_proxy_passes_requests_on_as_they_are(proxy, client, server):
    """Method, path with query, headers, Host and both kinds of bodies; one connection of a client is one to the server."""
    headers = {"Host": "bucket.example", "X-Odd": "a:  b", "If-None-Match": "*"}
    assert ask(client, "PUT", "/a%20b?c=d&e=%2F", BODY, headers=headers) == (200, BODY)
    assert ask(client, "POST", "/p", iter([b"ab", BODY, b"c"]), encode_chunked=True) == (200, b"ab" + BODY + b"c")
    assert ask(client, "HEAD", "/h", b"") == (200, b"")
    assert ask(client, "DELETE", "/none", None) == (204, b"")
    assert ask(client, "GET", "/chunked", None) == (200, b"one" + BODY + b"two")
    method, path, said, body = server.heard[0]
    assert (method, path, body) == ("PUT", "/a%20b?c=d&e=%2F", BODY)
    usual = {"Accept-Encoding": "identity", "Content-Length": str(len(BODY))}
    assert sorted(said) == sorted({**headers, **usual}.items())
    assert len(server.connections) == 1
    proxy.settle()
    assert [record.number for record in proxy.seen] == [1, 2, 3, 4, 5]
    assert [(record.method, record.path, record.size, record.status) for record in proxy.seen[:1]] == [
        ("PUT", "/a%20b?c=d&e=%2F", len(BODY), 200)
    ]
    assert proxy.seen[3].status == 204
    assert all(record.seconds > 0 and not record.fault for record in proxy.seen)
    assert proxy.hits == []


def test_an_answer_may_be_another_one(proxy, client, server):
    """Longer, shorter, or that there is no such key; the connection stays, and what is not changed passes as it is."""
    answers = {"/longer": BODY + b"x", "/shorter": b"", "/absent": None}
    proxy.rewrite = lambda record, body: answers.get(record.path, body)
    assert [ask(client, path=path) for path in ("/longer", "/shorter")] == [(200, BODY + b"x"), (200, b"")]
    status, said = ask(client, path="/absent")
    assert (status, b"NoSuchKey" in said) == (404, True)
    assert ask(client) == (200, b"x" * 1000)
    assert ask(client, "HEAD", "/h", b"") == (200, b"")
    assert len(server.connections) == 1


@pytest.mark.parametrize("path", ["/open", "/leaves"])
def test_an_answer_that_ends_with_its_connection_does_so(proxy, client, server, path):
    """Whether or not its head says how long it is; the next request makes a new connection."""
    assert ask(client, "PUT", path, BODY) == (200, BODY)
    client.close()
    assert ask(client, "PUT", "/a", BODY) == (200, BODY)
    assert len(server.connections) == 2


@pytest.mark.parametrize("path", ["/leaves", "/vanishes"])
def test_a_connection_that_the_server_closed_is_made_anew(proxy, client, server, path):
    """Whether or not it says so before it does; the client, which keeps its own, does not see it."""
    proxy.plan(1, "500", when="after")
    assert ask(client, path=path)[0] == 500
    assert path == "/leaves" or server.left.wait(30)
    assert ask(client) == (200, b"x" * 1000)
    assert len(server.connections) == 2
    assert [record.status for record in proxy.seen] == [200, 200]


def test_a_client_that_waits_to_go_on_is_told_to(proxy, server):
    """``Expect: 100-continue``: the client hears it once, and the server gets the body."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(
            b"PUT /e HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        )
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        said = b"".join(iter(lambda: client.recv(1000), b""))
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.endswith(b"\r\n\r\nabc")
    assert server.heard[0][3] == b"abc"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("drop", http.client.RemoteDisconnected),
        ("reset", ConnectionResetError),
        ("timeout", http.client.RemoteDisconnected),
    ],
)
def test_the_fault_proxy_ends_a_request_without_an_answer(proxy, client, server, fault, when, seen):
    """The connection ends in order, by a reset, or late; the server has been asked once or not at all."""
    proxy.hold_s = 0.2
    proxy.plan(2, fault, when)
    assert ask(client) == (200, b"x" * 1000)
    begun = time.monotonic()
    with pytest.raises(seen) as caught:
        ask(client)
    assert type(caught.value) is seen
    assert (time.monotonic() - begun >= 0.2) == (fault == "timeout")
    client.close()
    assert len(server.heard) == (1 if when == "before" else 2)
    assert ask(client) == (200, b"x" * 1000)
    assert [(hit.number, hit.fault, hit.when, hit.status) for hit in proxy.hits] == [
        (2, fault, when, 0 if when == "before" else 200)
    ]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("fault", "headers", "code"),
    [
        ("500", {}, b"InternalError"),
        ("503", {}, b"SlowDown"),
        ("409", {}, b"OperationAborted"),
        ("409", {"If-None-Match": "*"}, b"ConditionalRequestConflict"),
    ],
)
def test_the_fault_proxy_answers_with_an_error_as_s3_does(proxy, client, server, fault, when, headers, code):
    """With S3's code in its body and the connection as good as before, whether or not the server did what it was asked."""
    proxy.plan(1, fault, when)
    proxy.plan(3, fault, when)
    status, body = ask(client, body=BODY, headers=headers)
    assert (status, b"<Code>%s</Code>" % code in body) == (int(fault), True)
    assert ask(client) == (200, b"x" * 1000)
    assert ask(client, "HEAD") == (int(fault), b"")
    assert len(server.heard) == (1 if when == "before" else 3)
    assert [hit.number for hit in proxy.hits] == [1, 3]


@pytest.mark.parametrize("path", ["/a", "/chunked"])
def test_the_fault_proxy_sends_half_of_an_answer(proxy, client, server, path):
    """The head promises all of the body, and half of it comes."""
    proxy.plan(1, "truncated")
    client.request("PUT", path, BODY)
    answer = client.getresponse()
    assert (answer.status, answer.headers.get("Content-Length")) == (200, str(len(BODY)) if path == "/a" else None)
    with pytest.raises(http.client.IncompleteRead) as caught:
        answer.read()
    assert caught.value.partial == (
        BODY[: len(BODY) // 2] if path == "/a" else b"one"
    )  # of chunks it keeps the whole ones
    assert len(server.heard) == 1
    assert (proxy.hits[0].fault, proxy.hits[0].when) == ("truncated", "after")


def test_the_fault_proxy_flips_a_bit_of_an_answer(proxy, client):
    """One bit of the body is another one; of an answer without a body there is none, as with "drop"."""
    proxy.plan(1, "flipped")
    _, body = ask(client, body=BODY)
    assert len(body) == len(BODY)
    assert sum((one ^ other).bit_count() for one, other in zip(body, BODY, strict=True)) == 1
    proxy.plan(2, "flipped")
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, "HEAD")


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/a"), ("PUT", "/none")])
def test_half_of_an_answer_without_body_is_none(proxy, client, method, path):
    """It is as "drop", not an answer that is whole."""
    proxy.plan(1, "truncated")
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, method, path)


def test_the_fault_proxy_repeats_a_request_once(proxy, client, server):
    """The client gets its answer at once; the server is asked the same once more, later, and that counts for no plan."""
    proxy.later_s = 0.2
    proxy.plan(1, "duplicate")
    proxy.plan(2, "503")
    assert ask(client, "POST", "/twice", iter([b"ab", BODY]), encode_chunked=True) == (200, b"ab" + BODY)
    proxy.settle()
    assert len(server.heard) == 2
    assert server.heard[0] == server.heard[1]
    assert server.times[1] - server.times[0] >= 0.2
    assert [(record.number, record.duplicate, record.status) for record in proxy.seen] == [
        (1, False, 200),
        (1, True, 200),
    ]
    assert ask(client)[0] == 503


def test_the_fault_proxy_fails_the_nth_matching_request(proxy, client):
    """The n-th of those that match, counted from the last reset, those before the plan among them; and once."""
    proxy.plan(2, "500", match=lambda record: record.method == "PUT")
    given = [ask(client, method, "/a", b"")[0] for method in ("PUT", "POST", "POST", "PUT", "PUT")]
    assert given == [200, 200, 200, 500, 200]
    proxy.plan(3, "503", match=lambda record: record.method == "POST")
    assert [ask(client, method)[0] for method in ("PUT", "POST", "POST")] == [200, 503, 200]
    assert [hit.number for hit in proxy.hits] == [4, 7]
    with pytest.raises(ValueError, match="request 8 is past: 8 have been seen"):
        proxy.plan(8, "drop")
    with pytest.raises(ValueError, match="no such fault: dorp before"):
        proxy.plan(9, "dorp")
    proxy.plan(9, "500")
    proxy.reset()
    assert (proxy.seen, proxy.hits) == ([], [])
    proxy.plan(2, "409")
    assert [ask(client)[0] for _ in range(3)] == [200, 409, 200]


def test_the_fault_proxy_resets_connections_of_a_server_that_is_down(proxy, client, server):
    """Connections there are and new ones are reset while it is, and work again after it."""
    assert ask(client)[0] == 200
    proxy.down = True
    for _ in range(2):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            ask(client)
        client.close()
    assert len(server.heard) == 1
    proxy.down = False
    assert ask(client)[0] == 200


def test_the_fault_proxy_resets_clients_of_a_server_that_is_not_there():
    """The client gets a reset, as from an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    with FaultProxy(f"http://127.0.0.1:{nobody}") as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
        with pytest.raises(ConnectionResetError), contextlib.closing(client):
            ask(client)


def test_a_test_may_act_at_a_request(proxy, client, server):
    """``on_request`` comes before the server hears of it and can keep it away; ``on_answer`` comes before the client does."""
    heard = []
    proxy.on_request = lambda record: heard.append(len(server.heard)) or record.number != 2
    proxy.on_answer = lambda record: heard.append((len(server.heard), record.status))
    assert ask(client)[0] == 200
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client)
    assert heard == [0, (1, 200), 1]
    assert len(server.heard) == 1


def test_a_client_may_be_killed_at_a_request(proxy, server):
    """In the middle of its upload: the server gets no whole request, and the proxy goes on."""
    code = f"import http.client as h; h.HTTPConnection('127.0.0.1', {proxy.port}).request('PUT', '/k', bytes(32 << 20))"
    with subprocess.Popen([sys.executable, "-IS", "-c", code]) as job:
        proxy.on_request = lambda record: job.send_signal(signal.SIGKILL) or job.wait()
    proxy.settle()
    assert job.returncode == -signal.SIGKILL
    assert all(len(body) < 32 << 20 for *_, body in server.heard)
    proxy.on_request = None
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)) as client:
        assert ask(client)[0] == 200
    assert [(record.path, record.status) for record in proxy.seen] == [("/k", 0), ("/a", 200)]


def test_the_fault_proxy_holds_requests_and_limits_bytes_a_second(proxy, client, server):
    """Each request is held before it is forwarded; and no more bytes pass in a second than told."""
    proxy.slow_s = 0.1
    begun = time.monotonic()
    assert ask(client)[0] == 200
    assert server.times[0] - begun >= 0.1
    proxy.slow_s, proxy.bytes_per_second = 0, 1_000_000
    begun = time.monotonic()
    assert ask(client, body=bytes(100_000)) == (200, bytes(100_000))
    assert time.monotonic() - begun >= 0.2
    proxy.settle()
    assert proxy.seen[1].seconds >= 0.2


def test_the_fault_proxy_leaves_no_thread_behind(server):
    """Its threads end with it, while they wait for a client, hold a request, or have one to repeat."""
    before = set(threading.enumerate())
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy, contextlib.ExitStack() as stack:
        proxy.hold_s = proxy.later_s = 600
        proxy.plan(2, "duplicate")
        proxy.plan(3, "timeout")
        reached = threading.Event()
        proxy.on_request = lambda record: reached.set() if record.number == 3 else None
        clients = [http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30) for _ in range(3)]
        for client in clients:
            stack.callback(client.close)
            client.request("GET", "/a")
            if client is not clients[2]:
                assert client.getresponse().read() == b""
        assert reached.wait(30)
        assert any(thread.name == "fault proxy" for thread in threading.enumerate())
        proxy.close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "fault proxy"]
    assert left == []


@pytest.mark.parametrize("kind", object_servers.KINDS)
def test_clients_of_s3_and_azure_work_through_the_fault_proxy(kind, tmp_path, monkeypatch):
    """A client of S3 or Azure puts, gets and lists, and uploads in parts; a part that is dropped on the way it sends again."""
    if why := object_servers.missing(kind):
        pytest.skip(why)
    with object_servers.start(kind, tmp_path) as server, FaultProxy(server.endpoint) as proxy:
        for name, value in server.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        store = from_url(server.url("run"))
        obstore.put(store, "a/b", b"small")
        assert bytes(obstore.get(store, "a/b").bytes()) == b"small"
        assert [entry["path"] for entry in obstore.list(store).collect()] == ["a/b"]
        whole = os.urandom(20 << 20)
        proxy.plan(2, "drop", match=is_part)
        proxy.plan(3, "drop", when="after", match=is_part)
        obstore.put(store, "big", whole, use_multipart=True, chunk_size=5 << 20)
        assert (server.keys(), server.uploads()) == ({"run/a/b": 5, "run/big": len(whole)}, [])
        assert server.read("run/big") == bytes(obstore.get(store, "big").bytes()) == whole
        assert [(hit.fault, hit.when) for hit in proxy.hits] == [("drop", "before"), ("drop", "after")]
        assert sum(is_part(record) for record in proxy.seen) == 6


def is_part(record):
    return "partNumber=" in record.path or "comp=block&" in record.path
