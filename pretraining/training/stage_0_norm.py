"""The gradient norm at ZeRO stage 0, which DeepSpeed 0.19.8 computes for clipping and does not keep."""

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.utils import clip_grad_norm_


def tell_norm_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Have `engine.get_global_grad_norm` answer as at the other stages (deepspeedai/DeepSpeed#7255)."""
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return

    def clip() -> None:
        limit, parameters = engine.gradient_clipping(), engine.module.parameters()
        engine._global_grad_norm = clip_grad_norm_(parameters=parameters, max_norm=limit, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip
