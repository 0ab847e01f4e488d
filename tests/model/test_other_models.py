"""Model types that no formula describes: counted by building, planned and trained as others are, or refused by name."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pretraining.model.counting import describe
from pretraining.planning import shapes
from pretraining.planning.memory.activations import activations
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.sizes import model_size
from pretraining.recipe import load_recipe
from pretraining.recipe.model import EXACT, other_model_types, own_key
from tests.gear.finished_data import refusal
from tests.gear.runs import LLAMA, OTHER_MODELS, completed, execute, section_of
from tests.gear.small_models import small
from tests.gear.tracked_memory import activation_error, setup_of
from tests.model.conftest import forget_counts
from tests.planning.test_planning import MODELS
from tests.planning.test_planning_memory import TRACED

QWEN2 = {**LLAMA, "model_type": "qwen2", "use_cache": False}


pytestmark = pytest.mark.usefixtures("counts_anew")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_counting_by_building_agrees_with_every_formula(model, monkeypatch):
    """Parts, matrices, biases, idle experts, widths and tensors: two ways to the same numbers."""
    formula, tensors = model_size(model), parameter_tensors(model)
    monkeypatch.setattr("pretraining.planning.sizes.is_exact", lambda model: False)
    monkeypatch.setattr("pretraining.planning.shapes.is_exact", lambda model: False)
    forget_counts()
    built = model_size(model)
    assert replace(built, counted=None) == formula

    def key(tensor):
        return (tensor.numel, tensor.decays, -1 if tensor.layer is None else tensor.layer)

    assert sorted(parameter_tensors(model), key=key) == sorted(tensors, key=key)


@pytest.mark.parametrize("model", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_the_count_is_the_built_models(model):
    """To the last parameter; active and embedding ones too."""
    from tests.planning.test_planning import build

    size, network = model_size(model), build(model)
    assert size.total == sum(size.parts.values()) == sum(p.numel() for p in network.parameters())
    assert size.counted and (size.active < size.total) == ("num_experts" in model)
    assert size.embedding >= model["vocab_size"] * model[own_key(model, "hidden_size")]
    assert size.parts["norms"] > 0 and size.parts["attention"] > 0


TRACKED = ("olmo2", "gemma2", "gpt_oss", "deepseek_v3", "xglm", "nanochat", "minimax")


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", TRACKED)
def test_activations_are_those_of_torchs_tracker(name, recomputes):
    """You know before you pay: within 5 % for types with capped logits, latent attention, windows, experts, dropout."""
    model = small(name, other_model_types()["types"][name], max_position_embeddings=64)
    assert shapes.count_model(model).kept["bytes"]
    assert activation_error(model, recomputes) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("split", ["", "tensor=2", "sequence=2"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_measured_activations_are_those_of_every_formula(name, split, monkeypatch):
    """Two ways to the same bytes of a layer, kept or recomputed, whole or split, at lengths that were not measured."""
    from pretraining.planning.memory import activations as room

    ways = [(length, "bf16", every) for length in (64, 160) for every in (0, 1, 2)]
    cases = [setup_of(TRACED[name], 3, *way, split=split) for way in ways]
    formula = [room.activations(case, None) for case in cases]
    monkeypatch.setattr(room, "is_exact", lambda model: False)
    for case, expected in zip(cases, formula, strict=True):
        measured = room.activations(case, None)
        for part in ("per_layer", "layers", "recomputed"):
            assert getattr(measured, part) == pytest.approx(getattr(expected, part), rel=0.005), part


def test_a_model_that_reads_its_tensors_is_estimated(monkeypatch):
    """A class of the user's own may do what fake tensors cannot: the plan answers all the same, and says so."""
    from transformers import Qwen2ForCausalLM

    def forward(self, input_ids, **kwargs):
        return int(input_ids.sum())

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward)
    facts = shapes.count_model(QWEN2)
    assert "does not run on fake tensors" in facts.estimated
    need = activations(setup_of(QWEN2, 2, 64), None)
    monkeypatch.undo()
    forget_counts()
    measured = activations(setup_of(QWEN2, 2, 64), None)
    assert need.layers == pytest.approx(measured.layers, rel=0.5)


PUBLISHED = {  # Qwen2.5-1.5B (1.54B, 1.31B without the embedding) and Mistral-7B, by their published configurations
    "qwen2": (1_543_714_304, 1_310_340_608, (151936, 1536, 8960, 28, 12, 2), True),
    "mistral": (7_241_732_096, 7_110_660_096, (32000, 4096, 14336, 32, 32, 8), False),
}
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    total, non_embedding, values, tied = PUBLISHED[name]
    model = {"model_type": name, **dict(zip(SHAPE, values, strict=True)), "tie_word_embeddings": tied}
    size = model_size({**model, "max_position_embeddings": 1024})
    assert (size.total, size.total - size.embedding, size.tied) == (total, non_embedding, tied)


def recipe_of(tmp_path, model: dict):
    """recipes/features/gpt2.json with another model, as a file."""
    values = load_recipe("features/gpt2").to_dict()
    values |= {"model": {"vocab_size": 1024, **model, "max_position_embeddings": 128}, "name": "other"}
    values["model"]["vocab_size"] = 1024
    path = tmp_path / "other.json"
    path.write_text(json.dumps(values))
    return path


def test_the_real_command_says_how_it_counted_and_remembers(tmp_path):
    """A process of its own builds the model; the next plan needs neither torch nor that process.

    Everything else on the screen is there as for a known type.
    """
    path, cache = recipe_of(tmp_path, QWEN2), tmp_path / "cache"
    command = ["python", "train.py", "--recipe", path, "--plan", "--world_size", "2"]
    text = " ".join(completed(command, PRETRAINING_MODEL_CACHE=str(cache)).stdout.split())
    how = "parameters: qwen2, 2 layers of width 64; counted by building on the meta device"
    assert f"{model_size(load_recipe(str(path)).model).total:,} {how}" in text
    assert "kernels' time as that of a llama of these widths" in text and "activations " in text
    (kept,) = cache.glob("*.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "layers": 3}))
    assert "qwen2, 3 layers" in execute(command, PRETRAINING_MODEL_CACHE=str(cache)).stdout


def test_ranks_that_start_together_count_once(monkeypatch, tmp_path):
    """Each would take seconds of a core; the others wait for the first and read what it has kept."""
    monkeypatch.undo()
    monkeypatch.setenv("PRETRAINING_MODEL_CACHE", str(tmp_path))
    counted = []

    def built(module: str, section: str) -> dict:
        counted.append(section)
        time.sleep(0.2)  # in which the others arrive
        return describe(json.loads(section))

    monkeypatch.setattr(shapes, "ask_of_model", built)
    with ThreadPoolExecutor(3) as ranks:
        sizes = list(ranks.map(lambda _: shapes.count_model(QWEN2), range(3)))
    assert len(counted) == 1 and sizes[0] == sizes[1] == sizes[2]


WITHOUT_LAYERS = {key: value for key, value in QWEN2.items() if key != "num_hidden_layers"}
REFUSED = {
    "misspelt": ({"model_type": "qwen22"}, "'qwen22', which is no model type; did you mean 'qwen2'"),
    "far from any": ({"model_type": "zzzzzz"}, "known are gpt2, llama"),
    "reads both ways": ({"model_type": "bert"}, "'bert', which does not train here: "),
    "unknown key": ({**QWEN2, "hiden_act": "silu"}, "unknown key; did you mean 'model.hidden_act'?"),
    "wrong type": ({**QWEN2, "hidden_size": "64"}, "model.hidden_size: is the string"),
    # no default of seven billion parameters slips in
    "no shape": (WITHOUT_LAYERS, "model.num_hidden_layers: is missing"),
    "heads": ({**QWEN2, "num_attention_heads": 5}, "model.num_attention_heads: is 5, which does not divide"),
}


@pytest.mark.parametrize("model, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_one_line(model, message, tmp_path):
    """A configuration class of transformers would take any key without a word."""
    assert message in refusal(load_recipe, str(recipe_of(tmp_path, model)))


def test_what_transformers_refuses_is_one_line(monkeypatch):
    """A shape that the class itself cannot build."""
    monkeypatch.setattr(shapes, "ask_of_model", lambda module, section: {"error": "ValueError: heads"})
    assert "model: transformers cannot build this qwen2: ValueError: heads" in refusal(model_size, QWEN2)


def test_weights_that_no_module_draws_are_found():
    """They would be other numbers at every start, or at every stage: such a type is refused."""
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from pretraining.model.counting import drawing_faults

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.lost = nn.Parameter(torch.empty(4, 4))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.outer = Outer()

        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, Outer):
                nn.init.normal_(module.inner.line.weight)

    with torch.device("meta"):
        faults = drawing_faults(Model(PretrainedConfig()))
    assert faults == [
        "outer.inner.line.weight is drawn from two levels above it, by Outer",
        "outer.inner.lost is drawn by no module",
    ]


def test_a_type_without_a_formula_trains(workshop):
    """Two steps on two ranks under ZeRO-3 through the same train.py, with a plan.json and an export."""
    settings = (section_of(QWEN2), "budget.tokens=1024", "training.warmup_steps=0")
    run = workshop.run("zero3", settings=settings)
    assert [row["step"] for row in run.training_rows] == [1, 2]
    plan = json.loads(run.dir.plan.read_text())
    assert plan["size"]["counted"] == shapes.HOW
    assert plan["parameters"] == model_size({**QWEN2}).total
    assert (run.dir.export / "config.json").exists() and run.events[-1]["event"] == "end"


def test_every_known_type_states_its_shape():
    """The generated list: the common names lead to keys that exist, and none of the exact types is in it twice."""
    found = other_model_types()
    assert {"qwen2", "olmo2", "gemma", "gpt_neo", "gpt_neox"} <= set(found["types"])
    assert not set(EXACT) & (set(found["types"]) | set(found["refused"]))
    for name, entry in found["types"].items():
        assert set(entry["names"].values()) | set(entry["required"]) <= set(entry["properties"]), name
