"""List every private or patched name of a library that this package relies on: what an upgrade can break.

No module outside upstream/ uses such a name, and upstream/ uses none that is not in this table. test_upstream.py
checks both, and that the installed library has each name, with these parameters. Each module of upstream/ says
in its head or at the function what it needs the names for, and when each may go.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

VERSIONS = {
    "accelerate": "1.15.0",
    "py-cpuinfo": "9.0.0",
    "deepspeed": "0.19.8",
    "lm_eval": "0.4.13",
    "torch": "2.15.0",
    "torchao": "0.18.0",
    "transformers": "5.24.0",
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
    test: str
    """The file in tests/ that fails if the name means something else; test_upstream.py if no other does."""

    @property
    def package(self) -> str:
        """The package that pip installs."""
        library = self.name.partition(".")[0]
        return {"cpuinfo": "py-cpuinfo"}.get(library, library)


def reliances() -> Iterator[Reliance]:
    """Yield an entry for each name."""
    used_by = test = ""
    # a line that is further to the right continues the one above
    for line in re.sub(r"\n {8}", "", _TABLE).splitlines():
        if not line.startswith(" "):
            used_by, test = line.split()
            continue
        name, is_function, parameters = line.strip().partition("(")
        first, _, rest = name.partition(".")
        parameters = ", ".join(parameters.rstrip(")").replace(",", " ").split())
        name = f"{_SHORT.get(first, first)}.{rest}"
        yield Reliance(name, parameters if is_function else None, used_by, test)


_SHORT = {
    "STAGE_1_AND_2": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "STAGE_3": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "BF16": "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
    "INIT": "deepspeed.runtime.zero.partition_parameters.Init",
}

_TABLE = """\
transformers test_stability.py
    transformers.Trainer._get_grad_norm(self, model, grad_norm)
transformers test_one_loss.py
    transformers.Trainer._get_num_items_in_batch(self, batch_samples, device)
transformers test_checkpoints.py
    transformers.Trainer._prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint)
    transformers.Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)
    transformers.Trainer._load_rng_state(self, checkpoint)
    transformers.Trainer._save_checkpoint(self, model, trial)
transformers test_schedules.py
    transformers.Trainer._evaluate(self, trial, ignore_keys_for_eval, skip_scheduler)
transformers test_stopping.py
    transformers.Trainer._run_epoch(self, model, epoch, train_dataloader, steps_in_epoch,
        num_update_steps_per_epoch, trial, ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained,
        steps_trained_in_current_epoch)
transformers test_nothing_lost.py
    transformers.Trainer._tr_loss
    transformers.Trainer._globalstep_last_logged
    transformers.Trainer._initial_global_step
transformers test_trackers.py
    transformers.integrations.integration_utils.rewrite_logs(d)
transformers test_model.py
    transformers.PreTrainedModel._init_weights(self, module)
    transformers.modeling_utils._is_hf_initialized
    INIT.ds_id
transformers test_other_models.py
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._pytree.tree_leaves(tree, is_leaf)
    torch.UntypedStorage._cdata
    torch._ops.OpOverload._schema
transformers test_attention.py
    transformers.PretrainedConfig._attn_implementation
transformers test_model_types.py
    transformers.masking_utils.create_causal_mask
    transformers.masking_utils.create_sliding_window_causal_mask
    transformers.masking_utils.create_chunked_causal_mask
transformers test_balance.py
    transformers.integrations.use_experts_implementation._is_expert_parallel
    transformers.PreTrainedModel._keep_in_fp32_modules_strict
transformers test_compiling.py
    transformers.PreTrainedModel._set_gradient_checkpointing._gradient_checkpointing_func
    transformers.utils.output_capturing.install_output_capuring_hook(module, key, index, capture_initial_hidden_state)
    torch.nn.Module._forward_hooks
transformers test_layouts.py
    transformers.PreTrainedConfig._experts_implementation
    transformers.integrations.moe._grouped_linear(input, weight, offs, bias, is_transposed)
    transformers.integrations.use_experts_implementation._apply_gate
transformers test_given_weights.py
    transformers.conversion_mapping.get_model_conversion_mapping(model, key_mapping, hf_quantizer, add_legacy)
    transformers.core_model_loading.rename_source_key(source_key, weight_renamings, weight_converters,
        base_model_prefix, meta_state_dict, reverse)
    transformers.core_model_loading.dot_natural_key(s)
    transformers.core_model_loading.WeightRenaming
    transformers.core_model_loading.WeightConverter.add_tensor(self, target_key, source_key, source_pattern, future)
    transformers.core_model_loading.WeightConverter.convert(self, layer_name, model, config, hf_quantizer,
        loading_info)
    transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected
transformers test_upstream.py
    torch.nn.Module._non_persistent_buffers_set
saved_tensors test_other_models.py
    torch._subclasses.fake_tensor.FakeTensorMode
    torch._subclasses.fake_tensor.FakeTensor
    torch.utils._pytree.tree_leaves(tree, is_leaf)
    torch.UntypedStorage._cdata
    torch.nn.Module._parameters
    torch.nn.Module._buffers
    torch.autograd.Function._backward_cls
    torch._grouped_mm
    transformers.PreTrainedModel._no_split_modules
    transformers.masking_utils.find_packed_sequence_indices(position_ids)
    transformers.masking_utils._ignore_causal_mask_sdpa(padding_mask, q_length, kv_length, q_offset, kv_offset,
        local_attention_size)
deepspeed test_model.py
    transformers.integrations.deepspeed.initialize_weights_zero3(model)
deepspeed test_muon.py
    deepspeed.utils.mixed_precision_linkage.link_hp_params._hp_mapping
    deepspeed.utils.tensor_fragment.tensor_fragment.lp_fragment_address
    deepspeed.utils.tensor_fragment.tensor_fragment.hp_fragment_address
    STAGE_1_AND_2.single_partition_of_fp32_groups
    STAGE_1_AND_2.bit16_groups
    BF16.fp32_groups_flat_partition
    BF16.bf16_groups
    deepspeed.utils.link_hp_params(lp_param_list, flat_hp_partition, gradient_dict, offload_gradient_dict,
        use_offload, param_group_index, partition_start, partition_size, dp_group, param_offsets)
    STAGE_1_AND_2.round_robin_gradients
    STAGE_1_AND_2.round_robin_bit16_groups
    STAGE_1_AND_2.round_robin_bit16_offsets
    STAGE_1_AND_2.real_dp_process_group
    STAGE_1_AND_2.bit16_groups_flat
deepspeed test_reshard.py
    STAGE_3.fp16_groups
    STAGE_3.fp32_partitioned_groups_flat
    STAGE_3.sub_group_to_group_id
    STAGE_3.subgroup_to_device
    STAGE_3.offload_optimizer
    STAGE_3.backup_optimizer
    INIT.ds_tensor
    INIT.ds_numel
    INIT.ds_shape
    INIT.ds_process_group
    STAGE_3._reassign_or_swap_out_partitioned_parameters(args, kwargs)
    STAGE_3.checkpoint_event_prologue(self)
    STAGE_3.checkpoint_event_epilogue(self)
    STAGE_1_AND_2.update_lp_params(self)
    BF16.update_lp_params(self)
deepspeed test_layouts.py
    deepspeed.checkpoint.constants.DS_AUTOTP_UC_META
    deepspeed.utils.groups._get_model_parallel_world_size()
    deepspeed.utils.groups.get_tensor_model_parallel_rank()
deepspeed test_nvme.py
    STAGE_3._swappable_optimizer_subgroup(self, sub_group_id)
    STAGE_3._optimizer_states_and_gradient_swap_in(self, sub_group_id, timer_names)
    STAGE_3._optimizer_states_and_gradient_swap_out(self, sub_group_id, timer_names)
    STAGE_3._release_swap_buffers(self, sub_group_id)
deepspeed test_fake_gpu.py
    deepspeed.runtime.bf16_optimizer.get_global_norm_of_tensors(input_tensors, norm_type, mpu, moe_ep_group)
    deepspeed.runtime.utils.get_global_norm_of_tensors(input_tensors, norm_type, mpu, moe_ep_group)
    deepspeed.runtime.zero.stage3.combine_grad_norm_groups(norm_groups, norm_type)
    deepspeed.runtime.utils.combine_grad_norm_groups(norm_groups, norm_type)
    deepspeed.runtime.utils.clip_grad_norm_(parameters, max_norm, norm_type, mpu)
    STAGE_3._get_norm_groups(args, kwargs)
    STAGE_1_AND_2.scaled_global_norm(self, norm_type)
    STAGE_1_AND_2.check_overflow(self, partition_gradients)
    BF16._update_hp_grad(self, lp, group_idx, param_idx, clear_lp_grads)
    STAGE_3.partition_grads(args, kwargs)
deepspeed test_stream_order.py
    STAGE_3.reduce_and_partition_stream
    deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._DeepSpeedZeRoOffload__allgather_stream
    STAGE_3._post_step(args, kwargs)
deepspeed test_curve.py
    deepspeed.DeepSpeedEngine.clip_fp32_gradients(self)
    deepspeed.DeepSpeedEngine._global_grad_norm
deepspeed test_stability.py
    STAGE_1_AND_2.averaged_gradients
    STAGE_1_AND_2.offload_gradient_dict
    STAGE_1_AND_2.cpu_offload
deepspeed test_launchers.py
    torch.distributed.distributed_c10d.default_pg_timeout
    torch.distributed.distributed_c10d.default_pg_nccl_timeout
deepspeed test_ranks_apart.py
    deepspeed.ops.__getattr__.__compatible_ops__
split_weights test_vocabulary_parallel.py
    deepspeed.module_inject.layers.LinearLayer(module, mp_group, skip_partition, gather_output, kwargs)
    deepspeed.module_inject.layers.LinearLayer._mark_uc_metadata(self)
    deepspeed.module_inject.layers.TensorParallel_Layer._partition_sizes
    deepspeed.utils.groups._init_tp_mesh_device(tensor_model_parallel_size, data_parallel_size)
split_weights test_layouts.py
    deepspeed.utils.groups._create_expert_and_data_parallel(expert_parallel_size_, mp_size, pp_size, mp_mode,
        use_data_before_expert_parallel_, folding_spec)
    deepspeed.utils.groups._get_expert_parallel_group(group_name)
    deepspeed.utils.groups._get_expert_parallel_group_dict()
    deepspeed.utils.groups._get_expert_data_parallel_group(group_name)
    deepspeed.DeepSpeedEngine._configure_distributed_model(self, model)
    deepspeed.DeepSpeedEngine.has_moe_layers
    deepspeed.DeepSpeedEngine.ds_zero_partition_process_group
    INIT.convert_to_zero_parameters
    deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer.allreduce
    deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer.group_name
    deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer.ds_zero_placement_family
    deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer.ds_zero_partition_group_name
torch test_optimizer_states.py
    torch.optim.lr_scheduler.LRScheduler._last_lr
torch test_gradient_monitors.py
    torch.optim.Optimizer._optimizer_step_pre_hooks
torch test_averages.py
    torch.optim.Optimizer._optimizer_step_post_hooks
torch test_stopping.py
    torch.utils.data.DataLoader._get_iterator(self)
    torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers(self)
torch test_operators.py
    torch.utils.cpp_extension.load(name, sources, extra_cflags, extra_cuda_cflags, extra_sycl_cflags, extra_ldflags,
        extra_include_paths, build_directory, verbose, with_cuda, with_sycl, is_python_module, is_standalone,
        keep_intermediates)
    torch.utils.cpp_extension._import_module_from_library(module_name, path, is_python_module)
    torch.utils.cpp_extension._get_build_directory(name, verbose)
torch test_upstream.py
    cpuinfo.get_cpu_info()
    torch.cuda.memory._record_memory_history(enabled, context, stacks, max_entries, device, clear_history,
        compile_context, global_record_annotations, skip_actions, record_pinned_host_memory, record_cuda)
    torch.cuda.memory._dump_snapshot(filename, augment_with_fx_traces)
torch test_compiling.py
    torch.utils._triton.has_triton
    torch._inductor
    torch._inductor.config.compile_threads
    torch._functorch.config.force_non_lazy_backward_lowering
    torch._dynamo.maybe_mark_dynamic(t, index, min, max)
    torch._dynamo.mark_dynamic(t, index, hint_override, min, max, specialize_on)
torch test_planning_sizes.py
    torch.ops.aten._scaled_mm
    torch.ops.aten._scaled_dot_product_flash_attention
    torch.ops.aten._scaled_dot_product_efficient_attention
    torch.ops.aten._scaled_dot_product_cudnn_attention
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
torchrun test_meeting_point.py
    torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.C10dRendezvousBackend._NULL_SENTINEL
lm_eval test_upstream.py
    lm_eval.api.task.tqdm
fake_gpu test_fake_gpu.py
    torch.cuda._lazy_init()
    torch._subclasses.fake_tensor.FakeTensor
    torch._subclasses.fake_tensor.FakeTensorMode
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._pytree.arg_tree_leaves(args, kwargs)
    torch.utils._pytree.tree_map_only(type_or_types_or_pred, func, tree, is_leaf)
    torch._ops.OpOverload._schema
    torch._C._get_accelerator
    torch._C._accelerator_getAccelerator
    torch._C._set_only_lift_cpu_tensors
    torch.autograd._engine_run_backward(t_outputs, args, kwargs)
    torch.ops.aten._scaled_dot_product_flash_attention
    torch.ops.aten._scaled_dot_product_efficient_attention
    torch.ops.aten._to_copy
    torch.ops.aten._local_scalar_dense
    torch.ops.aten._index_put_impl_
    accelerate.state.PartialState._shared_state
    accelerate.state.AcceleratorState._shared_state
    accelerate.state.GradientState._shared_state
    deepspeed.accelerator.real_accelerator.ds_accelerator
fp8 test_fp8.py
    torchao.float8.float8_linear.Float8Linear
    torchao.float8.float8_linear.matmul_with_hp_or_float8_args.forward(ctx, input_hp, weight_hp_t, linear_mm_config,
        config)
    torchao.float8.float8_linear.matmul_with_hp_or_float8_args.backward(ctx, grad_output)
wide_weights test_wide_weights.py
    deepspeed.DeepSpeedEngine._cast_module_mixed_precision(self, param_dtype, buffer_dtype, is_zero_init_model,
        keep_pattern)
    deepspeed.runtime.zero.stage3.defragment(tensors)
    STAGE_3._set_fp16_partitioned_groups_flat(self)
    STAGE_3.lp_param_buffer
    STAGE_3.fp16_partitioned_groups_flat
fake_ranks test_rehearsal.py
    deepspeed.runtime.zero.partition_parameters.AllGatherCoalescedHandle.wait(args, kwargs)
    deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
    deepspeed.runtime.zero.stage3.reduce_scatter_coalesced(args, kwargs)
    deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks(args, kwargs)
    deepspeed.runtime.zero.utils.get_lst_from_rank0(lst)
    torch._subclasses.fake_tensor.FakeTensor
fake_ranks test_fake_gpu.py
    torch.distributed.ProcessGroup._get_backend
    torch.distributed.ProcessGroup._device_types
    torch.distributed.ProcessGroup._set_group_name
    torch.distributed.ProcessGroup._start_coalescing
    torch.distributed.ProcessGroup._end_coalescing
    torch.distributed.ProcessGroup._allgather_base
    torch.distributed.ProcessGroup._reduce_scatter_base
    torch._C._distributed_c10d.FakeWork
    torch.distributed.distributed_c10d._get_default_group()
    torch.utils._pytree.tree_leaves(tree, is_leaf)"""
"""Module of upstream/ and the test that holds it; below them the names, a function with its parameters."""
