"""The attention kernel: chosen by itself, said, the same numbers, and refused in one line where it is missing."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pretraining.data.documents import document_borders
from pretraining.model import attention
from pretraining.model.build import build_model
from tests.gear.finished_data import refusal
from tests.gear.runs import MODELS, REPOSITORY, TOKENIZER


@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_kernel_is_causal_attention(name, arguments):
    """The same logits as transformers' own eager attention, with its mask."""
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    chosen = build_model(MODELS[name], TOKENIZER, arguments).eval()
    eager = build_model({**MODELS[name], "attn_implementation": "eager"}, TOKENIZER, arguments).eval()
    assert chosen.config._attn_implementation == attention.SDPA_CAUSAL
    assert eager.config._attn_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(chosen(input_ids=ids).logits, eager(input_ids=ids).logits)


WINDOWS = {
    "mixtral": {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "head_dim": 16},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_the_recipe_is_looked_through(name, arguments):
    """The layers look no further back than the model section says, as eager attention with its mask."""
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    model = {**MODELS["llama"], "model_type": name, **WINDOWS[name]}
    chosen = build_model(model, TOKENIZER, arguments).eval()
    eager = build_model({**model, "attn_implementation": "eager"}, TOKENIZER, arguments).eval()
    whole = {key: value for key, value in model.items() if "sliding" not in key}
    with torch.no_grad():
        wanted = eager(input_ids=ids).logits
        torch.testing.assert_close(chosen(input_ids=ids).logits, wanted)
        without = build_model(whole, TOKENIZER, arguments).eval()(input_ids=ids).logits
        assert not torch.allclose(without, wanted, atol=1e-3)


def test_no_mask_is_built_under_compile(arguments):
    """With transformers' own sdpa it is, since torch 2.13 (huggingface/transformers#48925)."""
    model, seen = build_model(MODELS["gpt2"], TOKENIZER, arguments).eval(), []
    forward = torch.nn.functional.scaled_dot_product_attention

    def backend(graph, _inputs):
        calls = [node for node in graph.graph.nodes if node.target is forward]
        seen.extend((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")) for node in calls)
        return graph.forward

    ids = torch.randint(512, (2, 64))
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids)
    assert seen == [(None, True)] * 2


def test_an_export_does_not_name_the_kernel(arguments, tmp_path):
    """It must load where this repository is not."""
    model = build_model(MODELS["llama"], TOKENIZER, arguments)
    model.save_pretrained(tmp_path / "export")
    assert attention.SDPA_CAUSAL not in (tmp_path / "export" / "config.json").read_text()


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "no_such_attention"])
def test_a_missing_kernel_is_one_line(arguments, name):
    """Bad input: how to install it, and what there is without it."""
    message = refusal(build_model, {**MODELS["llama"], "attn_implementation": name}, TOKENIZER, arguments)
    assert name in message and "leave it out" in message


def test_the_log_says_which(arguments, capsys):
    """If there was a choice: on a GPU, if documents are kept apart, or if the recipe names it."""
    build_model(MODELS["llama"], TOKENIZER, arguments)
    assert capsys.readouterr().out == ""
    build_model({**MODELS["llama"], "attn_implementation": "eager"}, TOKENIZER, arguments)
    assert "attention: eager" in capsys.readouterr().out


GPUS = {"Ampere": (8, 0), "Hopper": (9, 0), "Blackwell": (10, 0)}


@pytest.mark.parametrize("name", GPUS)
def test_each_gpu_has_its_fastest_kernel(name, monkeypatch):
    """In 16 bit: torch's own, cuDNN's first on Hopper and Blackwell; the log says which, and what would be faster.

    What is installed is stood in for: there is no GPU here.
    """
    monkeypatch.setattr(attention.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention.torch.cuda, "get_device_capability", lambda: GPUS[name])
    monkeypatch.setattr(attention.torch.backends.cudnn, "version", lambda: 92000)
    bf16, fp32 = SimpleNamespace(bf16=True, fp16=False), SimpleNamespace(bf16=False, fp16=False)
    llama, hopper = {"model_type": "llama"}, name == "Hopper"
    for has_3 in (False, True):
        monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda has_3=has_3: has_3)
        assert attention.choose_attention(llama, bf16) == attention.SDPA_CAUSAL
        apart = attention.choose_attention(llama, bf16, masks_documents=True)
        assert apart == ("flash_attention_3" if hopper and has_3 else "torch_varlen")
        assert ("flash-attn-3" in attention.describe_attention(apart, True)) == (hopper and not has_3)
    assert attention.choose_attention(llama, fp32) == attention.SDPA_CAUSAL
    assert attention.choose_attention(llama, fp32, masks_documents=True) == "sdpa"
    assert attention.choose_attention({**llama, "attn_implementation": "eager"}, bf16) == "eager"
    said = attention.describe_attention(attention.SDPA_CAUSAL)
    assert ("cuDNN's first" in said) == (name != "Ampere")


def test_documents_reach_flash_attention_with_their_borders(monkeypatch):
    """One sequence a micro-batch: without the borders transformers would wait for the device in every layer."""
    from transformers import modeling_flash_attention_utils as flash

    def waits(*_):
        raise AssertionError("the positions were looked at")

    borders = []

    def kernel(query, key, value, cu_seqlens_q, **_):
        borders.append(cu_seqlens_q.tolist())
        return query

    monkeypatch.setattr(flash, "_is_packed_sequence", waits)
    loaded = ((None, kernel, None, None, None), (lambda **_: {}, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: loaded)
    heads = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    batch = document_borders(positions.numpy())
    given = {k: torch.from_numpy(v) if hasattr(v, "shape") else v for k, v in batch.items()}
    given |= {"is_causal": True, "position_ids": positions}
    flash._flash_attention_forward(heads, heads, heads, None, 8, **given)
    assert borders == [[0, 3, 8]]


def test_the_requirements_of_gpus_can_be_installed():
    """Bad input: flash-attn imports torch in its setup.py, so that pip would install none of the file's packages."""
    lines = (REPOSITORY / "requirements-gpu.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted and not [line for line in wanted if line.startswith("flash-attn")]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:"]
    finished = subprocess.run([*pip, *wanted], capture_output=True, text=True)
    if re.search("Connection|Retrying|Temporary failure", finished.stderr):
        pytest.skip("no package index can be reached")
    assert finished.returncode == 0, finished.stderr
