"""Measures the arms of a step on one recorded workload, through the engines and the trainer of a real run."""
