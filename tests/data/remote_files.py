"""Remote places made on the spot: an HTTP server on this machine, and a file system that fails when told to."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class Web:
    """What the server has, and what was asked of it."""

    def __init__(self, *, ranges: bool) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges = ranges
        self.got: list[tuple[int, int]] = []
        self.url = ""

    @property
    def sent(self) -> int:
        """Bytes of files sent so far."""
        return sum(stop - start for start, stop in self.got)


@contextmanager
def web_server(*, ranges: bool = True) -> Iterator[Web]:
    web = Web(ranges=ranges)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # which holds what follows the header back for 40 ms

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            content = self.answer()
            self.wfile.write(content)

        def answer(self) -> bytes:
            content = web.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_response(404)
                content = b""
            else:
                content = self.part_of(content)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return content

        def part_of(self, content: bytes) -> bytes:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked is None or not web.ranges:
                self.send_response(200)
                start, stop = 0, len(content)
            else:
                self.send_response(206)
                start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            if web.ranges:
                self.send_header("Accept-Ranges", "bytes")
            if self.command == "GET":
                web.got.append((start, stop))
            return content[start:stop]

        def log_message(self, *words: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Flaky(MemoryFileSystem):
    """A memory file system that raises what is in `failures`, one for each range that is asked for."""

    protocol = "flaky"
    failures: ClassVar[list[Exception]] = []
    asked: ClassVar[list[tuple[int | None, int | None]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("flaky://"))
        return stripped

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.asked.append((start, end))
        if self.failures:
            raise self.failures.pop(0)
        return super().cat_file(path, start=start, end=end, **options)  # type: ignore[no-any-return]
