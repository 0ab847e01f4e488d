"""What a run will take, known from the recipe alone."""

from pretraining.planning.comparison import measured
from pretraining.planning.gate import judge_plan
from pretraining.planning.run_plan import RunPlan, build_run_plan
from pretraining.planning.screen import print_plan, run_facts

__all__ = ["RunPlan", "build_run_plan", "judge_plan", "measured", "print_plan", "run_facts"]
