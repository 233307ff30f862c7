"""What of an offloaded layer lies on the host."""

from enum import StrEnum


class HostPart(StrEnum):
    """The part of a layer's KV that leaves the device."""

    ALL = "all"  # every old token; drafts read a budget of tokens that stay on the device
    LOWER = "lower"  # lower codes alone, which drafts never read: half the memory, and drafts as good as without
