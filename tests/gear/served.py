"""An HTTP server on this machine, in a thread of the test."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Served(ThreadingHTTPServer):
    """Answers at `address` while its `with` block lasts."""

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler], host: str = "127.0.0.1"):
        super().__init__((host, 0), handler)
        self.address = f"http://{host}:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()
