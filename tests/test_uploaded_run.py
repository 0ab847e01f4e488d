"""Promise: nothing committed is lost, not even with the machine: a run goes on from its uploaded checkpoint."""

import shutil

from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import Uploader
from pretraining.run_dir import RunDir
from tests.object_store import connect_to, s3_server, use_here
from tests.runs import Run, execute

UPLOAD = ("checkpoints.upload=s3://bucket/runs",)
SECRET = "wJalrXUtnFEMIK7MDENG"


def test_a_run_goes_on_from_the_store_on_an_empty_machine(workshop, tmp_path, monkeypatch):
    """Two ranks, ZeRO-2, a real S3 server. The newest marker there is damaged: steps 9 and 10 are trained again.

    A slow machine may leave out checkpoint-8 while an older one is under way: it is offered once more.
    """
    reference, output = workshop.run("zero2"), tmp_path / "run"
    with s3_server(tmp_path / "log") as address:
        variables = connect_to(address, AWS_SECRET_ACCESS_KEY=SECRET)
        command = workshop.command(output, settings=UPLOAD)
        first = execute(command, **variables)
        assert first.code == 0, first.output
        uploads = [event["checkpoint"] for event in Run(output).events if event["event"] == "upload"]
        assert uploads[-1] == "checkpoint-10"
        use_here(monkeypatch, address)
        store = RemoteRun("s3://bucket/runs", "run")
        uploader = Uploader(RunDir(output), store)
        uploader.offer(output / "checkpoint-8")
        assert uploader.drain()
        shutil.rmtree(output)
        store.write_bytes("checkpoint-10/committed.json", b"{}")
        second = execute(workshop.command(output, settings=UPLOAD), **variables)
        assert second.code == 0, second.output
        refused = execute([*command, "--resume", "never"], **variables)
    run = Run(output)
    assert run.losses == reference.losses
    (fetch,) = (event for event in run.events if event["event"] == "fetch")
    assert fetch["checkpoint"] == "checkpoint-8"
    assert (refused.code, refused.stderr.count("\n")) == (2, 1), refused.output
    assert "checkpoint-10 is newer" in refused.stderr
    written = [path for path in output.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not written and SECRET not in first.output + second.output
