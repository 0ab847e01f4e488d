"""A real S3 server process, and a proxy before it that fails, cuts or spoils the answers it is told to."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from pretraining.checkpoints.remote import RemoteRun
from tests.gear.runs import free_port
from tests.gear.served import Served

BUCKET = "bucket"
OF_A_CONNECTION = ("connection", "transfer-encoding", "content-length", "accept-encoding", "expect")
"""Headers that are not for the server behind a proxy."""
OTHER_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def newest_committed(remote: RemoteRun, above: int) -> str | None:
    """The name of the newest checkpoint of the store with a marker and a step above `above`."""
    found = remote.newest(above)
    return found and found[0]


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """The address of moto's server in a process of its own, with one empty bucket; `Proxy` reaches it from anywhere."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_until_it_answers(address, process)
        put(address, "", b"")
        yield address
    finally:
        process.kill()
        process.wait()


class OtherServer:
    """An S3 server of another make, which keeps its objects in a folder: it may be killed and started again.

    It checks signatures, and knows no writes on a condition. `npm install -g s3rver` installs it.
    """

    PROGRAM = shutil.which(os.environ.get("S3RVER", "s3rver"))

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        words = ["-d", self.folder, "-a", "127.0.0.1", "-p", self.port]
        words += ["--no-vhost-buckets", "--configure-bucket", BUCKET]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([self.PROGRAM, *map(str, words)], **quiet)
        _wait_until_it_answers(self.address, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "OtherServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def _wait_until_it_answers(address: str, process: subprocess.Popen) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the S3 server ended"
        try:
            return urllib.request.urlopen(address, timeout=5).close()
        except urllib.error.HTTPError:  # an answer too
            return None
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(address)


def upload(address: str, folder: Path, name: str) -> str:
    """Put a folder into the bucket; its s3:// address."""
    for path in folder.rglob("*"):
        if path.is_file():
            put(address, f"{name}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{name}"


def put(address: str, key: str, content: bytes) -> None:
    """One object; the bucket itself for an empty key."""
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{address}/{BUCKET}/{key}".rstrip("/"), content, headers, method="PUT")
    urllib.request.urlopen(request, timeout=60).close()


def connect_to(address: str, **more: str) -> dict[str, str]:
    """Environment variables with which s3:// means this server."""
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": address, **more}


def use_here(monkeypatch, address: str, **more: str) -> None:
    """s3:// means this server in this process."""
    import s3fs

    for name, value in connect_to(address, **more).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def one_in(requests: int, *treatments: str) -> Callable[[int, str], str | None]:
    """For a `Proxy`: every n-th request is mistreated, in these ways in turn."""
    return lambda number, path: (
        treatments[number // requests % len(treatments)] if number % requests == requests - 1 else None
    )


class Proxy(Served):
    """Passes requests on to `target`. `mistreat(number, path)` says what becomes of the n-th GET, PUT, POST or DELETE:

    None (passed on), "error" (status 500), "deny" (403), "drop" (closed without an answer), "cut" (half a body),
    "spoil" (one bit).
    """

    def __init__(self, target: str, mistreat: Callable[[int, str], str | None], host: str = "127.0.0.1"):
        super().__init__(_Passing, host)
        self.target, self.mistreat = target, mistreat
        self.requests: list[str] = []
        """Paths of the GETs, with the range asked for."""
        self.changes: list[str] = []
        """Method, path and treatment of each PUT, POST and DELETE."""
        self.mistreated = 0
        self.lock = threading.Lock()

    def handle_error(self, request, client_address) -> None:
        """Clients that hang up are part of the test."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            number = len(self.server.requests) + len(self.server.changes)
            treatment = self.server.mistreat(number, self.path)
            self.server.mistreated += treatment is not None
            if self.command == "GET":
                self.server.requests.append(f"{self.path} {self.headers.get('Range', '')}")
            else:
                self.server.changes.append(f"{self.command} {self.path} {treatment or 'passed on'}")
        if treatment == "drop":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        refusals = {"error": 500, "deny": 403}
        status, headers, body = (
            (refusals[treatment], [], b"") if treatment in refusals else self._ask(content)
        )
        if treatment == "spoil" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self._answer(status, headers, body, len(body) // 2 if treatment == "cut" else len(body))

    do_PUT = do_POST = do_DELETE = do_GET

    def do_HEAD(self) -> None:
        status, headers, _ = self._ask()
        self._answer(status, headers, b"", None)

    def _ask(self, content: bytes = b"") -> tuple[int, list, bytes]:
        request = urllib.request.Request(self.server.target + self.path, content or None, method=self.command)
        request.add_header("Content-Type", "application/octet-stream")  # else the server would read a form
        for name, value in self.headers.items():
            # The host too: it is part of what a client signs.
            if name.lower() not in OF_A_CONNECTION:
                request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.getheaders(), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, list(error.headers.items()), error.read()

    def _answer(self, status: int, headers: list, body: bytes, sent: int | None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "server", "date", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", length if sent is None else str(len(body)))
        self.end_headers()
        self.wfile.write(body[:sent])
        if sent is not None and sent < len(body):
            self.close_connection = True

    def log_message(self, *_) -> None:
        """Quiet."""


def shared_memory() -> set[str]:
    """What lies in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}
