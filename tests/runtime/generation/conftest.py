"""Tiny models whose checkpoints are read once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeplan.runtime import loading
from ridgeplan.runtime.model.checkpoint import StateDict
from ridgeplan.runtime.model.config import DecoderConfig


@pytest.fixture(scope="session")
def state_dicts() -> dict[tuple[Any, ...], StateDict]:
    """Checkpoints that were read, by their files."""
    return {}


@pytest.fixture(autouse=True)
def checkpoints_read_once(state_dicts: dict[tuple[Any, ...], StateDict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines copy a checkpoint's tensors, and reading them takes more than half of a tiny model's loading."""
    read = loading.load_state_dict

    def read_once(source: str, config: DecoderConfig, dtype: torch.dtype, stored: bool = False) -> StateDict:
        files = sorted(Path(source).glob("*.*"))
        read_from = (dtype, stored, *((str(path), path.stat().st_mtime_ns) for path in files))
        if read_from not in state_dicts:
            state_dicts[read_from] = read(source, config, dtype, stored)
        known = state_dicts[read_from]
        if not isinstance(known.tensors, dict):  # those of a converted file are read where they are taken
            return state_dicts.pop(read_from)
        return replace(known, config=config, tensors=dict(known.tensors))

    monkeypatch.setattr(loading, "load_state_dict", read_once)
