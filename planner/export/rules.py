"""Known incompatibilities of engines: rules.toml has them, each with the threads where it was reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.planner.engines.formats import DTYPES
from ridgeplan.planner.engines.rates import is_ampere
from ridgeplan.planner.export.options import Served
from ridgeplan.roofline.catalog.files import read_tables

EAGLE_CONTEXT = 8192  # where the sliding-window head overtakes the full one in the cited table
FP8_KV_BATCH = 8  # the cited "small batch"


@dataclass(frozen=True)
class Rule:
    """An incompatibility: when it applies, its effect and its reports. forbids: the output would be wrong.

    when: values of `facts`, all of which must hold; of a list, one.
    """

    name: str
    engines: tuple[str, ...]
    when: Mapping[str, Any]
    says: str
    sources: tuple[str, ...]
    forbids: bool = False

    def holds(self, known: Mapping[str, Any]) -> bool:
        """Whether the facts are those of `when`."""
        return all(known[name] in (value if isinstance(value, list) else [value]) for name, value in self.when.items())


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, in the file's order."""
    tables = read_tables(Path(__file__).with_suffix(".toml"))
    return tuple(
        Rule(name, tuple(table.pop("engines")), sources=tuple(table.pop("sources")), **table)
        for name, table in tables.items()
    )


def applying(served: Served) -> Iterator[Rule]:
    """The rules that apply to what an engine is to run."""
    engine, known = served.options.engine.name, facts(served)
    return (rule for rule in rules() if engine in rule.engines and rule.holds(known))


def facts(served: Served) -> dict[str, str | bool]:
    """What rules may depend on; methods and backends are "" where there are none."""
    options, drafts = served.options, served.drafts
    plan, generation = options.plan, _generation(served)
    vocabulary = drafts.shape.vocab if drafts is not None and drafts.shape is not None else options.shape.vocab
    return {
        "weights": served.quantization,
        "kv": served.kv,
        "kv_kind": DTYPES[served.kv].kind,
        "ampere": is_ampere(options.hardware),
        "hopper": generation[:1] == (9,),
        "blackwell": generation >= (10,),
        "latent_attention": options.shape.is_mla,
        "long_context": options.max_model_len > EAGLE_CONTEXT,
        "small_batch": plan.workload.batch <= FP8_KV_BATCH,
        "drafts": drafts is not None,
        "draft_method": drafts.method if drafts is not None else "",
        "other_vocabulary": vocabulary != options.shape.vocab,
        "gamma_by_batch": drafts is not None and drafts.scheduled,
        "adaptive_gamma": plan.speculation.adaptive,
        "host_cache": options.host_cache_backend if options.host_cache_gib > 0 else "",
        "weights_on_host": served.offload_gib > 0,
    }


def _generation(served: Served) -> tuple[int, ...]:
    """Compute capability: 8.x is Ampere and Ada, 9 Hopper, 10 and up Blackwell; () on other vendors' GPUs."""
    numbers = served.options.hardware.compute_capability.split(".")
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()
