"""Promise: the curve belongs to the recipe, wherever the shards lie."""

from tests.gear.object_store import connect_to, s3_server, upload
from tests.gear.runs import Run, execute


def test_a_run_from_s3_has_the_losses_of_a_run_from_disk(workshop, tmp_path):
    """train.py on s3:// through the real command line: equal losses, to the last digit."""
    plain = workshop.plain()
    with s3_server(tmp_path / "log") as address:
        upload(address, workshop.data, "data")
        command = workshop.command(tmp_path / "run", "null", 1, "plain")
        command[command.index("--data_dir") + 1] = "s3://bucket/data"
        cache = ["--data_cache", str(tmp_path / "cache"), "--data_cache_gb", "1"]
        finished = execute([*command, *cache], **connect_to(address))
    assert finished.code == 0, finished.output
    assert not finished.strays
    losses = [[row.get("train/loss") for row in run.rows] for run in (plain, Run(tmp_path / "run"))]
    assert losses[0] == losses[1] and len(losses[0]) > 5
    assert list((tmp_path / "cache").glob("*/*.arrow"))
