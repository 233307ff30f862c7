"""Degrees of parallelism of a plan that spans several GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.catalog.validation import Checked, flag, whole

MAX_DEVICES = 64  # of a kind of parallelism


@dataclass(frozen=True, order=True)
class Parallel(Checked):
    """Degrees of tensor, pipeline and data parallelism, whose product is the number of GPUs.

    expert: whether the ranks of tensor and data parallelism hold whole experts, not a slice of every expert.
    """

    tensor: int = whole(1, MAX_DEVICES, default=1)
    pipeline: int = whole(1, MAX_DEVICES, default=1)
    data: int = whole(1, MAX_DEVICES, default=1)
    expert: bool = flag(False)

    def _contradiction(self) -> str | None:
        if self.expert and self.expert_ranks == 1:
            return "expert is true on one rank; allowed: with tensor or data of 2 or more"
        return None

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """GPUs that share a layer's experts."""
        return self.tensor * self.data

    def __str__(self) -> str:
        degrees = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data}
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " x ".join(words) + (f", ep {self.expert_ranks}" if self.expert else "") if words else "one GPU"


SINGLE = Parallel()
