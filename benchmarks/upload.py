"""What an upload in the background costs training: a step's seconds beside an upload against those without one.

    python benchmarks/upload.py --to folder --pairs 5
    python benchmarks/upload.py --to folder --pairs 5 --threads 1
    python benchmarks/upload.py --to s3 --pairs 3 --threads 1

Trains as `blocked_save.py` does, and uploads a checkpoint of the same model again and again to an empty store: a folder
(such as a mounted disk; with fsync), or a real S3 server on the same machine, whose processor time training pays for
here and nowhere else. Prints one JSON line: medians of the steps' seconds in turns without and with an upload, the
median of the pairs' ratios, and the processor seconds of this process for an upload while training rests. On a machine
with few cores the ratio is noise below `ratio_of_idle_halves`, which compares two turns without an upload.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from blocked_save import Training, middle, writer_in
from record import parser_of, record

STEPS = 6
"""Of a turn without an upload; a turn with one is as long as the upload."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="124m")
    parser.add_argument("--to", choices=("folder", "s3"), default="folder")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, help="of training: fewer than there are cores, as on a node whose GPUs compute"
    )
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, store(options, Path(folder)) as address:
        values = measure(options, Path(folder), address)
    record("upload", values, options.keep)


@contextlib.contextmanager
def store(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The address of an empty store."""
    if options.to == "folder":
        yield str(folder / "store")
        return
    from tests.gear.object_store import BUCKET, CREDENTIALS, s3_server

    with s3_server(folder / "server.log") as address:
        os.environ |= {**CREDENTIALS, "AWS_ENDPOINT_URL": address}
        yield f"s3://{BUCKET}/runs"


def measure(options: argparse.Namespace, folder: Path, address: str) -> dict:
    from pretraining.checkpoints.format import MARKER
    from pretraining.checkpoints.remote import RemoteRun
    from pretraining.checkpoints.upload import Uploader

    training, writer = Training(options.recipe, rest=False), writer_in(folder / "run", background=False)
    if options.threads:
        training.torch.set_num_threads(options.threads)
    commit_with_files(writer)
    writer.save(1, training.tensors(), {"state.json": b"{}"})
    checkpoint = writer.run.checkpoint(1)
    assert (checkpoint / MARKER).exists()
    remote = RemoteRun(address, "run")
    uploader = Uploader(writer.run, remote)
    rounds, alone = [], []
    for _ in range(options.pairs + 1):
        turns = [steps(training, lambda: False), steps(training, lambda: False)]
        uploader.offer(checkpoint)
        turns.append(steps(training, lambda: uploader._thread.is_alive(), at_least=1))
        uploader.wait()
        assert remote.read_if_there(f"{checkpoint.name}/{MARKER}")
        rounds.append(turns)
        remote.remove_checkpoint(checkpoint.name)
        began, cpu = time.perf_counter(), time.process_time()
        uploader.offer(checkpoint)
        uploader._thread.join()
        alone.append((time.perf_counter() - began, time.process_time() - cpu))
        uploader.wait()
        remote.remove_checkpoint(checkpoint.name)
    rounds, alone = rounds[1:], alone[1:]
    gigabytes = sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e9
    return {
        "to": options.to,
        "gigabytes": round(gigabytes, 3),
        "pairs": options.pairs,
        "num_threads": training.torch.get_num_threads(),
        "step_seconds": middle(turns[1] for turns in rounds),
        "step_seconds_beside_an_upload": middle(turns[2] for turns in rounds),
        "ratio": middle(turns[2] / turns[1] for turns in rounds),
        "ratio_of_idle_halves": middle(turns[1] / turns[0] for turns in rounds),
        "upload_seconds": middle(seconds for seconds, _ in alone),
        "upload_cpu_seconds": middle(cpu for _, cpu in alone),
        "upload_cpu_seconds_per_gigabyte": middle(cpu / gigabytes for _, cpu in alone),
    }


def commit_with_files(writer) -> None:
    """Let the writer commit as a run does: `blocked_save` needs no list of files."""
    from pretraining.checkpoints.format import commit_checkpoint

    writer.commit = lambda folder, content: commit_checkpoint(folder, {**content, "step": 1, "ranks": 1})


def steps(training: Training, goes_on, at_least: int = STEPS) -> float:
    """The median step of a turn, which has at least so many steps and lasts as long as `goes_on`."""
    seconds: list[float] = []
    while len(seconds) < at_least or goes_on():
        seconds.append(training.step())
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
