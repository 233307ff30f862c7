"""ridgeplan: predict, plan, run and validate long-context LLM inference.

    from ridgeplan import planner, runtime, validate

Not here: anything but the version. The six folders beside this one are installed as its packages.
"""

__version__ = "0.2.0"
