"""Where the slices of stages 1 and 2 lie with `round_robin_gradients`, which deepspeed 0.19.8 itself has wrong."""

import torch.distributed as dist
from deepspeed.utils import link_hp_params


def link_slices(zero) -> None:
    """Mend `_hp_mapping` of every parameter, which checkpoints, Muon and monitors find its slice by.

    To spread the work of a backward pass over the ranks, DeepSpeed lays a group's parameters end to end in another
    order, but links them as if they lay in their own. zero: the optimizer; any other is left as it is.
    """
    if not getattr(zero, "round_robin_gradients", False):
        return
    for group, flat in enumerate(zero.bit16_groups_flat):
        ranks = zero.real_dp_process_group[group]
        size = flat.numel() // dist.get_world_size(group=ranks)
        laid = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
        offsets = dict(zip(*laid, strict=True))
        link_hp_params(
            lp_param_list=zero.bit16_groups[group],
            flat_hp_partition=zero.single_partition_of_fp32_groups[group],
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=group,
            partition_start=dist.get_rank(group=ranks) * size,
            partition_size=size,
            dp_group=ranks,
            param_offsets=[offsets[parameter] for parameter in zero.bit16_groups[group]],
        )
