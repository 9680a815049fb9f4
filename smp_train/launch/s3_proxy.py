"""An HTTP proxy on 127.0.0.1 that can cut a run off from S3 for some seconds: a disturbance of `smp-train chaos`."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

ON_AWS = re.compile(r"(^|\.)s3[.-].*amazonaws\.com")
"""Host names of S3: a bucket in another region has another name than the client's endpoint."""
METADATA_SERVICE = "169.254.169.254"
"""It gives an EC2 instance its credentials, and takes no proxies."""
CHUNK_BYTES = 1 << 18


class Proxy:
    """Relays all connections, and cuts only those to the S3 server at the URL ``endpoint``, or on AWS.

    ``refused`` and ``restored`` are the times of the first connection that was refused during a cut, and of the first
    one after it; None until then.
    """

    def __init__(self, endpoint: str) -> None:
        self.refused: float | None = None
        self.restored: float | None = None
        self._endpoint = urlsplit(endpoint)
        self._seconds: float | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that is to use this proxy for everything."""
        proxies = {"http_proxy": self.url, "https_proxy": self.url, "no_proxy": METADATA_SERVICE}
        return proxies | {name.upper(): value for name, value in proxies.items()}

    def cut(self, seconds: float) -> None:
        """Close the connections to S3, and refuse new ones until ``seconds`` after the first refused one."""
        self.refused, self.restored, self._seconds = None, None, seconds
        for writer in [*self._open]:
            self._loop.call_soon_threadsafe(writer.transport.abort)

    def _refuses(self) -> bool:
        if self._seconds is None:
            return False
        self.refused = self.refused or time.time()
        return time.time() < self.refused + self._seconds

    def _is_s3(self, host: str, port: int) -> bool:
        ours = self._endpoint.hostname or ""
        usual = 443 if self._endpoint.scheme == "https" else 80
        is_endpoint = host == ours or host.endswith(f".{ours}")
        return bool(ON_AWS.search(host)) or (is_endpoint and port == (self._endpoint.port or usual))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection: a tunnel (CONNECT), or plain HTTP requests, which are all for the first one's server."""
        ends = [writer]
        with suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.decode("latin-1").split("\r\n")[0].split()
            url = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host, port = url.hostname or "", url.port or 80
            is_s3 = self._is_s3(host, port)
            source, sink = await asyncio.open_connection(host, port)
            ends.append(sink)
            if not (is_s3 and self._refuses()):
                if is_s3:
                    self._open.update(ends)
                    self.restored = self.restored or (self.refused and time.time())
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    sink.write(head)  # every server takes a whole URL too
                copies = [asyncio.ensure_future(_copy(*pair)) for pair in ((reader, sink), (source, writer))]
                _, running = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for copy in running:
                    copy.cancel()
        for end in ends:
            self._open.discard(end)
            end.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
