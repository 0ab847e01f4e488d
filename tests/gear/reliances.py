"""List every private or patched name of a library that this package relies on: what an upgrade can break.

No module outside upstream/ uses such a name, and upstream/ uses none that is not in this table. test_upstream.py
checks both, and that the installed library has each name, with these parameters. The modules give the details.
"""

from collections.abc import Iterator
from typing import NamedTuple

VERSIONS = {
    "accelerate": "1.15.0",
    "py-cpuinfo": "9.0.0",
    "deepspeed": "0.19.8",
    "lm_eval": "0.4.13",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}
"""Package -> the version with which its names were checked; requirements*.txt pin the same."""


class Reliance(NamedTuple):
    """One name of a library."""

    name: str
    """Dotted. An attribute of instances is named after the class or function that sets it."""
    parameters: str | None
    """The parameters of a function, in order; None if it is no function, or if it is written in C."""
    used_by: str
    """The module of upstream/."""
    why: str
    test: str
    """The file in tests/ that fails if the name means something else; test_upstream.py if no other does."""
    until: str
    """When it may be removed."""

    @property
    def package(self) -> str:
        """The package that pip installs."""
        library = self.name.partition(".")[0]
        return {"cpuinfo": "py-cpuinfo"}.get(library, library)


class _Purpose(NamedTuple):
    """The purpose of several names."""

    used_by: str
    why: str
    test: str
    until: str
    names: tuple[str, ...]
    """A function with its parameters, as "torch.f(a, b)"."""


def reliances() -> Iterator[Reliance]:
    """Yield an entry for each name."""
    for used_by, why, test, until, names in _PURPOSES:
        for each in names:
            # "torch.f(a, b)" is a function; a name without a bracket is none.
            name, is_function, parameters = each.partition("(")
            yield Reliance(name, parameters.rstrip(")") if is_function else None, used_by, why, test, until)


_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
_INIT = "deepspeed.runtime.zero.partition_parameters.Init"
_PARTITION = "deepspeed.utils.tensor_fragment.tensor_fragment"

_PURPOSES = (
    _Purpose(
        "transformers",
        why="the norm before clipping, which monitors judge every step by",
        test="test_stability.py",
        until="a public method or callback gets the norm",
        names=("transformers.Trainer._get_grad_norm(self, model, grad_norm)",),
    ),
    _Purpose(
        "transformers",
        why="masked documents: ranks hold different numbers of targets",
        test="test_one_loss.py",
        until="the count is a public method",
        names=("transformers.Trainer._get_num_items_in_batch(self, batch_samples, device)",),
    ),
    _Purpose(
        "transformers",
        why="checkpoints are ours, and are loaded into prepared objects",
        test="test_checkpoints.py",
        until="saving and loading have public methods to override",
        names=(
            "transformers.Trainer._prepare_for_training(self, max_steps, train_dataloader, "
            "resume_from_checkpoint)",
            "transformers.Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)",
            "transformers.Trainer._load_rng_state(self, checkpoint)",
            "transformers.Trainer._save_checkpoint(self, model, trial)",
        ),
    ),
    _Purpose(
        "transformers",
        why="a run that early stopping had left is not trained on",
        test="test_early_stopping.py",
        until="a resumed run looks at control before its first step",
        names=(
            "transformers.Trainer._run_epoch(self, model, epoch, train_dataloader, steps_in_epoch,"
            " num_update_steps_per_epoch, trial, ignore_keys_for_eval, start_time, "
            "resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)",
        ),
    ),
    _Purpose(
        "transformers",
        why="the running loss and its steps go into checkpoints; one NaN would stay in it for ever",
        test="test_nothing_lost.py",
        until="TrainerState holds them",
        names=(
            "transformers.Trainer._tr_loss",
            "transformers.Trainer._globalstep_last_logged",
        ),
    ),
    _Purpose(
        "transformers",
        why="a validation at the resumed step has nothing to save",
        test="test_nothing_lost.py",
        until="TrainerState holds it",
        names=("transformers.Trainer._initial_global_step",),
    ),
    _Purpose(
        "transformers",
        why="trackers would put train/ before every name",
        test="test_trackers.py",
        until="the names are a setting",
        names=("transformers.integrations.integration_utils.rewrite_logs(d)",),
    ),
    _Purpose(
        "transformers",
        why="initial weights that do not depend on the stage",
        test="test_model.py",
        until="transformers draws alike at every stage",
        names=(
            "transformers.PreTrainedModel._init_weights(self, module)",
            "transformers.modeling_utils._is_hf_initialized",
        ),
    ),
    _Purpose(
        "transformers",
        why="shows what a rule of drawing does to parameters",
        test="test_other_models.py",
        until="the rule goes",
        names=(
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.tree_leaves(tree, is_leaf)",
            "torch.UntypedStorage._cdata",
            "torch._ops.OpOverload._schema",
        ),
    ),
    _Purpose(
        "transformers",
        why="says which attention a model chose by itself",
        test="test_attention.py",
        until="the config says it in public",
        names=("transformers.PretrainedConfig._attn_implementation",),
    ),
    _Purpose(
        "transformers",
        why="saved names and layouts, translated when weights are loaded slice by slice",
        test="test_given_weights.py",
        until="from_pretrained can load slices",
        names=(
            "transformers.conversion_mapping.get_model_conversion_mapping(model, key_mapping, hf_quantizer, "
            "add_legacy)",
            "transformers.core_model_loading.rename_source_key(source_key, weight_renamings, "
            "weight_converters, base_model_prefix, meta_state_dict, reverse)",
            "transformers.core_model_loading.dot_natural_key(s)",
            "transformers.core_model_loading.WeightRenaming",
            "transformers.core_model_loading.WeightConverter.add_tensor(self, target_key, source_key, "
            "source_pattern, future)",
            "transformers.core_model_loading.WeightConverter.convert(self, layer_name, model, config, "
            "hf_quantizer, loading_info)",
            "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
        ),
    ),
    _Purpose(
        "transformers",
        why="buffers that belong to the state, without gathering parameters as state_dict would",
        test="test_upstream.py",
        until="named_buffers can leave the others out",
        names=("torch.nn.Module._non_persistent_buffers_set",),
    ),
    _Purpose(
        "transformers",
        why="says if ZeRO-3 has a parameter in shards",
        test="test_model.py",
        until="DeepSpeed has a function that says it",
        names=(f"{_INIT}.ds_id",),
    ),
    _Purpose(
        "deepspeed",
        why="building under ZeRO-3 would draw all weights once more",
        test="test_model.py",
        until="no_init_weights counts under ZeRO-3 too",
        names=("transformers.integrations.deepspeed.initialize_weights_zero3(model)",),
    ),
    _Purpose(
        "deepspeed",
        why="where each parameter lies in the flat partitions of stages 1 and 2",
        test="test_muon.py",
        until="DeepSpeed says it in public",
        names=(
            "deepspeed.utils.mixed_precision_linkage.link_hp_params._hp_mapping",
            f"{_PARTITION}.lp_fragment_address",
            f"{_PARTITION}.hp_fragment_address",
            f"{_STAGE_1_AND_2}.single_partition_of_fp32_groups",
            f"{_STAGE_1_AND_2}.bit16_groups",
            f"{_BF16}.fp32_groups_flat_partition",
            f"{_BF16}.bf16_groups",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="where each parameter lies in the sub-groups of stage 3",
        test="test_reshard.py",
        until="DeepSpeed says it in public",
        names=(
            f"{_STAGE_3}.fp16_groups",
            f"{_STAGE_3}.fp32_partitioned_groups_flat",
            f"{_STAGE_3}.sub_group_to_group_id",
            f"{_STAGE_3}.subgroup_to_device",
            f"{_STAGE_3}.offload_optimizer",
            f"{_STAGE_3}.backup_optimizer",
            f"{_INIT}.ds_tensor",
            f"{_INIT}.ds_numel",
            f"{_INIT}.ds_shape",
            f"{_INIT}.ds_process_group",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="which part of a parameter AutoTP leaves to a rank, and which ranks have the same elements",
        test="test_tensor_parallel.py",
        until="DeepSpeed says it in public",
        names=(
            "deepspeed.checkpoint.constants.DS_AUTOTP_UC_META",
            "deepspeed.utils.groups._get_model_parallel_world_size()",
            "deepspeed.utils.groups.get_tensor_model_parallel_rank()",
        ),
    ),
    _Purpose(
        "autotp",
        why="AutoTP notes on rows of embedding and head what it notes on parts of matrices",
        test="test_vocabulary_parallel.py",
        until="vocab_parallel_lm_head leaves the loss to its user",
        names=(
            "deepspeed.module_inject.layers.LinearLayer(module, mp_group, skip_partition, gather_output, kwargs)",
            "deepspeed.module_inject.layers.LinearLayer._mark_uc_metadata(self)",
            "deepspeed.module_inject.layers.TensorParallel_Layer._partition_sizes",
            "deepspeed.utils.groups._init_tp_mesh_device(tensor_model_parallel_size, data_parallel_size)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="a checkpoint reads and sets states that are on NVMe",
        test="test_nvme.py",
        until="DeepSpeed has a public way into a swapped sub-group",
        names=(
            f"{_STAGE_3}._swappable_optimizer_subgroup(self, sub_group_id)",
            f"{_STAGE_3}._optimizer_states_and_gradient_swap_in(self, sub_group_id, timer_names)",
            f"{_STAGE_3}._optimizer_states_and_gradient_swap_out(self, sub_group_id, timer_names)",
            f"{_STAGE_3}._release_swap_buffers(self, sub_group_id)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="weights are set from masters after a checkpoint was loaded into these",
        test="test_reshard.py",
        until="DeepSpeed has a public way to set them",
        names=(
            f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters(args, kwargs)",
            f"{_STAGE_3}.checkpoint_event_prologue(self)",
            f"{_STAGE_3}.checkpoint_event_epilogue(self)",
            f"{_STAGE_1_AND_2}.update_lp_params(self)",
            f"{_BF16}.update_lp_params(self)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="the device is asked up to four times a step for one norm",
        test="test_fake_gpu.py",
        until="its test passes without it",
        names=(
            "deepspeed.runtime.bf16_optimizer.get_global_norm_of_tensors(input_tensors, norm_type,"
            " mpu, moe_ep_group)",
            "deepspeed.runtime.utils.get_global_norm_of_tensors(input_tensors, norm_type, mpu, moe_ep_group)",
            "deepspeed.runtime.zero.stage3.combine_grad_norm_groups(norm_groups, norm_type)",
            "deepspeed.runtime.utils.combine_grad_norm_groups(norm_groups, norm_type)",
            "deepspeed.runtime.utils.clip_grad_norm_(parameters, max_norm, norm_type, mpu)",
            f"{_STAGE_3}._get_norm_groups(args, kwargs)",
            f"{_STAGE_1_AND_2}.scaled_global_norm(self, norm_type)",
            f"{_STAGE_1_AND_2}.check_overflow(self, partition_gradients)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="each gradient is copied in fp32 before it is added to its sum",
        test="test_fake_gpu.py",
        until="its test passes without it",
        names=(
            f"{_BF16}._update_hp_grad(self, lp, group_idx, param_idx, clear_lp_grads)",
            f"{_STAGE_3}.partition_grads(args, kwargs)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="at stage 3 the host waits for the reductions of every micro-batch, and nothing else orders "
        "a step's writes before the next gather",
        test="test_stream_order.py",
        until="DeepSpeed's streams wait for each other",
        names=(
            f"{_STAGE_3}.reduce_and_partition_stream",
            "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._DeepSpeedZeRoOffload__allgather_stream",
            f"{_STAGE_3}._post_step(args, kwargs)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="at stage 0 the norm is computed for clipping and dropped (deepspeedai/DeepSpeed#7255)",
        test="test_curve.py",
        until="the issue is closed",
        names=(
            "deepspeed.DeepSpeedEngine.clip_fp32_gradients(self)",
            "deepspeed.DeepSpeedEngine._global_grad_norm",
        ),
    ),
    _Purpose(
        "experts",
        why="of ranks that hold different experts, DeepSpeed knows in layers of its own alone",
        test="test_expert_parallel.py",
        until="DeepSpeed can be told in public which ranks have copies of a parameter",
        names=(
            "deepspeed.utils.groups._create_expert_and_data_parallel(expert_parallel_size_, mp_size, pp_size, mp_mode,"
            " use_data_before_expert_parallel_, folding_spec)",
            "deepspeed.utils.groups._get_expert_parallel_group(group_name)",
            "deepspeed.utils.groups._get_expert_parallel_group_dict()",
            "deepspeed.utils.groups._get_expert_data_parallel_group(group_name)",
            "deepspeed.DeepSpeedEngine._configure_distributed_model(self, model)",
            "deepspeed.DeepSpeedEngine.has_moe_layers",
            "deepspeed.DeepSpeedEngine.ds_zero_partition_process_group",
            f"{_INIT}.convert_to_zero_parameters",
            *(
                f"deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer.{name}"
                for name in (
                    "allreduce",
                    "group_name",
                    "ds_zero_placement_family",
                    "ds_zero_partition_group_name",
                )
            ),
        ),
    ),
    _Purpose(
        "deepspeed",
        why="with round_robin_gradients the map from parameters to slices is wrong",
        test="test_muon.py",
        until="its test passes without it",
        names=(
            "deepspeed.utils.link_hp_params(lp_param_list, flat_hp_partition, gradient_dict, "
            "offload_gradient_dict, use_offload, param_group_index, partition_start, "
            "partition_size, dp_group, param_offsets)",
            f"{_STAGE_1_AND_2}.round_robin_gradients",
            f"{_STAGE_1_AND_2}.round_robin_bit16_groups",
            f"{_STAGE_1_AND_2}.round_robin_bit16_offsets",
            f"{_STAGE_1_AND_2}.real_dp_process_group",
            f"{_STAGE_1_AND_2}.bit16_groups_flat",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="with offload the sums of a refused step stay, and every later step is refused",
        test="test_stability.py",
        until="its test passes without it",
        names=(
            f"{_STAGE_1_AND_2}.averaged_gradients",
            f"{_STAGE_1_AND_2}.offload_gradient_dict",
            f"{_STAGE_1_AND_2}.cpu_offload",
        ),
    ),
    _Purpose(
        "torch",
        why="sets the rates of the current step",
        test="test_optimizer_states.py",
        until="a scheduler has a function for it",
        names=("torch.optim.lr_scheduler.LRScheduler._last_lr",),
    ),
    _Purpose(
        "torch",
        why="norms of layers are measured before another hook clips",
        test="test_gradient_monitors.py",
        until="register_step_pre_hook can put a hook first",
        names=("torch.optim.Optimizer._optimizer_step_pre_hooks",),
    ),
    _Purpose(
        "torch",
        why="operators are compiled once for each environment, and loaded afterwards",
        test="test_operators.py",
        until="torch keeps builds of several environments apart",
        names=(
            "torch.utils.cpp_extension.load(name, sources, extra_cflags, extra_cuda_cflags, "
            "extra_sycl_cflags, extra_ldflags, extra_include_paths, build_directory, verbose, "
            "with_cuda, with_sycl, is_python_module, is_standalone, keep_intermediates)",
            "torch.utils.cpp_extension._import_module_from_library(module_name, path, is_python_module)",
            "torch.utils.cpp_extension._get_build_directory(name, verbose)",
        ),
    ),
    _Purpose(
        "torch",
        why="DeepSpeed asks for the processor's features for every operator, a second each",
        test="test_upstream.py",
        until="DeepSpeed or py-cpuinfo remembers them",
        names=("cpuinfo.get_cpu_info()",),
    ),
    _Purpose(
        "torch",
        why="the history of allocations on a GPU",
        test="test_upstream.py",
        until="the functions have public names",
        names=(
            "torch.cuda.memory._record_memory_history(enabled, context, stacks, max_entries, "
            "device, clear_history, compile_context, global_record_annotations, skip_actions)",
            "torch.cuda.memory._dump_snapshot(filename, augment_with_fx_traces)",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="DeepSpeed makes a group without the limit that a run wants",
        test="test_launchers.py",
        until="DeepSpeed hands its own limit on",
        names=(
            "torch.distributed.distributed_c10d.default_pg_timeout",
            "torch.distributed.distributed_c10d.default_pg_nccl_timeout",
        ),
    ),
    _Purpose(
        "deepspeed",
        why="reductions through shared memory would be compiled, unused, in every run",
        test="test_ranks_apart.py",
        until="they are compiled at their first use",
        names=("deepspeed.ops.__getattr__.__compatible_ops__",),
    ),
    _Purpose(
        "torch",
        why="torch finds a missing compiler only in the first pass",
        test="test_compiling.py",
        until="torch has a public check",
        names=(
            "torch.utils._triton.has_triton",
            "torch._inductor",
        ),
    ),
    _Purpose(
        "torch",
        why="up to 32 compiling processes on every rank",
        test="test_compiling.py",
        until="torch counts the ranks of a machine",
        names=("torch._inductor.config.compile_threads",),
    ),
    _Purpose(
        "torch",
        why="a backward pass that cannot be compiled has to fail in the first call",
        test="test_compiling.py",
        until="torch has a public option",
        names=("torch._functorch.config.force_non_lazy_backward_lowering",),
    ),
    _Purpose(
        "torch",
        why="each number of documents or tokens would be a graph",
        test="test_compiling.py",
        until="torch.compiler has them",
        names=(
            "torch._dynamo.maybe_mark_dynamic(t, index)",
            "torch._dynamo.mark_dynamic(t, index, hint_override, min, max, specialize_on)",
        ),
    ),
    _Purpose(
        "torchrun",
        why="a rendezvous that is over turns away everyone who comes again",
        test="test_meeting_point.py",
        until="a closed rendezvous can be opened again",
        names=(
            "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.C10dRendezvousBackend._NULL_SENTINEL",
        ),
    ),
    _Purpose(
        "lm_eval",
        why="each rank shows a bar while it builds requests",
        test="test_upstream.py",
        until="lm-eval shows bars on rank 0 alone",
        names=("lm_eval.api.task.tqdm",),
    ),
    _Purpose(
        "fake_gpu",
        why="torch starts CUDA at the first call",
        test="test_fake_gpu.py",
        until="torch can pretend to have a GPU",
        names=("torch.cuda._lazy_init()",),
    ),
    _Purpose(
        "fake_gpu",
        why="a GPU that is none: tensors without numbers",
        test="test_fake_gpu.py",
        until="torch can pretend to have a GPU",
        names=(
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.arg_tree_leaves(args, kwargs)",
            "torch.utils._pytree.tree_map_only(type_or_types_or_pred, func, tree, is_leaf)",
            "torch._ops.OpOverload._schema",
            "torch._C._get_accelerator",
            "torch._C._accelerator_getAccelerator",
            "torch._C._set_only_lift_cpu_tensors",
            "torch.autograd._engine_run_backward(t_outputs, args, kwargs)",
        ),
    ),
    _Purpose(
        "wide_weights",
        why="embeddings and head in fp32 beside 16-bit layers",
        test="test_wide_weights.py",
        until="data_types.keep_in_fp32_modules counts for weights",
        names=(
            "deepspeed.DeepSpeedEngine._cast_module_mixed_precision(self, param_dtype, buffer_dtype, "
            "is_zero_init_model, keep_pattern)",
            "deepspeed.runtime.zero.stage3.defragment(tensors)",
            f"{_STAGE_3}._set_fp16_partitioned_groups_flat(self)",
            f"{_STAGE_3}.lp_param_buffer",
            f"{_STAGE_3}.fp16_partitioned_groups_flat",
        ),
    ),
    _Purpose(
        "torch",
        why="what a selectively recomputed layer keeps",
        test="test_planning_sizes.py",
        until="torch has a policy of its own for products and attention",
        names=(
            "torch.ops.aten._scaled_mm",
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
            "torch.ops.aten._scaled_dot_product_cudnn_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        ),
    ),
    _Purpose(
        "fake_gpu",
        why="operations that the stand-in answers itself",
        test="test_fake_gpu.py",
        until="torch can pretend to have a GPU",
        names=(
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
            "torch.ops.aten._to_copy",
            "torch.ops.aten._local_scalar_dense",
            "torch.ops.aten._index_put_impl_",
        ),
    ),
    _Purpose(
        "fake_gpu",
        why="libraries remember the machine that they found",
        test="test_fake_gpu.py",
        until="torch can pretend to have a GPU",
        names=(
            "accelerate.state.PartialState._shared_state",
            "accelerate.state.AcceleratorState._shared_state",
            "accelerate.state.GradientState._shared_state",
            "deepspeed.accelerator.real_accelerator.ds_accelerator",
        ),
    ),
    _Purpose(
        "fake_ranks",
        why="ZeRO-3 cuts a tensor into a piece for each rank, and compares lists with rank 0",
        test="test_rehearsal.py",
        until="DeepSpeed gathers and scatters without a loop over ranks",
        names=(
            "deepspeed.runtime.zero.partition_parameters.AllGatherCoalescedHandle.wait(args, kwargs)",
            "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus",
            "deepspeed.runtime.zero.stage3.reduce_scatter_coalesced(args, kwargs)",
            "deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks(args, kwargs)",
            "deepspeed.runtime.zero.utils.get_lst_from_rank0(lst)",
            "torch._subclasses.fake_tensor.FakeTensor",
        ),
    ),
    _Purpose(
        "fake_ranks",
        why="a process group whose other ranks do not exist",
        test="test_fake_gpu.py",
        until="torch's own fake process group records what it is asked",
        names=(
            "torch.distributed.ProcessGroup._get_backend",
            "torch.distributed.ProcessGroup._device_types",
            "torch.distributed.ProcessGroup._set_sequence_number_for_group",
            "torch.distributed.ProcessGroup._set_group_name",
            "torch.distributed.ProcessGroup._start_coalescing",
            "torch.distributed.ProcessGroup._end_coalescing",
            "torch.distributed.ProcessGroup._allgather_base",
            "torch.distributed.ProcessGroup._reduce_scatter_base",
            "torch._C._distributed_c10d.FakeWork",
            "torch.distributed.distributed_c10d._get_default_group()",
            "torch.utils._pytree.tree_leaves(tree, is_leaf)",
        ),
    ),
)
