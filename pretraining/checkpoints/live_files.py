"""Send what shows how a run goes to its store while it lives, and bring all of it back into one folder.

Rank 0 sends metrics, events, report and the like. One rank of each disk sends the records of its node (`NODE_FOLDERS`),
to a folder of the store that no other node has. Both once a minute; of a log only the end, until the run ends. A rank
that fails sends its own log and failure before it ends. `fetch_records` makes one run folder of what all nodes sent.
"""

import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pretraining.checkpoints.format import MARKER
from pretraining.checkpoints.remote import RUN_FILES, RemoteRun
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import NAME, TEXT, object_of, parse_json, read_json_value
from pretraining.outside.schema import check
from pretraining.runtime.console_log import MOST_BYTES, cut_log
from pretraining.runtime.durable_files import file_state, write_json
from pretraining.runtime.run_folder import RunFolder, utc_now

_LIVE_SECONDS = 60.0
LIVE_LOG_BYTES = 64 << 10  # of the end of a log, which is sent anew if it grows: stores cannot append
_LAST_SECONDS = 60.0  # how long the end of a run waits for a store that does not take its last files

LIVE_FILES = (*RUN_FILES, "plan.json", "environment.json", "mixture.json", "console.log", "report.html")
"""Files of rank 0's disk, which are sent while the run lives."""
NODES = "nodes"  # folder of the store with a folder of each node
NODE_FOLDERS = ("failures", "logs", "heartbeats", "stacks")  # each has a file of each rank of the node


@contextmanager
def live_files(run: RunFolder, upload: str | None) -> Iterator[None]:
    """Send these files to the run's store: every minute while the block runs, after it, and if this rank fails.

    A block that does not begin the run, such as a refused start, sends nothing. Every rank calls this.
    """
    if upload is None:
        yield
        return
    rank, remote = int(os.environ.get("RANK", "0")), RemoteRun(upload, run.path.name)
    if run.disks.is_first:

        def name_node() -> None:
            # An empty disk in the place of another one gets a new name, so that nothing in the store is replaced.
            host, known = socket.gethostname(), _node(run)
            name = known["name"] if known.get("host") == host else f"{host}-{uuid.uuid4().hex[:8]}"
            write_json(run.node, {"name": name, "host": host, "began": utc_now(), "store": remote.address})

        run.at_beginning.append(name_node)
    of_others = run.disks.is_first or rank == 0

    def files_to_send() -> dict[str, Path]:
        files = {name: run.path / name for name in LIVE_FILES} if rank == 0 else {}
        if (node := _node(run).get("name")) is None:
            return files
        # of this disk, also what its other ranks write
        folders = [run.path / name for name in NODE_FOLDERS] if of_others else []
        paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
        own = (run.node, run.node_events, *paths, run.failures(rank), run.rank_log(rank))
        place = f"{NODES}/{node}"
        return files | {f"{place}/{p.relative_to(run.path).as_posix()}": p for p in own if p.is_file()}

    files, closed = LiveFiles(run, remote, files_to_send), threading.Event()

    def send_again_and_again(pause: float = _LIVE_SECONDS) -> None:
        while not closed.wait(pause):
            began = time.monotonic()
            files.send(LIVE_LOG_BYTES)
            # Long files take their time: at most a tenth of it.
            pause = max(_LIVE_SECONDS, 9 * (time.monotonic() - began))
        files.send()

    # It is called after the block too, once the failure is written.
    run.at_failure.append(files.send)
    if not of_others:
        yield
        return
    thread = threading.Thread(target=send_again_and_again, name="live files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_LAST_SECONDS)


_NODE = object_of({"name": NAME, **dict.fromkeys(("host", "began", "store"), TEXT)})
"""Its name is that of a folder in the store."""


def _node(run: RunFolder) -> dict:
    with suppress(OSError, ValueError, UserError):
        return check(read_json_value(run.node), _NODE, str(run.node))
    return {}


class LiveFiles:
    """Sends the files that have changed since they were sent; what a store does not take is sent the next time."""

    def __init__(self, run: RunFolder, remote: RemoteRun, files_to_send: Callable[[], dict[str, Path]]):
        self.run, self.remote, self.files_to_send = run, remote.at_first_contact(), files_to_send
        self._sent: dict[str, tuple] = {}
        self._lock = threading.Lock()

    def send(self, log_bytes: int = MOST_BYTES) -> None:
        """Send what has changed. log_bytes: how much of the end of a log."""
        with self._lock:
            if not self.run.has_begun:
                return
            for name, path in self.files_to_send().items():
                is_log = path.suffix == ".log"
                if (state := file_state(path)) is None:
                    continue
                # a heartbeat keeps its size
                state = (*state, path.stat().st_mtime_ns, min(state[1], log_bytes) if is_log else None)
                if state == self._sent.get(name):
                    continue
                try:
                    self.remote.write_bytes(name, cut_log(path, log_bytes) if is_log else path.read_bytes())
                except (UserError, OSError):  # an upload that fails is an event; the copy of a log is none
                    return
                self._sent[name] = state


def fetch_records(address: str, place: Path) -> RunFolder:
    """Bring what all nodes of a run sent, and its newest marker, into a new folder; `UserError` if there is no run."""
    remote = RemoteRun(address).at_first_contact()
    run = RunFolder(place / remote.address.rpartition("/")[2])
    run.path.mkdir(parents=True)
    for file in LIVE_FILES:
        if (content := remote.read_if_there(file)) is not None:
            (run.path / file).write_bytes(content)
    if not run.events.exists():
        what = f"no run there ({run.events.name} is missing)"
        raise UserError(f"{address}: {what}; s3://bucket/runs/30b is one's address")
    # the records of all nodes, in the order of their starts
    nodes = []
    for node in remote.sizes(NODES) or {}:
        folder = f"{NODES}/{node}"
        names = [name for name in remote.sizes(folder) or {} if name not in NODE_FOLDERS]
        for each in NODE_FOLDERS:
            names += [f"{each}/{name}" for name in remote.sizes(f"{folder}/{each}") or {}]
        found = ((name, remote.read_if_there(f"{folder}/{name}")) for name in names)
        read = {name: content for name, content in found if content is not None}
        began = ""  # when the newest start of the run began there
        with suppress(KeyError, ValueError, UserError):
            began = check(parse_json(read.pop("node.json")), _NODE, "node.json")["began"]
        nodes.append((began, read))
    parts: dict[str, list[bytes]] = {}
    for _, read in sorted(nodes, key=lambda each: each[0]):
        for name, content in read.items():
            # A rank that has moved to another node has lines on both; its newest heartbeat counts.
            before = [] if name.startswith("heartbeats/") else parts.get(name, [])
            parts[name] = [*before, content]
    for name, contents in parts.items():
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(sorted(contents)))  # a log and the rows of failures begin with their time
    if (newest := remote.newest(-1)) is not None:
        name, marker, _ = newest
        (run.path / name).mkdir()
        (run.path / name / MARKER).write_bytes(marker)
    return run


@contextmanager
def records_of(run: str) -> Iterator[tuple[Path, str]]:
    """Yield a folder with the records of all ranks, and its name; for one node's folder the store has the others'."""
    if not is_remote(run) and (Path(run) / NODES).is_dir():
        run = address = str(Path(run).absolute())  # the run's place in a store that is mounted here
    else:
        address = run if is_remote(run) else None
        # the store's, if this folder is that of one node among several
        if address is None and (folder := RunFolder(Path(run))).holds_parts():
            address = _node(folder).get("store")
    if address is None:
        yield Path(run), run
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, shown = fetch_records(address, Path(folder)).path, address
        except UserError as error:
            if address == run:
                raise
            print(f"{error}: what follows is from this node alone", file=sys.stderr)
            found, shown = Path(run), run
        yield found, shown
