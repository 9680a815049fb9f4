"""An S3 server on the loopback interface, and in front of it a proxy that fails in the ways real ones do."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

XML = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
STATUS = {"SlowDown": 503, "AccessDenied": 403, "NoSuchKey": 404, "ExpiredToken": 400, "PermanentRedirect": 301}


class Proxy(ThreadingHTTPServer):
    """Hands requests on to the server behind it, unless the key asked for has a fault waiting.

    Faults are taken from ``faults[key]`` one per GET: ``short`` and ``reset`` send half a body, ``stall`` half and then
    nothing; a function is called before the request is handed on; any other is an S3 error code. Listings are the key
    ``?list``. Without ``conditions`` a request is done whatever it demands.

    ``on_request`` is asked for each request, of every method, with (method, path and query); what it returns is the
    fault: one of those above, ``lost`` (done, but the connection is reset before the answer) or ``cut`` (not done).
    """

    daemon_threads = True
    request_queue_size = 128  # of connections that many ranks open at once; five is the library's

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(behind)
        self.faults: dict[str, deque[str | Callable[[], None]]] = defaultdict(deque)
        self.conditions = True
        self.gets: list[tuple[str, str | None]] = []
        self.on_request: Callable[[str, str], str | None] = lambda method, path: None
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body go in two writes: the second would wait for an answer
    server: Proxy

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        key = "?list" if "list-type" in parts.query else unquote(parts.path).split("/", 2)[-1]
        fault = None
        if self.command == "GET":
            self.server.gets.append((key, self.headers.get("Range")))
            with contextlib.suppress(IndexError):
                fault = self.server.faults[key].popleft()
        fault = fault or self.server.on_request(self.command, self.path)
        if callable(fault):
            fault()
            fault = None
        if fault in STATUS:
            self.reply(STATUS[fault], [("x-amz-bucket-region", "eu-west-3")], XML.format(code=fault).encode())
            return
        if fault == "cut":
            self.reset()
            return
        connection = http.client.HTTPConnection(self.server.behind.hostname, self.server.behind.port)
        headers = dict(self.headers)
        if not self.server.conditions:
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "lost":
            self.reset()
            return
        self.reply(response.status, response.getheaders(), content, fault)

    def reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def reply(self, status: int, headers: list[tuple[str, str]], content: bytes, fault: str | None = None) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault is None:
            self.wfile.write(content)
            return
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.close_connection = True
        if fault == "stall":
            self.server.released.wait(60)
        elif fault == "reset":
            self.reset()


def environment(url: str) -> dict[str, str]:
    """Return the AWS variables of a process that is to use the server at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip


def in_environment(variables: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` in a rank of the harness, which does not have this process's variables."""
    os.environ.update(variables)
    return function(*args)


def there(url: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` in a rank of the harness that is to use the server at ``url``."""
    return in_environment(environment(url), function, *args)


PATIENCE_SECONDS = 300.0
"""For an answer of the server: a test counts requests, and one that is given up is made again."""


def bucket(server: Proxy, monkeypatch: Any, test: str) -> str:
    """Point this process at the server, without faults, and return a new bucket of the test's own, ``s3://...``."""
    from smp_train.storage import client, s3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(server.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "WAIT_SECONDS", 0.002)
    monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda *_, **__: 0.002)
    server.faults.clear()
    server.on_request = lambda method, path: None
    name = f"b{random.Random(test).randrange(10**9)}"
    client.client().create_bucket(Bucket=name)
    return f"s3://{name}"


def upload(location: str, files: Path | dict[str, bytes]) -> None:
    """Put files, or those of a folder, below a prefix."""
    from smp_train import storage

    if isinstance(files, Path):
        files = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    for name, data in files.items():
        storage.open_storage(location).put(name, data)


def download(location: str, folder: Path) -> Path:
    """Write what lies below a prefix to a folder, and return that."""
    from smp_train import storage

    for name in storage.open_storage(location).files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.open_storage(location).read(name))
    return folder


@contextlib.contextmanager
def serving() -> Iterator[Proxy]:
    """Run the server and the proxy; the AWS variables must then point at ``proxy.url``."""
    from moto.server import ThreadedMotoServer

    behind = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    behind.start()
    host, port = behind.get_host_and_port()
    proxy = Proxy(f"http://{host}:{port}")
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()
        behind.stop()
