"""The plan, the policies that it names, and what the runtime can execute: shared by planner, kernels and runtime."""
