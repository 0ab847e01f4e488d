"""Serve all runs of a folder, or of a store, as pages that stay fresh: nothing is written, and nothing else is shown.

A run is opened by its place in the list, so that no name of a request becomes a path. Of a run whose files have not
changed nothing is read, computed or sent again.
"""

import hashlib
import hmac
import ipaddress
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from pretraining.checkpoints.live_files import fetch_records
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote, refuse_slips
from pretraining.planning.quantities import several
from pretraining.reporting import page
from pretraining.reporting.live import set_priority
from pretraining.reporting.run_record import ENDINGS, FIRST_LOOK, TAIL, TAIL_BYTES, RunRecord

ROWS, EVENTS = "metrics.jsonl", "events.jsonl"
READ = {ROWS, EVENTS, "recipe.json", "plan.json", "environment.json", "mixture.json", "samples.jsonl"}
READ |= {"console.log", "console.1.log", "heartbeats"}
"""What is read of a run folder. One in which any of these is a link is not shown: the link may lead anywhere."""
DEPTH = 3
"""Folders between the one that is served and a run, such as that of a sweep."""
SHOWN = (
    "train/loss eval/loss throughput/tokens_per_second throughput/mfu throughput/seconds_left cost/dollars"
)
"""What the list shows of a run's last rows."""
FRESH_SECONDS, PARTIAL_SECONDS = 5.0, 1.0
"""How often an open page asks, and one that waits for all rows of a run."""
SHARED_SECONDS, STORE_SECONDS = 1.5, 30.0
"""How long a list is good enough for the next reader, and one of a store, which gets files once a minute."""
STORE_ROWS_BYTES = 32 << 10
LONG_BYTES = 24 << 20
"""A metrics.jsonl of more than this is read whole by a process of its own, and shown by a first look until then."""
GIVES_WAY = 10
"""Priority (nice) of that process: somebody waits for it, but training comes first."""
MOST_KEPT, MOST_TOGETHER = 64, 50
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
ASSETS = {"/page.js": page.SCRIPTS, "/list.js": page.LIST_SCRIPTS, "/style.css": page.STYLES}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d+)?")


def run_folders(folder: Path, depth: int = DEPTH) -> Iterator[tuple[Path, tuple | None]]:
    """Yield the run folders in a folder, or itself, each with the state of its files; None if it holds links.

    No link is followed.
    """
    entries: dict[str, os.DirEntry] = {}
    with suppress(OSError), os.scandir(folder) as found:  # gone, or not ours to read
        entries = {entry.name: entry for entry in found}
    files = [entries[name] for name in sorted(READ & entries.keys())]
    if entries.keys() & {ROWS, EVENTS}:
        if any(file.is_symlink() for file in files):
            yield folder, None
            return
        with suppress(OSError):
            states = [file.stat() for file in files if file.name != "heartbeats"]
            yield folder, tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)
    elif depth:
        for name in sorted(entries):
            if entries[name].is_dir(follow_symlinks=False):
                yield from run_folders(folder / name, depth - 1)


class Runs:
    """The runs of a folder. What the list shows of each is kept; only the ends of files that have changed are read."""

    def __init__(self, folder: Path, store: "StoredRuns | None" = None) -> None:
        self.folder, self.store, self.listed = folder, store, -SHARED_SECONDS
        self.known: dict[str, tuple[tuple, RunRecord, dict]] = {}
        self.num_hidden = 0
        """Run folders that are not shown, because of links in them."""
        self._lock = threading.Lock()

    def rows(self) -> dict[str, dict]:
        """Return {place of a run below the folder: what the list shows of it}."""
        with self._lock:
            if time.monotonic() - self.listed >= SHARED_SECONDS:
                if self.store is not None:
                    self.store.refresh()
                self.known, self.listed = dict(self._read()), time.monotonic()
            return {name: row for name, (_, _, row) in self.known.items()}

    def _read(self) -> Iterator[tuple[str, tuple[tuple, RunRecord, dict]]]:
        self.num_hidden = 0
        for folder, state in run_folders(self.folder):
            if state is None:
                self.num_hidden += 1
                continue
            inside = folder.relative_to(self.folder).as_posix()
            name = folder.resolve().name if folder == self.folder else inside
            before, record, row = self.known.get(name, (None, None, {}))
            with suppress(UserError, OSError):  # it has just gone
                if record is None or before != state:
                    record, row = RunRecord(folder, TAIL), {}
                if not len(record.metrics) and not record.events:
                    continue  # files of a run's names, in which no run has written
                # without an ending its processes may be gone since
                if row.get("state") not in ENDINGS.values():
                    row = row_of(record, name)
                yield name, (state, record, row)

    def open(self, name: str) -> tuple[Path, tuple]:
        """Return the folder with all records of a listed run, and their state; `UserError` if there is none."""
        if name in self.known:
            folder = self.known[name][1].run.path if self.store is None else self.store.whole(name)
            for place, state in run_folders(folder, 0):
                if state is not None:
                    return place, state
        raise UserError("no such run; look at the list")


def row_of(record: RunRecord, name: str) -> dict:
    last = {metric: page.plain(record.metrics.last(metric)) for metric in SHOWN.split()}
    for event in record.events:
        last["eval/loss"] = page.plain(event.get("eval_loss", last["eval/loss"]))
    about = str(record.recipe.get("description") or "")[:300]
    shown = {"name": name, "description": about, "budget_share": record.budget_share, "last": last}
    return {**shown, **page.standing_of(record, record.standing())}


class StoredRuns:
    """Runs at an address: the ends of their files, and all records of those that are opened, in a folder here."""

    def __init__(self, address: str, folder: Path) -> None:
        self.remote = RemoteRun(address).at_first_contact()
        self.folder, self.looked = folder, -STORE_SECONDS
        self.sizes: dict[str, dict[str, int]] = {}
        self._whole: dict[str, tuple[dict, Path]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Bring what has changed, if the last look was long enough ago."""
        if time.monotonic() - self.looked < STORE_SECONDS:
            return
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(self._bring_end, self.remote.sizes("") or {}))
        self.looked = time.monotonic()

    def _bring_end(self, name: str) -> None:
        before, sizes = self.sizes.get(name, {}), self.remote.sizes(name) or {}
        if not sizes.keys() & {ROWS, EVENTS}:
            return
        for file, most in (("recipe.json", 1 << 20), (EVENTS, TAIL_BYTES), (ROWS, STORE_ROWS_BYTES)):
            if (size := sizes.get(file)) and size != before.get(file):
                content = self.remote.read_range(f"{name}/{file}", max(0, size - most), size)
                (self.folder / "ends" / name).mkdir(parents=True, exist_ok=True)
                (self.folder / "ends" / name / file).write_bytes(content)
        self.sizes[name] = sizes

    def whole(self, name: str) -> Path:
        """Return a folder with all records of a run, fetched again once a file of it has grown."""
        with self._lock:
            before, folder = self._whole.get(name, (None, self.folder / "none"))
            if before != self.sizes[name]:
                shutil.rmtree(folder, ignore_errors=True)
                folder = fetch_records(self.remote.where(name), Path(tempfile.mkdtemp(dir=self.folder))).path
                self._whole[name] = self.sizes[name], folder
            return folder


_record_at = lru_cache(8)(RunRecord)


def whole_payload(folder: Path, name: str) -> dict:
    """Return what the page shows of a run, whose record is kept: the next call reads what has been added."""
    return page.run_payload(_record_at(folder).refresh(), name=name)


def _be_quiet() -> None:
    """Give way to others, and leave Ctrl-C to the process that started this one."""
    os.setsid()  # priorities are those of sessions: else the reader's whole terminal would give way
    set_priority(os.getpid(), GIVES_WAY)


class Pages:
    """What the pages of runs show, kept until a file changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple, dict]] = {}
        self._reading: dict[Path, tuple[tuple, AsyncResult]] = {}
        self._pool: Any = None
        self._lock = threading.Lock()

    def payload(self, folder: Path, state: tuple, name: str) -> tuple[tuple, dict]:
        """Return the state of the files that is shown, and what is shown of them."""
        with self._lock:
            shown, payload = self._kept.get(folder, (None, {}))
            if shown != state or "is_partial" in payload:
                rows = folder / ROWS
                if rows.is_file() and rows.stat().st_size > LONG_BYTES:
                    self._kept[folder] = self._look(folder, state, name)
                else:
                    self._kept[folder] = state, whole_payload(folder, name)
            if len(self._kept) > MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            return self._kept[folder]

    def _look(self, folder: Path, state: tuple, name: str) -> tuple[tuple, dict]:
        """Have all of a long run read, by one process for all of them, and show what has been read by now."""
        if folder not in self._reading:
            # a new interpreter: a fork would copy this one's threads in the middle of what they do
            self._pool = self._pool or multiprocessing.get_context("spawn").Pool(1, _be_quiet)
            self._reading[folder] = state, self._pool.apply_async(whole_payload, (folder, name))
        began, reading = self._reading[folder]
        if reading.ready():
            del self._reading[folder]
            return began, reading.get()
        if folder in self._kept:
            return self._kept[folder]
        return state, {**page.run_payload(RunRecord(folder, FIRST_LOOK), name=name), "is_partial": True}


class Guard:
    """Answer GET and HEAD alone, to whoever names this server and has its token, and add the strict headers."""

    def __init__(self, app: Callable, names: set[str], token: str | None, port: int) -> None:
        self.app, self.names, self.token = app, names, token
        self.cookie = f"pretraining_{port}"  # cookies do not tell ports apart

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        async def send_strictly(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await (self._refusal(Request(scope)) or self.app)(scope, receive, send_strictly)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that goes no further."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD", 405, {"Allow": "GET, HEAD"})
        # another site's name may lead here (DNS rebinding); no other site has a number for its name
        host = _HOST.fullmatch(request.headers.get("host", ""))
        if host is None or (
            (host[2] or "").lower() not in self.names and _address(host[1] or host[2]) is None
        ):
            return PlainTextResponse("this server has another name; use the link that it printed", 421)
        if self.token is None or self._is_token(request.cookies.get(self.cookie, "")):
            return None
        if not self._is_token(request.query_params.get("token", "")):
            return PlainTextResponse("no token, or a wrong one; use the link that the server printed", 401)
        # so that the token stays neither in the address nor in what a browser remembers
        runs = request.url.remove_query_params("token").query
        answer = RedirectResponse(f"/show?{runs}" if request.url.path == "/show" else "/", 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
        return answer

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), (self.token or "").encode())


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def application(runs: Runs, title: str) -> Starlette:
    """Build what answers: the list, the page of one run or several, and the data of both."""
    pages = Pages()

    def listed(names: list[str]) -> tuple[Any, dict]:
        shown = {"rows": list(runs.rows().values()), "num_hidden": runs.num_hidden}
        return shown, {**shown, "title": title, "every_seconds": FRESH_SECONDS, "address": "/runs.json"}

    def opened(names: list[str]) -> tuple[Any, dict]:
        rows, payloads, states = runs.rows(), [], []
        if not 1 <= len(names) <= MOST_TOGETHER:
            raise UserError(f"choose 1 to {MOST_TOGETHER} runs")
        for name in names:
            state, payload = pages.payload(*runs.open(name), name)
            # a run that is killed writes nothing: its state alone changes
            standing = {key: rows.get(name, payload)[key] for key in ("state", "since", "at_step", "reason")}
            payloads.append({**payload, **standing, "folder": f"{title}/{name}"})
            states.append((state, "is_partial" in payload, standing))
        is_partial = any("is_partial" in payload for payload in payloads)
        shown = page.page_payload(payloads, PARTIAL_SECONDS if is_partial else FRESH_SECONDS)
        return states, {**shown, "address": f"/data.json?{urlencode([('run', name) for name in names])}"}

    def answer(make: Callable, script: str | None, request: Request) -> Response:
        try:
            state, payload = make(list(dict.fromkeys(request.query_params.getlist("run"))))
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        digest = hashlib.blake2b(repr(state).encode(errors="replace"), digest_size=12)
        tag = f'"{digest.hexdigest()}"'
        if script is not None:
            name = payload.get("title") or " · ".join(run["name"] for run in payload["runs"])
            text = page.page_text({**payload, "tag": tag}, name, served=script)
        elif request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        else:
            text = page.data_text(payload)
        kind = "application/json" if script is None else "text/html"
        return Response(text.encode(errors="replace"), media_type=kind, headers={"ETag": tag})

    def asset(request: Request) -> Response:
        kind = "text/css" if request.url.path.endswith("css") else "text/javascript"
        return Response(page.joined(ASSETS[request.url.path]), media_type=kind)

    pairs = {"/": (listed, "list.js"), "/runs.json": (listed, None)}
    pairs |= {"/show": (opened, "page.js"), "/data.json": (opened, None)}
    routes = [Route(path, partial(answer, *pair)) for path, pair in pairs.items()]
    app = Starlette(routes=[*routes, *(Route(path, asset) for path in ASSETS)])
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)
    return app


def serve(place: str, host: str, port: int) -> None:
    """Serve the runs of a folder or of a store's address until Ctrl-C.

    Raises `UserError`: there is no such place, or the address of this machine cannot be used.
    """
    refuse_slips(place, "--serve")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as kept:
        store = StoredRuns(place.rstrip("/"), Path(kept)) if is_remote(place) else None
        runs = Runs(Path(kept, "ends") if store else Path(place), store)
        found = len(runs.rows())
        if not found if store else not runs.folder.is_dir():
            raise UserError(
                f"{place}: no {'run' if store else 'such folder'}; give the place of your runs, such as runs"
            )
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{host}, port {port}: {reason}; choose others with --host and --port") from None
        port, number, here = listener.getsockname()[1], _address(host), socket.gethostname()
        is_loopback = host == "localhost" if number is None else number.is_loopback
        token = None if is_loopback else secrets.token_urlsafe(24)
        shown = here if number and number.is_unspecified else f"[{host}]" if ":" in host else host
        names = {"localhost", host.lower(), here.lower()}
        app = Guard(application(runs, place.rstrip("/")), names, token, port)
        plain: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off", "proxy_headers": False}
        plain |= {"log_level": "warning", "access_log": False, "server_header": False}
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **plain))
        asked: list[int] = []

        def end(number: int, frame: object) -> None:
            asked.append(number)
            server.should_exit = True

        # From here on nothing is raised: the loop that starts would lose it. uvicorn has handlers of its own while it
        # serves, and raises the signal that ended it once more: SIGTERM would leave the folder behind.
        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        links = f"; {runs.num_hidden:,} not shown, with links in the folder" if runs.num_hidden else ""
        print(f"runs   {several(found, 'run')} in {place}{links}")
        print(f"page   http://{shown}:{port}/{f'?token={token}' if token else ''}", flush=True)
        server.run([listener])
    if signal.SIGINT in asked:
        raise KeyboardInterrupt
    sys.exit(128 + signal.SIGTERM)
