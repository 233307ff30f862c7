"""A GGUF file whose header cannot be true is refused before transformers reads it."""

import struct
from pathlib import Path

import pytest
import transformers

from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.gguf_convert import converted


def test_counts_that_the_file_cannot_hold_reach_no_other_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the file was read")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", never)
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 1) + bytes(4096))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*: it announces 1099511627776 items"):
        converted(path)
    assert [path.name for path in tmp_path.glob("ridgeplan/models/*")] == [".lock"]
