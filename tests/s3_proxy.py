"""A proxy of ours that stands between a client and a real S3 server and makes faults as a script says.

It reads each request whole, sends it on over a connection of its own and hands the answer back, so that every fault is
of one request. Headers are passed on as they are: the signature covers Host, and the server accepts the proxy's.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Literal
from urllib.parse import urlsplit

import pytest

from draftsmith.storage import Store, open_store
from tests.s3 import S3Bucket

LIMIT_S = 20.0

Kind = Literal[
    "refuse",  # reset the connection before the request is sent on
    "lose answer",  # send the request on, and reset the connection instead of handing the answer back
    "delay",  # wait `seconds` before the request is sent on
    "answer",  # do not send the request on: answer with `status` and `code`
    "cut request",  # send half of the body on, and reset both connections
    "flip request",  # flip a bit in the middle of the body
    "cut answer",  # hand back half of the body, and close; only of an answer that is no refusal
    "flip answer",  # flip a bit in the middle of the body; only of an answer that is no refusal
    "not S3",  # hand back a page of a web server with status 200
]


@dataclass
class Fault:
    """What happens to the next `times` requests of `method` ("" is any) whose path and query `path` is found in, after
    `skip` such requests and if `key` (an access key; "" is any) signed them."""

    kind: Kind
    method: str = ""
    path: str = ""
    times: int = 1
    skip: int = 0
    key: str = ""
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict)

    def takes(self, request: Request) -> bool:
        """True if the fault is to happen to this request; counts it."""
        if self.times == 0 or self.method not in ("", request.method) or not re.search(self.path, request.target):
            return False
        if self.key and f"Credential={self.key}/" not in request.headers.get("authorization", ""):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass(frozen=True)
class Request:
    """A request as it came: `head` is its first line and headers, in bytes; names in `headers` are in small letters."""

    method: str
    target: str
    head: bytes
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Seen:
    """One request, the fault that was made of it, and the status that the client got (0: none)."""

    method: str
    target: str
    kind: Kind | None
    status: int


class FaultProxy:
    """Listens on a port of this machine; `faults` may be added to at any time, the first that takes a request wins."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        assert address.hostname is not None
        assert address.port is not None
        self._upstream = (address.hostname, address.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        # Re-entrant: `choose` looks at what was seen.
        self._lock = threading.RLock()
        self._open: set[socket.socket] = set()
        self.faults: list[Fault] = []
        self.choose: Callable[[int, Request], Fault | None] = lambda number, request: None
        self.seen: list[Seen] = []
        self._num_requests = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def num_faults(self) -> int:
        """Requests of which a fault was made."""
        with self._lock:
            return sum(seen.kind is not None for seen in self.seen)

    def requests(self, method: str, path: str = "") -> list[Seen]:
        """Those that came in, in the order of their answers."""
        with self._lock:
            return [seen for seen in self.seen if seen.method == method and re.search(path, seen.target)]

    def close(self) -> None:
        # A thread that waits in accept() does not notice that the socket is closed, but that it is shut down.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Requests of one client connection until it ends, or a fault ends it."""
        with self._lock:
            self._open.add(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection, connection.makefile("rb") as stream:
                while (request := _read_request(stream, connection)) is not None:
                    with self._lock:
                        self._num_requests += 1
                        fault = next((fault for fault in self.faults if fault.takes(request)), None)
                        fault = fault or self.choose(self._num_requests, request)
                    if not self._answer(connection, request, fault):
                        return
        except OSError:
            # The client, the server or the test has gone away.
            return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, request: Request, fault: Fault | None) -> bool:
        """Answer one request; False if the connection is not to be used any more."""
        kind = None if fault is None else fault.kind
        if fault is None or kind not in ("refuse", "answer", "cut request", "not S3"):
            if fault is not None and kind == "delay":
                time.sleep(fault.seconds)
            body = _flipped(request.body) if kind == "flip request" else request.body
            status, head, answer = _ask(self._upstream, request, body)
        elif kind == "answer":
            status, head, answer = _made_up(request, fault)
        elif kind == "not S3":
            answer = b"<html>Welcome to the network</html"
            status, head = 200, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
        else:
            status, head, answer = 0, b"", b""
        if kind in ("cut answer", "flip answer") and (status >= 300 or not answer):
            kind = None
        if kind == "cut request":
            _ask(self._upstream, request, request.body[: len(request.body) // 2], whole=False)
        lost = kind in ("refuse", "lose answer", "cut request")
        # Noted before the client can know, so that a test that goes on with the answer finds it.
        with self._lock:
            self.seen.append(Seen(request.method, request.target, kind, 0 if lost else status))
        if lost:
            _reset(connection)
            return False
        if kind == "flip answer":
            answer = _flipped(answer)
        if kind == "cut answer":
            connection.sendall(head + answer[: len(answer) // 2])
            return False
        connection.sendall(head + answer)
        return True


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy before the server at `upstream`, for the body of a with statement."""
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def direct(s3_env: S3Bucket) -> Store:
    """The store past the proxy."""
    return open_store(s3_env.uri)


@pytest.fixture
def proxy(s3_env: S3Bucket, direct: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What `open_store` goes through from now on; no fault yet."""
    monkeypatch.setenv("DRAFTSMITH_S3_TIMEOUT_S", str(LIMIT_S))
    with fault_proxy(s3_env.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


@pytest.fixture
def store(s3_env: S3Bucket, proxy: FaultProxy) -> Store:
    return open_store(s3_env.uri)


def _read_request(stream: IO[bytes], connection: socket.socket) -> Request | None:
    """The next request of a connection; None at its end."""
    head = _read_head(stream)
    if head is None:
        return None
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    headers = _headers(head)
    assert "transfer-encoding" not in headers, "bodies of unknown length are not for this proxy"
    if headers.get("expect") == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        # It is not signed, and the body is here before the server is asked.
        head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
    body = stream.read(int(headers.get("content-length", "0")))
    return Request(method, target, head, headers, body)


def _ask(upstream: tuple[str, int], request: Request, body: bytes, *, whole: bool = True) -> tuple[int, bytes, bytes]:
    """Send a request on; status, head and body of the answer, or nothing if the request is not whole."""
    with socket.create_connection(upstream) as server:
        server.sendall(request.head + body)
        if not whole:
            _reset(server)
            return 0, b"", b""
        with server.makefile("rb") as stream:
            while True:
                head = _read_head(stream)
                if head is None:
                    raise OSError("the server hung up")
                status = int(head.split(b" ", 2)[1])
                if status != 100:
                    break
            headers = _headers(head)
            if request.method == "HEAD" or status in (204, 304):
                return status, head, b""
            if headers.get("transfer-encoding") == "chunked":
                answer = _read_chunks(stream)
                head = re.sub(rb"(?i)\r\ntransfer-encoding:[^\r]*", b"\r\nContent-Length: %d" % len(answer), head)
                return status, head, answer
            return status, head, stream.read(int(headers.get("content-length", "0")))


def _made_up(request: Request, fault: Fault) -> tuple[int, bytes, bytes]:
    """The answer of a server that refuses; that to a HEAD has no body, as with any server."""
    text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>made up</Message></Error>".encode()
    lines = [f"HTTP/1.1 {fault.status} Made Up", "Content-Type: application/xml", f"Content-Length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in fault.headers.items()]
    return fault.status, "\r\n".join([*lines, "\r\n"]).encode(), b"" if request.method == "HEAD" else text


def _read_head(stream: IO[bytes]) -> bytes | None:
    """First line and headers up to and with the empty line; None at the end of the connection."""
    lines: list[bytes] = []
    while not lines or lines[-1] != b"\r\n":
        line = stream.readline()
        if not line:
            return None
        lines.append(line)
    return b"".join(lines)


def _read_chunks(stream: IO[bytes]) -> bytes:
    """A body in chunks, put together."""
    parts = []
    while size := int(stream.readline().split(b";")[0], 16):
        parts.append(stream.read(size))
        stream.readline()
    while stream.readline() not in (b"\r\n", b""):
        pass
    return b"".join(parts)


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


def _reset(connection: socket.socket) -> None:
    """Close so that the other side sees a reset, not an end in order."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
