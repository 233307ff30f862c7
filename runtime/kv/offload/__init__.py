"""KV on the host: pinned memory that the device reads by address, and the streams that bring layers to the device.

Not here: which layers leave the device (planner.capacity), and the kernels that copy (kernels/residency).
"""
