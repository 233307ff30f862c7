"""The plan: its axes, policies and presets, and what the runtime can execute."""

from importlib import import_module

import_module("ridgeplan.roofline.plan.policies")  # registers them, as plans name policies by text
