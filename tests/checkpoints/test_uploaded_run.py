"""Promise: nothing committed is lost, not even with the machine: a run goes on from its uploaded checkpoint."""

import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack

from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import Uploader
from pretraining.runtime.exit_codes import HANG
from pretraining.runtime.run_folder import RunFolder
from tests.gear.object_store import Proxy, connect_to, s3_server, upload, use_here
from tests.gear.runs import Run, Started, completed, execute, refused

UPLOAD = ("checkpoints.upload=s3://bucket/runs",)
SECRET = "wJalrXUtnFEMIK7MDENG"


def test_a_run_goes_on_from_the_store_on_an_empty_machine(workshop, tmp_path, monkeypatch):
    """Two ranks, ZeRO-2, a real S3 server. The newest marker there is damaged: steps 9 and 10 are trained again.

    A slow machine may leave out checkpoint-8 while an older one is under way: it is offered once more. It takes three
    starts: two that train, and one that is refused.
    """
    reference, output = workshop.run("zero2"), tmp_path / "run"
    with s3_server(tmp_path / "log") as address:
        variables = connect_to(address, AWS_SECRET_ACCESS_KEY=SECRET)
        command = workshop.command(output, settings=UPLOAD)
        first = completed(command, **variables)
        uploads = [event["checkpoint"] for event in Run(output).events if event["event"] == "upload"]
        assert uploads[-1] == "checkpoint-10"
        use_here(monkeypatch, address)
        store = RemoteRun("s3://bucket/runs", "run")
        uploader = Uploader(RunFolder(output), store)
        uploader.offer(output / "checkpoint-8")
        uploader.wait()
        shutil.rmtree(output)
        store.write_bytes("checkpoint-10/committed.json", b"{}")
        second = completed(workshop.command(output, settings=UPLOAD), **variables)
        another = workshop.command(tmp_path / "another" / "run", settings=(*UPLOAD, "training.seed=8"))
        stranger = execute(another, **variables)
    run = Run(output)
    assert run.losses == reference.losses
    (fetch,) = (event for event in run.events if event["event"] == "fetch")
    assert fetch["checkpoint"] == "checkpoint-8"
    # a run of another recipe under the same name is refused before anything is fetched
    refused(stranger, "s3://bucket/runs/run/checkpoint-10 holds a checkpoint of another recipe")
    assert not list(tmp_path.glob("another/run/checkpoint-*"))
    written = [path for path in output.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not written and SECRET not in first.output + second.output


def test_the_last_upload_may_take_longer_than_a_hang_as_long_as_it_gets_on(workshop, tmp_path):
    """Promise: what stands still is found, what is slow is not. Two runs at once, each with a store of its own.

    Takes longer than the limit, which a loaded machine must not reach between two signs of life.
    """
    seconds = {"slow": 3.5, "stuck": 120.0}  # for each request that is about the checkpoint
    over, limit = threading.Event(), 0.25
    settings = ("training.save_steps=10", f"monitors.hang_minutes={limit}")

    def waiting(store: str) -> Callable[[int, str], None]:
        def wait(number: int, path: str) -> None:
            if "checkpoint-10/" in path:
                over.wait(seconds[store])

        return wait

    with ExitStack() as stores:
        address, started = stores.enter_context(s3_server(tmp_path / "log")), {}
        for store in seconds:
            proxy = stores.enter_context(Proxy(address, waiting(store)))
            upload = f"checkpoints.upload=s3://bucket/{store}"
            command = workshop.command(tmp_path / store, "null", 1, "plain", (*settings, upload))
            started[store] = Started(command, **connect_to(proxy.address))
        finished = {store: run.finish() for store, run in started.items()}
        over.set()
    events = {store: {event["event"]: event for event in Run(tmp_path / store).events} for store in seconds}
    assert finished["slow"].code == 0 and "hang" not in events["slow"], finished["slow"].output
    assert events["slow"]["upload"]["seconds"] > 60 * limit, "the test tests nothing"
    assert finished["stuck"].code == HANG and "hang" in events["stuck"], finished["stuck"].output


def test_a_run_from_s3_has_the_losses_of_a_run_from_disk(workshop, tmp_path):
    """train.py on s3:// through the real command line: equal losses, to the last digit."""
    plain = workshop.plain()
    with s3_server(tmp_path / "log") as address:
        upload(address, workshop.data, "data")
        command = workshop.command(tmp_path / "run", "null", 1, "plain")
        command[command.index("--data_dir") + 1] = "s3://bucket/data"
        cache = ["--data_cache", str(tmp_path / "cache"), "--data_cache_gb", "1"]
        assert not completed([*command, *cache], **connect_to(address)).strays
    losses = [[row.get("train/loss") for row in run.rows] for run in (plain, Run(tmp_path / "run"))]
    assert losses[0] == losses[1] and len(losses[0]) > 5
    assert list((tmp_path / "cache").glob("*/*.arrow"))
