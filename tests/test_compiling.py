"""torch.compile by recipe: one graph for all blocks, compiled once; the same curve, and nothing of it in an export."""

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters
from transformers import TrainingArguments

from pretraining.errors import UserError
from pretraining.model import build_loss, build_model
from pretraining.model.compiling import blocks_of, check_compiler
from pretraining.owned_keys import TRAINING_KEYS
from pretraining.recipe import load_recipe
from pretraining.refusals import load_run
from pretraining.training import build_arguments
from tests.runs import MODELS, Run, execute
from tests.test_attention import TOKENIZER
from tests.test_reshard import unfinished

IDS = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
DEFAULT = load_recipe("tiny").speed
BLOCKS = ("speed.compile=blocks", "speed.compile_backend=aot_eager")


@pytest.fixture
def arguments(tmp_path):
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=7)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def losses(name: str, arguments, checkpointing: bool = False, **speed) -> list[float]:
    """Of two training steps of a model of three layers, each with a short validation after it."""
    section = {**MODELS[name], "n_layer" if name == "gpt2" else "num_hidden_layers": 3}
    model = build_model(section, TOKENIZER, arguments, speed={**DEFAULT, **speed}).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss, found = build_loss(model, load_recipe("tiny").loss), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        here = loss(model(input_ids=IDS), IDS.roll(-1, 1))
        here.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(here.item())
        with torch.no_grad():
            model.eval()
            model(input_ids=IDS[:1, :9])
            model.train()
    return found


@pytest.mark.parametrize(
    "name, compile, checkpointing",
    [("gpt2", "blocks", True), ("llama", "blocks", False), ("gpt2", "whole", False)],
)
def test_one_graph_and_no_second_compilation(name, arguments, compile, checkpointing):
    """Three layers, two steps, another shape validated between them: one graph without a break, compiled once."""
    losses(name, arguments, compile=compile, compile_backend="eager", checkpointing=checkpointing)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"] and not counters["recompiles"]


@pytest.mark.parametrize("name, backend", [("gpt2", "inductor"), ("qwen3_moe", "eager")])
def test_compiled_losses_are_eager_ones(name, backend, arguments):
    """Through inductor's generated code, forward and backward; and blocks with experts, in which graphs may break."""
    eager = losses(name, arguments)
    compiled = losses(name, arguments, compile="blocks", compile_backend=backend)
    assert counters["stats"]["unique_graphs"] >= 1
    assert compiled == pytest.approx(eager, abs=1e-4)


def test_a_compiled_run_has_the_plain_curve_and_goes_on_without(workshop, tmp_path):
    """ZeRO-2 on two ranks: the losses of a plain process, which can go on from it; an export has the usual names."""
    whole = workshop.run("zero2", settings=BLOCKS)
    assert whole.losses == pytest.approx(workshop.plain().losses, abs=1e-4)
    with safe_open(whole.dir.export / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names and not any("_orig_mod" in name for name in names)
    folder = unfinished(whole, tmp_path / "run")
    finished = execute(workshop.command(folder, "null", 1, "plain"))
    assert finished.code == 0, finished.output
    assert Run(folder).losses == pytest.approx(whole.losses, abs=1e-5)


REFUSED = {
    "stage 3": ({"compile": "blocks"}, "speed.compile: ZeRO-3 gathers the weights of every module by hooks"),
    "a mode of another backend": (
        {"compile": "whole", "compile_backend": "aot_eager", "compile_mode": "max-autotune"},
        "speed.compile_mode: is max-autotune, a mode of inductor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_one_line(name):
    """Bad input: what, and what to write."""
    speed, words = REFUSED[name]
    settings = [f"speed.{key}={value}" for key, value in speed.items()]
    with pytest.raises(UserError) as error:
        load_run("tiny", settings, "zero3" if name == "stage 3" else "zero2")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr("pretraining.model.compiling.shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"inductor needs a C\+\+ compiler"):
        check_compiler({**DEFAULT, "compile": "blocks"})


def test_autotuning_finds_one_answer_about_tf32(monkeypatch, tmp_path):
    """A recipe in bf16 switches TF32 on: inductor's max-autotune asks torch's older switch, which must agree.

    On a machine without a GPU, told that there is one with TF32.
    """
    for module in ("pretraining.training.arguments", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_tf32_available", lambda: True)
    before = torch.get_float32_matmul_precision()
    try:
        recipe = load_recipe("tiny", ["training.bf16=true"])
        build_arguments(recipe, None, tmp_path, 1)
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


def test_the_trainer_s_own_switch_names_its_place():
    """It would compile validation and samples too, and put `_orig_mod` into names."""
    assert all("speed" in TRAINING_KEYS[f"torch_compile{rest}"] for rest in ("", "_backend", "_mode"))
    with pytest.raises(
        UserError, match=r"training\.torch_compile: does not belong here: the recipe's speed section"
    ):
        load_recipe("tiny", ["training.torch_compile=true"])


def test_every_block_is_found(arguments):
    for name, section in MODELS.items():
        assert len(list(blocks_of(build_model(section, TOKENIZER, arguments)))) == 2, name
