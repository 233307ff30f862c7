"""Hardware: figures with sources, names in every spelling, a user's TOML, and detection."""

import subprocess
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.roofline.catalog import hardware as hardware_module
from ridgeplan.roofline.catalog.hardware import (
    FIGURES,
    LISTED,
    BadHardwareFile,
    Hardware,
    UnknownHardware,
    detect_hardware,
    driver_listing,
    list_hardware,
    load_hardware,
)
from ridgeplan.roofline.catalog.validation import InvalidField

MINE = """
[my-card]
memory_bytes = 8_000_000_000
bandwidth_bytes_per_s = 500e9
compute_flops = 50e12
int8_flops = 100e12
l2_bytes = 4_000_000
num_sms = 30
host_link_bytes_per_s = 16e9
"""


@pytest.mark.parametrize("item", list_hardware(), ids=lambda item: item.name)
def test_every_figure_has_a_source_and_is_plausible(item: Hardware) -> None:
    numbers = {field.name for field in fields(item) if isinstance(getattr(item, field.name), (int, float))}
    others = {"element_bytes", "unified_memory", *LISTED}
    assert {*item.sources} - {*LISTED} == {*FIGURES, "sm_clock_hz"} == numbers - others
    assert {name for name in LISTED if getattr(item, name)} == {*item.sources} & {*LISTED}
    assert all(len(source) > 10 for source in item.sources.values())
    assert 30 < item.ridge_point < 500
    if item.name != "b300":  # which gave up its INT8 units
        assert 1.9 < item.int8_flops / item.compute_flops < 4.1
    assert 8e9 < item.memory_bytes < 300e9 and item.memory_bytes % 2**20 == 0
    assert Hardware(**asdict(item)) == item


def test_the_promised_gpus_are_there() -> None:
    names = {
        "a6000",
        "a100-80gb",
        "a800-80gb",
        "h20",
        "h100-sxm",
        "h100-nvl",
        "h200",
        "b200",
        "l40s",
        "rtx4090",
        "rtx4060-laptop",
        "l4",
        "a10g",
        "rtx3090",
        "rtx4080",
        "rtx5090",
        "gh200",
        "dgx-spark",
        "b300",
        "mi300x",
    }
    assert names <= {item.name for item in list_hardware()}


def test_datasheet_figures_of_the_h200() -> None:
    h200 = load_hardware("h200")
    assert (h200.bandwidth_bytes_per_s, h200.compute_flops, h200.num_sms) == (4.8e12, 989.5e12, 132)
    assert h200.memory_bytes == 143771 * 2**20
    assert h200.ridge_point == pytest.approx(206.1, abs=0.1)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("H200", "h200"),
        ("nvidia-h200", "h200"),
        ("NVIDIA H200", "h200"),
        ("h200 sxm", "h200"),
        ("h100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("a100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA RTX A6000", "a6000"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx4060-laptop"),
    ],
)
def test_names_are_tolerant(reference: str, name: str) -> None:
    assert load_hardware(reference).name == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("h201", "h200"),
        ("rtx4099", "rtx4090"),
        ("a100-40gb", "a100-80gb"),
        ("b20", "b200"),
        ("rtx4060-l", "rtx4060-laptop"),
    ],
)
def test_unknown_names_suggest_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(UnknownHardware, match=f"Did you mean [^?]*{near}") as caught:
        load_hardware(wrong)
    assert repr(wrong) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["", "a\0b", "x" * 5000, "....", "abacus"])
def test_hostile_names_list_what_is_known(reference: str) -> None:
    with pytest.raises(UnknownHardware, match="Known: a6000, a100-80gb"):
        load_hardware(reference)


def write(tmp_path: Path, content: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    return str(path)


def test_a_users_own_toml(tmp_path: Path) -> None:
    mine = load_hardware(write(tmp_path, MINE + '[my-card.sources]\nl2_bytes = "measured"\n'))
    assert (mine.name, mine.ridge_point, mine.kind, mine.element_bytes) == ("my-card", 100, "gpu", 2)
    assert mine.sources["l2_bytes"] == "measured"
    assert mine.sources["num_sms"] == "given in mine.toml"


@pytest.mark.parametrize("item", list_hardware(), ids=lambda item: item.name)
def test_a_shipped_table_works_as_a_users_file(tmp_path: Path, item: Hardware) -> None:
    shipped = Path(hardware_module.__file__).with_name("gpus.toml").read_text()
    table = shipped[shipped.index(f"[{item.name}]") :].split("\n\n[", 2)
    assert load_hardware(write(tmp_path, "\n\n[".join(table[:2]))) == item


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no .table."),
        ("x = 1", "'x' stands outside a .table."),
        ("[a\n", "Expected"),
        (MINE + "[other]\n", "one .table. is allowed, it has 2"),
        (
            MINE.replace("500e9", "nan"),
            "bandwidth_bytes_per_s is nan; allowed: a number from 1e.06 to 1e.16",
        ),
        (MINE.replace("500e9", "-1"), "bandwidth_bytes_per_s is -1; allowed"),
        (MINE.replace("50e12", "inf"), "compute_flops is inf; allowed"),
        (MINE.replace("50e12", '"fast"'), "compute_flops is 'fast'; allowed"),
        (MINE.replace("8_000_000_000", "8e9"), "memory_bytes is 8000000000.0; allowed: a whole number"),
        (MINE.replace("= 30", "= 0"), "num_sms is 0; allowed: a whole number from 1 to 100000"),
        (MINE.replace("num_sms = 30", ""), "num_sms is missing"),
        (MINE + "speed = 1\n", "speed is not a field; allowed: name, kind, memory_bytes"),
        (MINE + "aliases = 3\n", "aliases is 3; allowed: a list"),
        (MINE + "note = 3\n", "note is 3; allowed: a text of 0 to 4096 characters"),
        (MINE + 'kind = "tpu"\n', "kind is 'tpu'; allowed: gpu, cpu"),
        (MINE + "sources = 3\n", "sources is 3; allowed: an object"),
        (MINE + "[my-card.sources]\nnum_sms = 3\n", "sources.num_sms is 3; allowed: a text of 1"),
        (MINE.replace("num_sms", "processors"), "processors has been renamed: write num_sms"),
        (MINE + 'name = "other"\n', "name is not a field of the table"),
        (
            MINE.replace("500e9", "0").replace("= 30", "= -3"),
            r"2 mistakes: \(1\) bandwidth_.* is 0;.*\(2\) num_sms is -3",
        ),
    ],
)
def test_bad_files_are_one_line_naming_the_file(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(BadHardwareFile, match=message) as caught:
        load_hardware(write(tmp_path, content))
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_every_mistake_of_a_file_is_listed(tmp_path: Path) -> None:
    """Seven figures below their range, one unknown field and one missing: nine mistakes, each named."""
    content = "".join(f"{name} = -1\n" if "=" in line else line for line in MINE.splitlines(keepends=True)
                      for name in [line.partition(" =")[0]])  # fmt: skip
    content = content.replace("num_sms = -1\n", "") + "speed = 1\nelement_bytes = 0\n"
    with pytest.raises(BadHardwareFile, match="9 mistakes") as caught:
        load_hardware(write(tmp_path, content))
    for name in (*FIGURES, "speed", "element_bytes"):
        assert name in str(caught.value).partition("9 mistakes")[2]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadHardwareFile, match="No such file"):
        load_hardware(str(tmp_path / "absent.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BadHardwareFile, match="Is a directory"):
        load_hardware(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_without_a_source_is_refused(figure: str) -> None:
    h200 = load_hardware("h200")
    with pytest.raises(InvalidField, match=f"^hardware 'h200': sources must say where these come from: {figure}$"):
        replace(h200, sources={key: value for key, value in h200.sources.items() if key != figure})


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that has not asked the driver yet; what it hears is forgotten again."""
    driver_listing.cache_clear()
    yield monkeypatch
    driver_listing.cache_clear()


@pytest.mark.parametrize(
    ("listing", "name"),
    [
        ("NVIDIA H200, 143771\n", "h200"),
        ("NVIDIA H200, 143771\nNVIDIA H200, 143771\n", "h200"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU, 8188\n", "rtx4060-laptop"),
        ("NVIDIA H20, 143771\n", None),  # the variant with 141 GB
        ("NVIDIA L4, 23034\n", "l4"),
        ("NVIDIA A10G, 23028\n", "a10g"),
        ("NVIDIA GeForce RTX 3090, 24576\n", "rtx3090"),
        ("NVIDIA GeForce RTX 4080, 16376\n", "rtx4080"),
        ("NVIDIA GeForce RTX 5090, 32607\n", "rtx5090"),
        ("NVIDIA GH200 480GB, 97871\n", "gh200"),
        ("NVIDIA B300 SXM6 AC, 275040\n", "b300"),
        ("NVIDIA H200, 129401\n", "h200"),  # nine tenths of 143771 are 129393.9
        ("NVIDIA H200, 129393\n", None),
        ("NVIDIA H200, 158141\n", "h200"),  # eleven tenths are 158148.1
        ("NVIDIA H200, 158149\n", None),
        ("NVIDIA A100-PCIE-40GB, 40960\n", None),
        ("NVIDIA H200, [N/A]\n", None),
        ("", None),
        ("garbage", None),
    ],
)
def test_detection(fresh_process: pytest.MonkeyPatch, listing: str, name: str | None) -> None:
    """The driver is asked once in a process."""
    commands = []

    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi" and options["timeout"] <= 10
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=listing)

    fresh_process.setattr(subprocess, "run", answer)
    assert [detect_hardware(), detect_hardware()] == [name, name]
    assert len(commands) == 1


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("nvidia-smi"),
        PermissionError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 10),
        subprocess.CalledProcessError(9, "nvidia-smi"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_detection_without_a_driver(fresh_process: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    fresh_process.setattr(subprocess, "run", fail)
    assert detect_hardware() is None


@pytest.mark.parametrize(
    ("name", "generation"),
    [("v100", "Volta"), ("Tesla V100-SXM2-32GB", "Volta"), ("t4", "Turing"), ("NVIDIA GeForce RTX 2080 Ti", "Turing"),
     ("p100", "Pascal"), ("GTX 1080", "Pascal")],
)  # fmt: skip
def test_older_generations_are_named(name: str, generation: str) -> None:
    with pytest.raises(UnknownHardware, match=f"no plan runs on .*, of generation {generation}; allowed: Ampere"):
        load_hardware(name)


def test_kernels_run_from_ampere_on() -> None:
    without = {item.name for item in list_hardware() if not item.has_kernels}
    assert without == {"mi300x"}
    turing = replace(load_hardware("l4"), compute_capability="7.5")
    assert not turing.has_kernels and replace(turing, kind="cpu").has_kernels
    assert replace(turing, compute_capability="none").has_kernels  # of a user's file that does not say it
