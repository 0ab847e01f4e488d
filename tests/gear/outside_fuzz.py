"""Files of strangers, mutated: every reader must answer or raise one line, in time, and write nowhere else.

`OutsideFuzz` holds one good file of each kind in a folder `box`, and beside it a tree that nobody may touch. `try_one`
draws a reader and a mutation from a seed, and says what came of it. A mutation is one of bytes (cut, flipped, doubled,
brackets without end), of a JSON value (another type, a huge number, a path that leads elsewhere, a key that is gone),
or another kind of file (a pipe, a folder, a link, a device).
"""

import contextlib
import faulthandler
import functools
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import torch
import torch.distributed.checkpoint as dcp

from pretraining.checkpoints import __main__ as checkpoints
from pretraining.checkpoints.folders import COMMITTED, DiskPlace, health
from pretraining.checkpoints.format import (
    MARKER,
    Start,
    _with_checksum,
    read_marker,
    read_receipt,
    receipt_name,
)
from pretraining.checkpoints.live_files import NODES, fetch_records
from pretraining.checkpoints.publish import LIST, to_store
from pretraining.checkpoints.remote import RemoteRun, fetch_share
from pretraining.checkpoints.resume import changes_in, changes_since, recorded_changes
from pretraining.checkpoints.shard_files import CheckpointReader, mean_running_loss
from pretraining.data.dedup.decontamination import read_evaluation_sets
from pretraining.data.finished import open_finished, verify_data
from pretraining.data.manifest import read_manifest
from pretraining.data.prepared import open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.data.text_files import local_file, read_documents
from pretraining.data.tokenizer import describe_tokenizer
from pretraining.data.tools.formats import MdsFolder
from pretraining.errors import UserError, file_error
from pretraining.evaluation.scores import read_items
from pretraining.model.given_weights import _config_of
from pretraining.model.weight_files import check_params, open_weights
from pretraining.outside.store import PATIENCE_VARIABLE
from pretraining.planning.comparison import measured_beside_planned
from pretraining.postmortem import as_text, look_back
from pretraining.recipe import load_recipe
from pretraining.recipe.fixed_keys import changes_of_run
from pretraining.reporting import __main__ as reporting
from pretraining.runtime.journal import Journal
from pretraining.runtime.lock import holder_of, lock_folder
from pretraining.runtime.run_folder import RunFolder
from pretraining.supervise.hosts import Hosts
from pretraining.training.schedule import share_of_peak
from tests.gear.runs import LLAMA, Workshop

DEFECTS = ("traceback", "hang", "outside")
SECONDS = 20
"""After which a reader, which takes milliseconds, hangs."""
MOST_MORE_BYTES = 3 << 30
"""Memory that a reader may take: a device without end must not take the machine's."""
DEPTH = 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x00", "\ud800", "x\\y", "\x1b[31m\n", "9" * 5000, "x" * 100_000, "2026-99-99T99:99:99Z"),
    *("../../../sentinel", "x/../../../sentinel", "/sentinel", "xxh128:../../sentinel", ".", "..", "a/b"),
    *([], {}, [[]], {"": None}, [None], {"step": "x"}),
)
"""What a stranger may write in the place of another value."""


class Hang(BaseException):
    """A reader did not come back; no `OSError`, as `TimeoutError` is one that commands turn into a line."""


@dataclass(frozen=True)
class Outcome:
    """What became of one file: "read", "refused" with its line; or "traceback", "hang" or "outside", and how."""

    kind: str
    reader: str
    said: str = ""


@dataclass(frozen=True)
class Reader:
    """A good file, and what reads it. seal: makes valid again what a mutation of its JSON has broken."""

    path: Path
    read: Callable[[], object]
    seal: Callable[[bytes], bytes] = lambda content: content


def sealed(content: bytes) -> bytes:
    """A marker whose own checksum holds, as anybody can compute it."""
    try:
        text = json.dumps({k: v for k, v in json.loads(content).items() if k != "checksum"}, indent=2)
    except (ValueError, AttributeError):
        return content
    return _with_checksum(text.removesuffix("\n}").encode())


class OutsideFuzz:
    """Readers of a workshop's files, drawn from a seed."""

    def __init__(self, workshop: Workshop, root: Path, seed: int):
        self.random, self.root, self.box = random.Random(seed), root, root / "a" / "b" / "box"
        for name in ("sentinel", "a/sentinel", "a/b/sentinel"):
            (root / name).mkdir(parents=True)
            (root / name / "precious.txt").write_text(name)
        run, data = workshop.plain().folder, next(workshop.data.glob("*/manifest.json")).parent
        self.run = RunFolder(shutil.copytree(run, self.box / "runs" / "run"))
        self.data = Path(shutil.copytree(data, self.box / "data" / data.name))
        self.recipe = load_recipe(str(workshop.recipe))
        self.workshop, self.resolved = workshop, load_recipe(str(self.run.recipe))
        self.run.changes.write_text('[{"step": 4, "key": "training.seed", "from": 1, "to": 2}]')
        self.readers = self._readers()
        self.good = {name: each.path.read_bytes() for name, each in self.readers.items()}
        self.before, self.waiting = self._outside(), list[str]()
        for each in self.readers.values():  # none is refused before it is mutated
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                each.read()

    def _readers(self) -> dict[str, Reader]:
        """Every kind of file that may come from a stranger."""
        run, box = self.run, self.box
        resolved = json.loads(run.recipe.read_text())
        checkpoint = max(run.path.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
        run.journal.write_text(
            '{"step": 5, "to_step": 4, "samples": [8, 16], "lr_factor": 0.5, "lr_steps": 2}\n'
        )
        self._write_weights(box / "weights")
        texts = self._write_texts(box / "texts")
        hosts, published = box / "hosts.txt", box / "published" / LIST
        hosts.write_text("alpha slots=4\nbeta slots=2\n")
        shutil.copyfile(self.workshop.recipe, box / "recipe.json")
        to_store({"config.json": run.export / "config.json"}, str(published.parent))
        remote = RemoteRun((box / "runs").as_uri(), run.path.name)
        heartbeat = sorted(run.heartbeats.iterdir()) if run.heartbeats.is_dir() else []
        records = {
            path.stem: Reader(path, self._look_back)
            for path in (run.events, run.metrics, run.samples, run.plan, run.environment, *heartbeat)
        }
        tokenizer, weights = self.data / "tokenizer", box / "weights"
        index, marker = weights / "index" / "model.safetensors.index.json", checkpoint / MARKER
        store, manifest = self.box.as_uri() + "/data", self.data / "manifest.json"
        config = {"config.json": run.export / "config.json"}
        receipt = checkpoint / receipt_name(0, 1)
        items, params = self._write_items(box / "items" / "items.jsonl"), box / "llama" / "params.json"
        params.parent.mkdir()
        params.write_text('{"n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 1e4}')
        return {
            **records,
            "run's recipe": Reader(
                run.recipe, lambda: (self._look_back(), changes_of_run(run.path, resolved))
            ),
            "lock": Reader(self._lock(), lambda: (holder_of(run.path), lock_folder(run.path, 0).close())),
            "journal": Reader(run.journal, lambda: self._use_journal(Journal.read(run.journal))),
            "marker": Reader(marker, self._list, sealed),
            "marker at a start": Reader(marker, lambda: self._start(checkpoint), sealed),
            "changes": Reader(run.changes, lambda: self._start(checkpoint)),
            "marker in a store": Reader(marker, lambda: self._fetch(remote, checkpoint.name), sealed),
            "receipt": Reader(
                receipt, lambda: (read_receipt(checkpoint, 0, 1), mean_running_loss(checkpoint, [0], 1))
            ),
            "state": Reader(checkpoint / "state.json", lambda: CheckpointReader(checkpoint)),
            "manifest": Reader(manifest, self._open_data),
            "manifest at an address": Reader(manifest, lambda: self._open_data(store)),
            "tokenizer": Reader(tokenizer / "tokenizer.json", self._describe),
            "tokenizer_config": Reader(tokenizer / "tokenizer_config.json", self._describe),
            "config": Reader(run.export / "config.json", lambda: _config_of(run.export, "it", "r.json")),
            "metadata": Reader(weights / ".metadata", lambda: self._weights(weights)),
            "index": Reader(index, lambda: self._weights(index.parent)),
            "published": Reader(published, lambda: to_store(config, str(published.parent))),
            "hostfile": Reader(hosts, lambda: self._hosts(hosts)),
            "failures": Reader(self._failures(), self._look_back),
            "run's recipe at a prune": Reader(run.recipe, lambda: checkpoints.main(["prune", str(run.path)])),
            "plan beside what was measured": Reader(run.plan, lambda: measured_beside_planned(run.path)),
            "marker beside the plan": Reader(marker, lambda: measured_beside_planned(run.path), sealed),
            "records of a node": Reader(self._node(), lambda: fetch_records(remote.address, box / "fetched")),
            "changes in a store": Reader(
                run.changes, lambda: changes_in(remote.read_if_there(run.changes.name) or b"[]", "it")
            ),
            "list of shards": Reader(self.data / "train" / "state.json", lambda: verify_data(self.data)),
            "items": Reader(items, lambda: read_items(str(items))),
            "evaluation set": Reader(items, lambda: list(read_evaluation_sets(items.parent))),
            "mds": Reader(
                self._mds(), lambda: list(MdsFolder(box / "mds" / "index.json", None, None, 0).documents())
            ),
            "params": Reader(params, lambda: check_params(params.parent, LLAMA, "it", "r.json")),
            "recipe": Reader(box / "recipe.json", lambda: load_recipe(str(box / "recipe.json"))),
            **{path.name: Reader(path, functools.partial(self._documents, path)) for path in texts},
        }

    def _lock(self) -> Path:
        path = self.run.path / ".lock"
        path.write_text("process 1 on node0")
        return path

    def _write_weights(self, folder: Path) -> None:
        state = {"model": {"a": torch.ones(3, 4), "b": torch.ones(5)}, "step": 1}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        (folder / "index").mkdir()
        shutil.copyfile(self.run.export / "model.safetensors", folder / "index" / "model.safetensors")
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": "model.safetensors"}}
        (folder / "index" / "model.safetensors.index.json").write_text(json.dumps(index))

    def _write_texts(self, folder: Path) -> list[Path]:
        folder.mkdir()
        # pages of text: those of HTML need a package of the data extra
        warc = b"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <urn:uuid:1>\r\n"
        warc += b"WARC-Target-URI: http://a/\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        warc += b"Content-Type: text/plain\r\nContent-Length: 11\r\n\r\nSome words.\r\n\r\n"
        rows = b'{"text": "one"}\n{"text": "two"}\n'
        packed = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
            stream.write(rows)
        contents = {
            "a.warc": warc * 2,
            "a.warc.gz": gzip.compress(warc) * 2,
            "a.wet": warc,
            "a.txt": b"words",
            "a.jsonl": rows,
            "a.jsonl.gz": gzip.compress(rows),
            "a.jsonl.zst": packed.getvalue().to_pybytes(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        return [folder / name for name in contents]

    def _write_items(self, path: Path) -> Path:
        path.parent.mkdir()
        item = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e"], "label": "1"}
        path.write_text(f"{json.dumps(item)}\n{json.dumps(item)}\n")
        return path

    def _failures(self) -> Path:
        path = self.run.failures(0)
        path.parent.mkdir(exist_ok=True)
        fault = {"time": 1.8e9, "text": "NVRM: Xid 79", "process": None}
        texts = dict.fromkeys(("host", "error", "where", "traceback"), "x")
        row = {"time": 1.8e9, "rank": 0, "process": 1, "expected": False, "faults": [fault], **texts}
        path.write_text(json.dumps(row) + "\n")
        return path

    def _node(self) -> Path:
        path = self.run.path / NODES / "node0-1" / "node.json"
        path.parent.mkdir(parents=True)
        path.write_text('{"name": "node0-1", "host": "node0", "began": "2026-01-01T00:00:00Z", "store": "x"}')
        return path

    def _mds(self) -> Path:
        folder = self.box / "mds"
        folder.mkdir()
        tokens = np.arange(6, dtype="<u2").tobytes()
        ends = np.array([1, 12, 12 + 4 + len(tokens)], "<u4")
        content = ends.tobytes() + np.uint32(len(tokens)).tobytes() + tokens
        (folder / "shard.mds").write_bytes(content)
        shard = {"format": "mds", "samples": 1, "compression": None, "zip_data": None}
        shard |= {
            "column_names": ["tokens"],
            "column_encodings": ["ndarray:uint16:3"],
            "column_sizes": [None],
        }
        shard |= {"raw_data": {"basename": "shard.mds", "bytes": len(content)}}
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
        return folder / "index.json"

    # what reads them

    def _look_back(self) -> None:
        folder, out = self.run.path, self.box / "out.csv"
        as_text(look_back(folder))
        reporting.write_report([folder], out)
        reporting.main(["csv", str(folder), "--output", str(out)])
        reporting.main(["analyze", str(folder)])

    def _use_journal(self, journal: Journal) -> object:
        position = journal.left_out, journal.overtakes(5, 0), journal.position(9)
        return *position, share_of_peak(float, 5, self.resolved.progress(), journal)

    def _list(self) -> None:
        checkpoints.main(["list", str(self.run.path)])
        checkpoints.main(["list", str(self.run.path), "--json"])
        checkpoints.main(["verify", str(self.run.path)])

    def _start(self, checkpoint: Path) -> None:
        found = health(DiskPlace(checkpoint.parent), checkpoint.name)
        if found.word != COMMITTED:
            raise UserError(found.reason or found.word)
        Start.at(checkpoint).progress(self.resolved)
        marker, manifest = read_marker(checkpoint), read_manifest(self.data)
        changes_since(checkpoint, marker, self.resolved, manifest, ["budget"], recorded_changes(self.run))

    def _fetch(self, remote: RemoteRun, name: str) -> None:
        remote.newest(-1)
        if not (files := health(remote, name).files):
            return
        reason = fetch_share(remote, name, self.box / "fetched", files)
        if reason is not None:
            raise UserError(reason)

    def _open_data(self, root: str | None = None) -> None:
        data = open_prepared(self.recipe, root or self.data.parent, ShardCache(self.box / "cache", 1 << 30))
        data.train.read(0, 8), data.validation.document_ends(0, 8)
        if root is None:
            open_finished(self.data).split("validation").document(0)

    def _describe(self) -> None:
        describe_tokenizer(self.data / "tokenizer", "it")
        self._open_data()

    def _weights(self, folder: Path) -> None:
        files = open_weights(folder)
        for name, entry in files.entries.items():
            if entry.dtype is not None and torch.Size(entry.shape).numel() < 1 << 20:
                files.tensor(name)

    def _hosts(self, path: Path) -> None:
        Hosts.of(["deepspeed", f"--hostfile={path}", "--force_multi", "train.py"])

    def _documents(self, path: Path) -> None:
        for _ in read_documents(local_file(path, path.parent)):
            pass

    # one try

    def try_one(self) -> Outcome:
        """Mutate one file, have it read, and put it back: of each reader once, before the first comes again."""
        if not self.waiting:  # none is left out for long
            self.waiting = self.random.sample(list(self.readers), len(self.readers))
        name = self.waiting.pop()
        reader = self.readers[name]
        mutation = self._mutate(reader, self.good[name])
        outcome = self._outcome(name, reader, mutation)
        _remove(reader.path)
        reader.path.write_bytes(self.good[name])
        for left in ("cache", "fetched", "out.csv"):
            _remove(self.box / left)
        if self._outside() != self.before:
            return Outcome("outside", name, f"{mutation}: wrote outside of its folder")
        return outcome

    def _outcome(self, name: str, reader: Reader, mutation: str) -> Outcome:
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(SECONDS)
        # what waits outside of Python sees no signal
        faulthandler.dump_traceback_later(10 * SECONDS, exit=True)
        before = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_MORE_BYTES, before[1]))
        try:
            quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
            with quiet[0], quiet[1], mock.patch.dict(os.environ, {PATIENCE_VARIABLE: "1"}):
                reader.read()
        except UserError as error:
            return Outcome("refused", name, str(error))
        except Hang:
            return Outcome("hang", name, f"{mutation}\n{traceback.format_exc()}")
        except Exception as error:
            # commands look before they read; `one_line_errors` makes a line of the others
            gone = mutation == "nothing" and isinstance(error, FileNotFoundError)
            if isinstance(error, OSError) and (gone or file_error(error) is not None):
                return Outcome("refused", name, str(error))
            return Outcome("traceback", name, f"{mutation}\n{traceback.format_exc()}")
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            resource.setrlimit(resource.RLIMIT_AS, before)
        return Outcome("read", name)

    def _mutate(self, reader: Reader, good: bytes) -> str:
        """Put something else in the place of a good file, and say what."""
        kind = self.random.choice(("bytes", "bytes", "json", "json", "json", "file"))
        if kind == "file":
            return self._other_file(reader.path)
        content = self._other_bytes(good) if kind == "bytes" else self._other_json(reader, good)
        reader.path.write_bytes(content)
        return f"{kind}: {content[:2000]!r}"

    def _other_file(self, path: Path) -> str:
        path.unlink()
        others = {
            "pipe": lambda: os.mkfifo(path),
            "folder": path.mkdir,
            "link": lambda: path.symlink_to(self.root / "sentinel" / "precious.txt"),
            "device": lambda: path.symlink_to("/dev/zero"),
            "nothing": lambda: None,
            "loop": lambda: path.symlink_to(path.name),
        }
        kind = self.random.choice(tuple(others))
        others[kind]()
        return kind

    def _other_bytes(self, good: bytes) -> bytes:
        at, length = self.random.randrange(len(good) + 1), self.random.choice((1, 3, 8, 100))
        random_bytes = self.random.randbytes(length)
        return self.random.choice(
            [
                lambda: good[:at],
                lambda: good[at:],
                lambda: b"",
                lambda: good[:at] + random_bytes + good[at + length :],
                lambda: good[:at] + random_bytes + good[at:],
                lambda: good[:at] + good[at + length :],
                lambda: good[:at] + good[max(0, at - length) : at] * 50 + good[at:],
                lambda: good[:at] + b"[" * DEPTH + b"\n" + good[at:],
                lambda: b"[" * DEPTH,
                lambda: b'{"a":' * DEPTH,
                lambda: random_bytes,
                lambda: good + b"\xff\xfe" + good,
                lambda: b"\x00" * 1000 + good,
            ]
        )()

    def _other_json(self, reader: Reader, good: bytes) -> bytes:
        """The same JSON with one to three nodes changed: of a whole file, or of one of its lines."""
        lines, number = good.splitlines(keepends=True), 0
        try:
            value, lines = json.loads(good), []
        except ValueError:
            number = self.random.randrange(max(1, len(lines)))
            try:
                value = json.loads(lines[number])
            except (ValueError, IndexError):
                return self._other_bytes(good)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            value = self._changed(value)
        content = json.dumps(value).encode()
        if not lines:
            return reader.seal(content)
        return b"".join([*lines[:number], content + b"\n", *lines[number + 1 :]])

    def _changed(self, value: Any) -> Any:
        nodes = list(_nodes(value))
        # the first levels are what readers rely on: a long list below must not take all the draws
        nodes = [each for each in nodes if len(each[2]) <= self.random.choice((1, 2, 3, 9))] or nodes
        if not nodes or self.random.random() < 0.02:
            return self.random.choice(VALUES)
        parent, key, _ = self.random.choice(nodes)
        if self.random.random() < 0.15:
            del parent[key]
        elif isinstance(parent, dict) and self.random.random() < 0.15:
            parent[str(self.random.choice(VALUES))[:300]] = parent.pop(key)
        else:
            parent[key] = json.loads(json.dumps(self.random.choice(VALUES)))
        return value

    def _outside(self) -> dict[str, str]:
        """Everything below the root but what is in the box."""
        found = {}
        for folder, names, files in os.walk(self.root):
            if Path(folder) == self.box.parent:
                names.remove("box")
            for name in files:
                path = Path(folder, name)
                found[str(path)] = hashlib.blake2b(path.read_bytes()).hexdigest()
            found[folder] = " ".join(sorted(names))
        return found


def _nodes(value: Any, place: tuple = ()) -> Iterator[tuple[Any, Any, tuple]]:
    """Yield (parent, key, place) of everything below a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key, (*place, key)
        yield from _nodes(inner, (*place, key))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _too_late(*_) -> None:
    raise Hang
