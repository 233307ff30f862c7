"""A second CUDA stream, on which KV is copied while the current stream computes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class SideStream:
    """A stream beside the current one on `device`. Without a GPU there is none, and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._joined = torch.zeros(1, device=device)

    def after_current(self) -> Any:
        """Context manager: its body is launched on this stream, after everything launched on the current one so far."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def record_event(self) -> Any:
        """An event after everything launched on this stream so far; None without a GPU."""
        return self._stream.record_event() if self._stream is not None else None

    def wait_event(self, event: Any) -> None:
        """Makes everything launched on the current stream from now on run after `event`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(event)
            # Kernels with programmatic dependent launch may read before the preceding kernel has ended. That must not
            # be a copy, so an ordinary kernel stands between.
            self._joined.zero_()
