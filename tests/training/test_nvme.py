"""Promise: the curve belongs to the recipe, and nothing committed is lost: also where a drive holds all states."""

import json
import os
from pathlib import Path

import pytest

from pretraining.ds_config import DS_CONFIGS

pytestmark = pytest.mark.skipif(
    not (Path("/usr/include/libaio.h").exists() and os.environ.get("NVME_TESTS")),
    reason="compiles an operator for minutes; NVME_TESTS=1 runs it after: apt-get install libaio-dev",
)


@pytest.fixture(scope="module")
def on_a_drive(workshop):
    """ds_configs/zero3_nvme.json with a folder here for a drive, and buffers for small tensors."""
    config = json.loads((DS_CONFIGS / "zero3_nvme.json").read_text())
    blocks = [config["zero_optimization"][f"offload_{what}"] for what in ("optimizer", "param")]
    for block in blocks:
        block["nvme_path"] = str(workshop.folder / "drive")
    blocks[1]["buffer_size"] = 1_000_000
    (workshop.folder / "drive").mkdir(exist_ok=True)
    (path := workshop.folder / "nvme.json").write_text(json.dumps(config))
    return str(path)


def test_the_curve_is_that_of_one_plain_process(workshop, on_a_drive):
    """fp32, two ranks: within 1e-4."""
    assert workshop.run(on_a_drive).losses == pytest.approx(workshop.plain().losses, abs=1e-4)


@pytest.mark.parametrize("there", [True, False], ids=["to the drive", "from the drive"])
def test_a_checkpoint_goes_on_to_and_from_the_drive(workshop, on_a_drive, tmp_path, there):
    """Saved by the one, resumed by the other: every later loss within 1e-5 of the unbroken run's."""
    whole = workshop.run("zero2") if there else workshop.run(on_a_drive)
    stage, ranks, by = (on_a_drive, 2, "forked") if there else ("null", 1, "plain")
    resumed = workshop.continued(whole, tmp_path / "run", stage, ranks, by)
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-5)
