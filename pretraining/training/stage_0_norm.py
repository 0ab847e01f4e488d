"""The gradient norm at ZeRO stage 0, which DeepSpeed 0.19.8 computes for clipping and does not keep."""

from collections.abc import Callable

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.utils import clip_grad_norm_

from pretraining.upstream.gradient_norm import on_the_host

_clip = on_the_host(clip_grad_norm_)


def tell_norm_at_stage_0(engine: DeepSpeedEngine, hear: Callable[[float], None]) -> None:
    """Have `engine.get_global_grad_norm` answer as at the other stages (deepspeedai/DeepSpeed#7255).

    hear: is told the norm before the step, so that nobody else reads it from the device.
    """
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return

    def clip() -> None:
        limit, parameters = engine.gradient_clipping(), engine.module.parameters()
        norm = _clip(parameters=parameters, max_norm=limit, mpu=engine.mpu)
        engine._global_grad_norm = float(norm)
        hear(engine._global_grad_norm)

    engine.clip_fp32_gradients = clip
