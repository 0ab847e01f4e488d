"""What only a GPU can show, to be run first on a machine that has one: `pytest -m gpu`.

PRETRAINING_GPU_TESTS_ON=cpu runs the same on the processor, but what needs CUDA's own kernels.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainingArguments

from pretraining.checkpoints.background import HostSnapshot
from pretraining.ds_config import DS_CONFIGS
from pretraining.model import attention
from pretraining.model.attention import TORCH_VARLEN
from pretraining.model.build import HOPPER, build_model
from pretraining.recipe import load_recipe
from pretraining.training.throughput import device_peak_flops
from tests.gear.runs import (
    LLAMA,
    MODELS,
    TOKENIZER,
    Run,
    Started,
    Workshop,
    choices,
    completed,
    free_port,
    looped_model,
    made_once,
    section_of,
)
from tests.model.test_loss import WAYS, built, loss_and_gradients, settings

DEVICE = os.environ.get("PRETRAINING_GPU_TESTS_ON", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
BF16 = ("training.bf16=true",)
EXACT = (*BF16, "training.full_determinism=true")
STAGES = ("zero0", "zero1", "zero2", "zero3")
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="CUDA's own kernels")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler here")


@pytest.fixture(scope="module")
def workshop(shared) -> Workshop:
    """The small corpus and the runs made of it, without waiting for operators of the processor."""
    return made_once(shared / "gpu.prepared", lambda: Workshop(shared / "gpu"))


def trained(workshop: Workshop, stage: str, settings: tuple[str, ...] = BF16) -> Run:
    """The finished run of one process, started as a user would."""
    return workshop.run(stage, 1, "python", settings)


def on_two_ranks(workshop: Workshop, output: Path, stage: str, settings: tuple[str, ...], **variables) -> Run:
    """The finished run of two ranks: NCCL, streams and all. Where there is one GPU, both compute on it.

    NCCL takes two ranks on one GPU if they say that they are on different hosts: what they send goes through sockets.
    """
    if DEVICE == "cpu" or torch.cuda.device_count() > 1:
        return Run(output, completed(workshop.command(output, stage, 2, "torchrun", settings), **variables))
    words = ["torchrun", "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
    words.append(f"--master_port={free_port()}")
    options = workshop.options("--output_dir", output, *choices(stage, settings))
    nodes = [
        Started(
            [*words, f"--node_rank={node}", "train.py", *options],
            NCCL_HOSTID=f"host-{node}",
            NCCL_SOCKET_IFNAME="lo",
            **variables,
        )
        for node in range(2)
    ]
    ends = [node.finish() for node in nodes]
    assert [end.code for end in ends] == [0, 0], "\n".join(end.output for end in ends)
    return Run(output, ends[0])


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_in_bf16(workshop, stage):
    """Promise: the curve belongs to the recipe. Within bf16's rounding of plain PyTorch; exported, clean end."""
    run, plain = trained(workshop, stage), trained(workshop, "null")
    assert run.losses == pytest.approx(plain.losses, abs=0.02)
    assert run.losses[-1] < run.losses[0] - 0.2
    ours, theirs = (each.validation_rows[-1]["eval/loss"] for each in (run, plain))
    assert ours == pytest.approx(theirs, abs=0.02)
    assert run.dir.export.exists() and run.events[-1]["event"] == "end"
    assert "Traceback" not in run.finished.output and run.finished.strays == ()


@needs_cuda
def test_a_run_on_a_gpu_says_what_it_takes(workshop):
    """Peak memory in every logged step, and MFU if the table knows this GPU."""
    run = trained(workshop, "zero2")
    assert all(row["memory/peak_bytes"] > 0 for row in run.training_rows)
    known = device_peak_flops(load_recipe(str(run.dir.recipe))) is not None
    assert all(("throughput/mfu" in row) == known for row in run.training_rows)
    assert known != ("no MFU: " in run.finished.stdout)


@pytest.mark.parametrize(
    "stage, settings, within", [("zero2", EXACT, 0.0), ("zero3", EXACT, 0.0), ("zero2", BF16, 0.02)]
)
def test_a_resumed_run_goes_on(workshop, tmp_path, stage, settings, within):
    """Promise: nothing is lost. With `training.full_determinism` every later loss is the unbroken run's to the last
    digit; with the default kernels within bf16's rounding."""
    whole = trained(workshop, stage, settings)
    resumed = workshop.continued(whole, tmp_path / "run", stage, 1, "python", settings)
    assert resumed.losses == pytest.approx(whole.losses, abs=within, rel=0.0)


BLOCKS = (*BF16, "speed.compile=blocks")
TUNED = (*BLOCKS, "speed.compile_mode=max-autotune-no-cudagraphs")
COMPILED = [("zero2", BLOCKS), ("zero2", TUNED), ("zero2_offload", BF16), ("zero3_offload", BF16)]


@needs_cuda
@needs_compiler
@pytest.mark.parametrize("stage, settings", COMPILED)
def test_what_is_compiled_trains(workshop, stage, settings):
    """Triton's kernels for blocks, tuned or not, and DeepSpeed's CPU Adam beside a GPU, which takes about a minute:
    within bf16's rounding of the run in which nothing is."""
    run, plain = trained(workshop, stage, settings), trained(workshop, "zero2")
    assert run.losses == pytest.approx(plain.losses, abs=0.02)


@needs_cuda
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < HOPPER, reason="no Hopper"
)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_products_in_fp8_train(workshop, stage):
    """torchao's own kernels, scaled by tensor: beside the curve of bf16, at either stage."""
    model = section_of({**LLAMA, "vocab_size": 1024})
    run = trained(workshop, stage, (*BF16, model, "speed.fp8=tensorwise", "speed.bf16_blocks=[0,1]"))
    assert run.losses == pytest.approx(trained(workshop, "zero2", (*BF16, model)).losses, abs=0.05)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_two_ranks_give_the_curve_of_one(workshop, tmp_path, stage):
    """Promise: the curve belongs to the recipe."""
    run = on_two_ranks(workshop, tmp_path / "run", stage, BF16)
    assert run.losses == pytest.approx(trained(workshop, stage).losses, abs=0.02)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_blocks_that_are_called_twice_have_one_curve(workshop, tmp_path, stage):
    """As on the processor (test_gradient_buckets.py), with gradients that are sent while others are computed."""
    settings = (*BF16, *looped_model(tmp_path))
    one = trained(workshop, "zero0", settings)
    other = on_two_ranks(workshop, tmp_path / "run", stage, settings)
    assert other.losses == pytest.approx(one.losses, abs=0.02)


WIDE = {"n_embd": 4096 if DEVICE == "cuda" else 128, "n_layer": 4}
"""On a GPU so many weights that the optimizer's kernels take longer than the host needs to begin the next pass."""


@pytest.mark.parametrize("threshold", [None, 0])
def test_steps_that_are_not_logged_compute_with_the_weights_of_their_step(workshop, tmp_path, threshold):
    """Promise: the curve. A GPU that may run behind the host, against one that the host waits for at each kernel."""
    config = json.loads((DS_CONFIGS / "zero3.json").read_text())
    if threshold is not None:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    (stage := tmp_path / "zero3.json").write_text(json.dumps(config))
    shape = (f"model.{key}={value}" for key, value in WIDE.items())
    settings = (*EXACT, *shape, "training.logging_steps=1000", "training.learning_rate=0.001")
    settings += ("training.save_strategy=no",)
    ended = []
    for folder, variables in (("behind", {}), ("waiting", {"CUDA_LAUNCH_BLOCKING": "1"})):
        run = on_two_ranks(workshop, tmp_path / folder, str(stage), settings, **variables)
        ended.append((run.validation_rows[-1]["eval/loss"], weights_of(run)))
    assert ended[0] == ended[1]


def weights_of(run: Run) -> dict[str, str]:
    """The digest of each exported file of weights."""
    files = run.dir.export.glob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_the_loss_has_the_plain_one_and_its_gradients(name, tied):
    """In fp32, chunks that do not divide the tokens."""
    model = built(MODELS[name], tied).float().to(DEVICE)
    tokens = [torch.randint(512, (3, 64), device=DEVICE) for _ in range(2)]
    loss, gradients = loss_and_gradients(model, tokens, settings("plain", z_loss=1e-3))
    for way, compile in WAYS[1:]:
        ours, found = loss_and_gradients(model, tokens, settings(way, z_loss=1e-3, compile=compile))
        assert ours == pytest.approx(loss, rel=1e-5)
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-3, atol=1e-5, msg=key)


KERNELS = [attention.SDPA_CAUSAL, "sdpa", pytest.param(TORCH_VARLEN, marks=needs_cuda)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])  # a router may choose another expert for rounding alone
def test_every_attention_kernel_computes_attention(tmp_path, name, kernel):
    """bf16 logits and gradients of the first weight within its rounding of the plain formula in fp32."""
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=DEVICE == "cpu", seed=7)
    model = build_model({**MODELS[name], "attn_implementation": kernel}, TOKENIZER, arguments)
    ids = torch.randint(512, (2, 64), device=DEVICE)
    with sdpa_kernel(SDPBackend.MATH):
        plain = build_model({**MODELS[name], "attn_implementation": "sdpa"}, TOKENIZER, arguments).to(DEVICE)
        expected = logits_and_gradient(plain, ids)
    found = logits_and_gradient(model.bfloat16().to(DEVICE), ids)
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.03 * scale)


def logits_and_gradient(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return logits.detach(), next(model.parameters()).grad


def test_a_snapshot_is_a_copy_in_pinned_memory():
    """Every byte, and the next take leaves nothing of the first; pinned if it comes from a GPU."""
    snapshot, shapes = HostSnapshot(), {"a": (1000, 33), "b": (7,), "c": (512, 512)}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: torch.randn(shape, device=DEVICE).to(dtype) for name, shape in shapes.items()}
        assert snapshot.make_room(tensors)
        copies = snapshot.take(tensors)
        for name, copy in copies.items():
            assert torch.equal(copy, tensors[name].cpu()) and copy.is_pinned() == (DEVICE == "cuda")
    assert snapshot.num_bytes >= sum(tensor.nbytes for tensor in tensors.values())


PINNED = """
from pretraining.runtime.imports import _pin_what_is_asked_for
_pin_what_is_asked_for()
import torch
torch.cuda.init()  # before it there are no statistics
held = torch.empty(65 * 2**20, dtype=torch.uint8, pin_memory=True)
taken = torch.cuda.host_memory_stats()["allocated_bytes.current"]
del held
print(taken, torch.cuda.host_memory_stats()["allocated_bytes.current"])
"""


@needs_cuda
def test_large_pinned_memory_is_what_was_asked_for_and_is_given_back():
    """Promise: you know before you pay. torch would round 65 MiB up to 128, and keep them."""
    finished = completed([sys.executable, "-c", PINNED])
    assert finished.stdout.split() == [str(65 * 2**20), "0"], finished.output
