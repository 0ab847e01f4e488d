"""The kernels of a computation, counted on stand-in tensors: FLOPs of products, bytes that the others move, launches.

    with stand_in_tensors(), counting_compiler(), Kernels() as kernels:
        kernels.phase = "forward"
        loss = model(ids)
        kernels.phase = "backward"
        loss.backward()

Nothing is computed and nothing takes memory, so a model of any size is counted in seconds on any machine. What
torch.compile would run is counted as inductor's own scheduler fuses it; its kernels are not written.
DeepSpeed's engine is counted around a few layers, without other ranks: bytes it moves, waits it makes, what it sends.
"""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretraining.planning.step_time import ATTENTION_BACKWARD, CAUSAL
from tests.gear.runs import TOKENIZER

COMPILED = {"eager": "none", "compiled": "blocks"}
"""What `speed.compile` says, by what the plan calls it."""
WIDTH, DEPTH = 512, 8
"""Of the layers that the engine is counted with."""
PRODUCT, ATTENTION, OTHER = "product", "attention", "other"
NO_KERNEL = {"_unsafe_view", "_reshape_alias", "detach", "empty", "empty_like", "empty_strided", "new_empty"}
NO_KERNEL |= {"lift_fresh"}
"""Without data movement, though their schemas do not say that they are views."""
PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}
"""Where the left one of their two matrices stands among the arguments."""
LOOKUPS = {"embedding", "gather", "index", "index_select"}
"""Of their first tensor they read as many elements as they write."""
SCATTERS = {"index_put_", "scatter_", "scatter_add_", "index_add_"}
"""Of their first tensor they read and write as many elements as their last tensor has."""


@dataclass(frozen=True)
class Kernel:
    """One kind of kernel."""

    phase: str
    kind: str
    """PRODUCT, ATTENTION or OTHER."""
    name: str
    """ATen's name; of a compiled one, those of the operators in it."""


@dataclass
class Work:
    """What all launches of a kernel do together."""

    launches: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    """Read and written, each tensor once a launch."""

    def add(self, launches: int, flops: float, moved: float) -> None:
        """Add so many launches, which together do this."""
        self.launches += launches
        self.flops += flops
        self.bytes += moved


class Kernels(TorchDispatchMode):
    """Every kernel that is launched while it is entered, by phase: `work[Kernel] -> Work`."""

    def __init__(self):
        super().__init__()
        self.phase = ""
        self.work: dict[Kernel, Work] = {}
        self.compiled_depth = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile goes on under it."""
        return True

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        name = function._overloadpacket.__name__
        if function.namespace in ("prim", "c10d"):
            return result  # asks for a tensor's property, or sends it
        if name in ATTENTION_FLOPS:
            moved = _bytes_of(tree_leaves((arguments, result)))
            self.add(ATTENTION, name, ATTENTION_FLOPS[name](*arguments), moved)
        elif name in PRODUCTS:
            left, right = (each for each in arguments[PRODUCTS[name] : PRODUCTS[name] + 2])
            flops = 2 * left.numel() * right.shape[-1]  # in a grouped one each token meets one expert
            self.add(PRODUCT, name, flops, _moved(function, arguments, keywords, result))
        elif not self.compiled_depth and not _is_view(function, name):
            self.add(OTHER, name, 0, _moved(function, arguments, keywords, result))
        return result

    def add(self, kind: str, name: str, flops: float, moved: float) -> None:
        """Count one launch in the current phase."""
        self.work.setdefault(Kernel(self.phase, kind, name), Work()).add(1, flops, moved)

    def sum(self, phase: str | None = None, kind: str | None = None) -> Work:
        """All of a phase and kind; None stands for every one."""
        total = Work()
        for kernel, work in self.work.items():
            if phase in (None, kernel.phase) and kind in (None, kernel.kind):
                total.add(work.launches, work.flops, work.bytes)
        return total


def _is_view(function, name: str) -> bool:
    schema = function._schema
    aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    does_nothing = not schema.returns and not schema.is_mutable
    return aliases or does_nothing or name in NO_KERNEL


def _moved(function, arguments, keywords, result) -> float:
    """Bytes of one launch: what is read, and what is written."""
    name = function._overloadpacket.__name__
    given = dict(zip((each.name for each in function._schema.arguments), arguments, strict=False)) | keywords
    read, written = [], []
    for each in function._schema.arguments:
        tensors = [t for t in tree_leaves(given.get(each.name)) if isinstance(t, torch.Tensor)]
        writes = each.alias_info is not None and each.alias_info.is_write
        overwritten = writes and (each.kwarg_only or name in ("copy_", "fill_", "zero_"))
        written += tensors * writes
        read += [] if overwritten else tensors
    if not any(each.alias_info is not None for each in function._schema.returns):
        written += [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    if name in LOOKUPS:
        return _bytes_of(read[1:]) + 2 * _bytes_of(written)
    if name in SCATTERS:
        return _bytes_of(read[1:]) + 2 * _bytes_of(read[-1:])
    return _bytes_of(read) + _bytes_of(written)


def _bytes_of(tensors) -> float:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


@contextlib.contextmanager
def stand_in_tensors() -> Iterator[FakeTensorMode]:
    """Tensors without storage, and torch's attention as one kernel that knows of the causal mask."""
    attention = mock.patch.object(F, "scaled_dot_product_attention", _attention)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, attention:
        yield mode


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    assert attn_mask is None, "a mask of one's own is not counted"
    return torch.ops.stand_in.attention(query, key, value).transpose(1, 2)


@torch.library.custom_op("stand_in::attention", mutates_args=())
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _attended(query, key, value)


@_attend.register_fake
def _attended(query, key, value):
    """[batch, length, heads, width], as the flash kernels lay it out."""
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


@torch.library.custom_op("stand_in::attention_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(gradient, query, key, value, attended)


@_attend_backward.register_fake
def _gradients(gradient, query, key, value, attended):
    """Laid out as the flash kernels lay them out: [batch, length, heads, width], seen transposed."""
    return tuple(
        each.new_empty(each.shape[0], each.shape[2], each.shape[1], each.shape[3]).transpose(1, 2)
        for each in (query, key, value)
    )


_attend.register_autograd(
    lambda ctx, gradient: _attend_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def _score_flops(query, key, value) -> float:
    """Scores and their product with the values, of the half that a causal mask leaves."""
    batch, heads, length, width = query.shape
    return CAUSAL * 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


ATTENTION_FLOPS = {
    "attention": _score_flops,
    "attention_backward": lambda gradient, query, key, value, attended: (
        ATTENTION_BACKWARD * _score_flops(query, key, value)
    ),
}


@contextlib.contextmanager
def counting_compiler(kernels: Kernels) -> Iterator[None]:
    """Let torch.compile count instead of compile: whatever inductor would fuse is one kernel of `kernels`."""
    counting = partial(compile_fx.compile_fx, inner_compile=partial(_count_graph, kernels))
    torch._dynamo.reset()
    with (
        mock.patch.object(compile_fx, "compile_fx", counting),
        # sizes are those of each call: a graph for all of them would be counted with those of the first
        mock.patch.object(torch._dynamo, "mark_dynamic", lambda tensor, index: None),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
    ):
        yield
    torch._dynamo.reset()


def _count_graph(kernels: Kernels, graph_module, example_inputs, **_):
    """Schedule a graph as inductor does; the function that is returned counts its kernels at every call."""
    compile_fx.view_to_reshape(graph_module)
    compile_fx.record_original_output_strides(graph_module)
    fake_mode = detect_fake_mode(example_inputs)
    with V.set_fake_mode(fake_mode), DebugContext():
        compile_fx._recursive_post_grad_passes(graph_module, is_inference=False)
        lowered = GraphLowering(graph_module, example_inputs=example_inputs)
        with V.set_graph_handler(lowered):
            lowered.run(*example_inputs)
            lowered._update_scheduler()
            fused = Counter()
            for node in lowered.scheduler.nodes:
                if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                    fused[_operators_of(node), node.get_read_write_buffers_sizes()] += 1

    def run(*arguments):
        for (name, moved), launches in fused.items():
            for _ in range(launches):
                kernels.add(OTHER, name, 0, moved)
        kernels.compiled_depth += 1  # its products are counted one by one, as they are
        try:
            return graph_module.forward(*arguments)
        finally:
            kernels.compiled_depth -= 1

    return make_boxed_func(run)


def _operators_of(node) -> str:
    """Names of the operators that a fused kernel holds, the first three."""
    names = []
    for part in node.get_nodes():
        for origin in part.node.origins if part.node is not None else ():
            packet = getattr(origin.target, "_overloadpacket", None)
            name = packet.__name__ if packet else str(origin.target)
            names += [name] * (name not in names)
    return "fused " + " ".join(sorted(names)[:3])


@contextlib.contextmanager
def counted_model(section: dict, compiles: str, ranks: int = 1) -> Iterator[tuple]:
    """(the model on stand-in tensors in bf16, the Kernels that count it), compiled as a run's would be.

    ranks: that split its experts, which are chosen equally often; a process group of these is there.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from pretraining.model import cross_entropy
    from pretraining.model.attention import SDPA_CAUSAL
    from pretraining.model.build import build_config, compile_model
    from pretraining.model.parallel import split_experts
    from pretraining.recipe.sections import Speed
    from pretraining.rehearsal.rank import choose_evenly

    AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    kernels = Kernels()
    as_on_gpu = mock.patch.object(cross_entropy, "_adds_in_fp32", lambda device: True)
    with stand_in_tensors(), counting_compiler(kernels), as_on_gpu:
        cross_entropy._can_compile.cache_clear()
        cross_entropy._compiled.cache_clear()
        config = build_config({**section, "attn_implementation": SDPA_CAUSAL}, TOKENIZER)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.loss_type = None
        if ranks > 1:
            split_experts(model, ranks)
            choose_evenly(model)
        compile_model(model, Speed(compile=compiles))
        yield model, kernels


def counted(run, kernels):
    """`kernels` of a second call; the first one compiles, which asks for kernels of its own."""
    run()
    kernels.work.clear()
    with kernels:
        run()
    return kernels


def count_engine(ds_config: dict | None, world_size: int) -> dict[str, float]:
    """Bytes for each parameter that DeepSpeed's engine moves on one of `world_size` ranks: a micro-batch, a step.

    A small stack of layers is trained for real. The process group answers at once and sends nothing.
    """
    join_nobody(world_size)
    engine, parameters = initialised_engine(ds_config, "cpu"), DEPTH * WIDTH**2
    kernels, phases = Kernels(), ("first", "second", "last", "step")
    for _ in range(3):  # the first two steps make buffers
        kernels.work.clear()
        with kernels:
            list(train_step(engine, kernels, phases))
    moved = {phase: kernels.sum(phase, OTHER).bytes / parameters for phase in phases}
    micro_batch = moved["second"]
    return {"micro-batch": micro_batch, "step": sum(moved.values()) - 3 * micro_batch}


def join_nobody(world_size: int) -> None:
    """Be one of so many ranks, whose messages are answered at once and move nothing."""
    import deepspeed

    from pretraining.upstream.deepspeed import leave_out_shared_memory

    leave_out_shared_memory()
    name_ranks(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    deepspeed.init_distributed("fake", dist_init_required=False)


def train_step(engine, kernels, phases: tuple[str, ...]) -> Iterator[str]:
    """One optimizer step; `phases` name its micro-batches, and last the step itself. Yields each when it is over."""
    batch = torch.zeros(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    *micro_batches, step = phases
    for phase in micro_batches:
        kernels.phase = phase
        loss = engine(batch).float().sum()
        engine.set_gradient_accumulation_boundary(phase == micro_batches[-1])
        engine.backward(loss)
        yield phase
    kernels.phase = step
    engine.step()
    yield step


def name_ranks(world_size: int) -> None:
    """Set what a launcher tells a rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_SIZE=str(world_size), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def initialised_engine(ds_config: dict | None, device: str):
    """DeepSpeed's engine as a run configures it, around a stack of linear layers."""
    import deepspeed

    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import engine_config
    from pretraining.upstream.deepspeed import leave_out_shared_memory

    leave_out_shared_memory()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = without_auto(engine_config(load_recipe("features/gpt2", ["training.bf16=true"]), ds_config))
    config |= {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
    }
    config["bf16"] = {**config.get("bf16", {}), "enabled": "torch_autocast" not in config}
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    stack = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
    layers = torch.nn.Sequential(*stack).to(device, dtype)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    return deepspeed.initialize(model=layers, optimizer=optimizer, config=config)[0]


def count_waits(ds_config: dict | None, world_size: int) -> dict:
    """How often the host waits for the device in DeepSpeed's engine, and what a step sends, on a GPU that is none."""
    from pretraining.upstream.deepspeed import keep_norm_at_stage_0, mend_optimizer
    from tests.gear.watched_gpu import watched_gpu

    name_ranks(world_size)
    with watched_gpu(world_size) as machine:
        engine = initialised_engine(ds_config, "cuda")
        keep_norm_at_stage_0(engine, lambda norm: None)
        mend_optimizer(engine.optimizer)
        counted_phases = SimpleNamespace(phase="")
        waits: dict[str, int] = {}
        for _ in range(3):
            waits.clear()
            machine.synchronisations.clear()
            machine.collectives.clear()
            for phase in train_step(engine, counted_phases, ("first", "second", "last", "step")):
                waits[phase] = len(machine.synchronisations)
        engine.destroy()
    passes = waits["second"] - waits["first"]
    sent = dict(Counter(collective.name for collective in machine.collectives))
    return {"a micro-batch": passes, "a step": waits["step"] - 3 * passes, "collectives a step": sent}


def without_auto(config: dict) -> dict:
    """The ds_config without the values that the Trainer fills in, and without offloading, which is no kernel."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto" and not key.startswith("offload_")
    }
