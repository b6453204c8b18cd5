"""The forecast: what a step would take under another order, another split of GPUs, another spread of task times.

Pure: values in, values out. It drives the scheduler that runs steps, and knows nothing of processes, clocks or torch.
"""

from thundersync.forecast.bound import bound
from thundersync.forecast.simulate import Arm, Interval, StepForecast, simulate
from thundersync.forecast.trace import RolloutTrace, StepTrace, TurnTrace

__all__ = ["Arm", "Interval", "RolloutTrace", "StepForecast", "StepTrace", "TurnTrace", "bound", "simulate"]
