"""Serving capacity: latency percentiles, goodput, cost and the GPUs that a rate of requests needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.planner.parallelism import TOLERANCE, divided
from ridgeplan.planner.quantities import time_text
from ridgeplan.planner.queries.cost import HOUR_S, LatencyLimits
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.render.tables import Lines, Table
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search import best_of_preset
from ridgeplan.planner.traffic.requests import Lengths, Requests, generate_requests, parse_lengths
from ridgeplan.planner.traffic.simulate import Served, Server, simulate
from ridgeplan.planner.traffic.step_times import Replica
from ridgeplan.planner.traffic.traces import read_trace
from ridgeplan.roofline.catalog.hardware import listed
from ridgeplan.roofline.catalog.links import link_between_nodes
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel
from ridgeplan.roofline.catalog.validation import Checked, number, whole
from ridgeplan.roofline.engine import PAGE_TOKENS
from ridgeplan.roofline.plan.plan import MAX_TOKENS, PlanError, require

PERCENTILES = (50, 90, 99)
KEEPS_UP = 0.9  # least time in which requests arrive over that in which they are served, so that no queue grows
MAX_REPLICAS, MAX_REQUESTS = 4096, 5_000_000
DEFAULT_PRESET, DEFAULT_ISL, DEFAULT_OSL = "autoregressive", "8k", "512"


@dataclass(frozen=True, kw_only=True)
class Traffic(Checked):
    """What arrives and how replicas schedule it. Raises PlanError for values that are not allowed.

    requests: simulated at every rate. burstiness: shape of the gamma distribution of the gaps between arrivals; 1 is a
    Poisson process, and less is burstier, as in `vllm bench serve`. prefix_share: of every prompt, found in the prefix
    cache. batched_tokens, max_num_seqs: of the scheduler; None for the backend's defaults. replicas: None to search.
    prefill_replicas: that process prompts alone, beside `replicas` that decode; None where each replica does both.
    """

    error = PlanError
    requests: int = whole(1, MAX_REQUESTS, default=10_000)
    seed: int = whole(0, 2**32 - 1, default=0)
    burstiness: float = number(0.01, 100, default=1.0)
    prefix_share: float = number(0, 1, default=0.0)
    batched_tokens: int | None = whole(1, MAX_TOKENS, default=None)
    max_num_seqs: int | None = whole(1, 4096, default=None)
    replicas: int | None = whole(1, MAX_REPLICAS, default=None)
    prefill_replicas: int | None = whole(1, MAX_REPLICAS, default=None)


@dataclass(frozen=True)
class LoadRow:
    """One rate of requests and what its replicas reach.

    rate: requests per second, of all replicas. Times are percentiles over the requests: TTFT includes queueing, TPOT is
    the mean time between a request's tokens. goodput: requests per second within both limits. busy: share of the time
    in which a replica runs steps. kv_mean, kv_peak: shares of the KV cache held. rejected: requests that no KV cache
    of a replica holds. keeps_up: whether no queue grows. dollars: of a million prompt tokens and of a million output
    tokens, by the time of steps that each takes; and of a GPU-hour. gpus: of all replicas, those that only process
    prompts included. joules_per_output_token: of all GPUs, while they run steps.
    """

    rate: float
    replicas: int
    gpus: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    requests_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    prompt_tokens_per_s: float
    goodput_per_s: float
    busy: float
    kv_mean: float
    kv_peak: float
    cached_share: float
    preemptions: int
    rejected: int
    keeps_up: bool
    misses: tuple[str, ...]
    dollars_per_million_prompt: float | None
    dollars_per_million_output: float | None
    dollars_per_hour: float | None
    joules_per_output_token: float | None

    @property
    def meets(self) -> bool:
        """Whether the 99th percentiles are within the limits, and no request is rejected."""
        return not self.misses

    def verdict(self, limits: LatencyLimits) -> str:
        """Whether its GPUs keep up with the rate and hold the limits, in words."""
        one_gpu, late = self.gpus == 1, [name for name in self.misses if name != "rejected"]
        gpus, s = f"At {self.rate:.4g}/s, {self.gpus} GPU{'s' * (not one_gpu)}", "s" * one_gpu
        first, later = (
            time_text(taken_ms) + (f" (limit {time_text(1e3 * limit_s)})" if limit_s else "")
            for taken_ms, limit_s in ((self.ttft_p99_ms, limits.ttft_s), (self.tpot_p99_ms, limits.tpot_s))
        )
        times = f"99% of the requests get their first token within {first} and take {later} or less per token after it"
        refused = f" {self.rejected} requests do not fit and are rejected." if self.rejected else ""
        if late:
            return f"{gpus} miss{'es' * one_gpu} the latency limit on {' and '.join(late)}: {times}.{refused}"
        if limits == LatencyLimits() and not self.keeps_up:
            least = math.ceil(self.gpus * self.rate / self.requests_per_s)
            served = f"serve{s} only {self.requests_per_s:.3g}/s, so that the queue grows"
            return f"{gpus} {served}; at least {least} GPUs are needed.{refused}"
        held = f"hold{s} the latency limits" if limits != LatencyLimits() else f"keep{s} up; no latency limit is set"
        return f"{gpus} {held}: {times}.{refused}"

    @property
    def spending(self) -> str:
        """Dollars and energy of the tokens in one line, as far as they are known; empty where neither is."""
        costs = {
            "${:.3g} per million prompt tokens": self.dollars_per_million_prompt,
            "${:.3g} per million output tokens": self.dollars_per_million_output,
            "at ${:.2f} per GPU-hour": self.dollars_per_hour,
            "{:.3g} J per output token": self.joules_per_output_token,
        }
        known = ", ".join(text.format(cost) for text, cost in costs.items() if cost is not None)
        return f"{self.rate:.4g}/s: {known}" if known else ""


@dataclass(frozen=True, repr=False)
class ServingCapacity(Table):
    """Rows by rate, the limits that they were held to, the requests' mean lengths, and caveats."""

    model: str
    gpu: str
    backend: str
    plan: str
    limits: LatencyLimits
    traffic: Traffic
    prompts: str
    outputs: str
    rows: tuple[LoadRow, ...]
    kv_tokens: int
    notes: tuple[str, ...] = ()
    degrees: str = str(SINGLE)

    chart = Lines(("rate",), "ttft_p99_ms", "99th percentile of TTFT, ms")

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each rate: how many GPUs, and whether they keep up and hold the limits."""
        return [row.verdict(self.limits) for row in self.rows]

    def summary(self) -> str:
        """The GPUs of every rate in one line."""
        needed = ", ".join(f"{row.rate:g}/s: {row.gpus}" for row in self.rows)
        return f"{self.model} on {self.gpu} with {self.plan}; GPUs by rate: {needed}"

    def table(self) -> list[dict[str, Any]]:
        """A flat row per rate."""
        return [asdict(row) | {"misses": ", ".join(row.misses), "meets": row.meets} for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [asdict(row) | {"misses": list(row.misses), "meets": row.meets} for row in self.rows]
        return asdict(self) | {"rows": rows, "notes": list(self.notes)}


def serving_capacity(
    model: str,
    gpu: str,
    rates: Sequence[float] = (),
    *,
    isl: Lengths | str | None = None,
    osl: Lengths | str | None = None,
    trace: Path | None = None,
    traffic: Traffic | None = None,
    limits: LatencyLimits | None = None,
    preset: str = DEFAULT_PRESET,
    gamma: int | None = None,
    price: float | None = None,
    watts: float | None = None,
    options: SearchOptions | None = None,
    **changes: Any,
) -> ServingCapacity:
    """Simulates requests at each rate, on as many replicas as meet the limits, or on `traffic.replicas` of them.

    A replica is a GPU, or as many as the options' degrees of parallelism take; of several degrees, those are chosen
    that need the fewest GPUs at the highest rate, or without limits those with the most tokens of a GPU.
    isl, osl: lengths of prompts and outputs, as `parse_lengths` reads them; by default 8k and 512. trace: a file of
    requests instead, at its own rate or compressed to each of `rates`. preset, gamma: the plan that every replica runs.
    price, watts: dollars per hour, and power, of a GPU; by default those of the catalog, if it has any, which are
    measured watts while a GPU decodes, and otherwise the board's limit. Options and errors are those of `recommend`;
    also BadTrace, and NothingFits where the model does not fit or no number of GPUs meets the limits.
    """
    require(bool(rates) or trace is not None, "there is no rate; allowed: a rate of requests, or a trace")
    require(price is None or 0 < price < 1e6, f"the price is {price}; allowed: dollars per GPU-hour above 0")
    require(watts is None or 0 < watts < 1e6, f"the power is {watts}; allowed: watts of a GPU above 0")
    traffic, limits = traffic or Traffic(), limits or LatencyLimits()
    require(
        trace is None or isl is osl is None, "a trace has lengths of its own; allowed: it alone, or isl and osl alone"
    )
    lengths = isl or DEFAULT_ISL, osl or DEFAULT_OSL
    prompts, outputs = (parse_lengths(each) if isinstance(each, str) else each for each in lengths)
    recorded = read_trace(trace, traffic.requests) if trace else None
    traffic = traffic if recorded is None else replace(traffic, requests=len(recorded))
    context = int(prompts.mean if recorded is None else max(recorded.prompt_tokens.mean(), 1))
    new_tokens = int(outputs.mean if recorded is None else max(recorded.output_tokens.mean(), 1))
    chosen = SearchOptions.of(options, changes)
    question = ask(model, gpu, context, replace(chosen, new_tokens=new_tokens)).as_executed
    require(
        question.engine is not None or not (traffic.prefix_share or (recorded and recorded.hash_ids)),
        "this package's runtime has no prefix cache; allowed: `backend=vllm`, or no shared prefixes",
    )
    hardware = listed(question.profile.hardware)
    price = price or hardware.dollars_per_hour or None
    power = (watts or hardware.board_watts, watts or hardware.decode_watts or hardware.board_watts)
    inputs = _Study(question, recorded, prompts, outputs, traffic, limits, preset, gamma, price, power)
    study = _at_best_degrees(inputs, max(rates, default=None))
    rows = [study.row(rate) for rate in rates] if rates else [study.row(None)]
    sizes = (prompts.text, outputs.text) if recorded is None else (_mean_text(recorded.prompt_tokens),
                                                                   _mean_text(recorded.output_tokens))  # fmt: skip
    shape, backend = question.shape, str(question.options.backend)
    return ServingCapacity(
        shape.name, question.profile.hardware.name, backend, study.plan_name, limits, traffic,
        *sizes, tuple(rows), int(study.server.kv_tokens), tuple(study.notes(rows)), str(study.parallel),
    )  # fmt: skip


def capacity_by_degrees(
    model: str, gpu: str, rates: Sequence[float], *, options: SearchOptions | None = None, **rest: Any
) -> tuple[ServingCapacity, ...]:
    """`serving_capacity` at each degree of parallelism that the options allow and that the model fits, in turn.

    Raises NothingFits where it fits none.
    """
    chosen = SearchOptions.of(options, {})
    results, problem = [], None
    for parallel in divided(ask(model, gpu, 1, chosen))[0]:
        named = replace(
            chosen, tensor_parallel=parallel.tensor, pipeline_parallel=parallel.pipeline, data_parallel=parallel.data,
            expert_parallel=parallel.expert, gpus=None,
        )  # fmt: skip
        try:
            results.append(serving_capacity(model, gpu, rates, options=named, **rest))
        except NothingFits as error:
            problem = error
    if problem and not results:
        raise problem
    return tuple(results)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points (time, throughput) that no other point beats in both, by ascending time."""
    front: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if not front or points[place][1] > points[front[-1]][1]:
            front.append(place)
    return front


def _at_best_degrees(study: _Study, rate: float | None) -> _Study:
    """The study at the degrees that meet the limits on the fewest GPUs; without limits, with most tokens of a GPU.

    Of those with about as many tokens, as where each serves the whole rate, the ones with the least TPOT are taken.
    Raises NothingFits where none serves the rate, with the reason of the last.
    """
    questions, _ = divided(study.question)
    studies = [replace(study, question=question) for question in questions.values()]
    if len(studies) == 1:
        return studies[0]
    rows: list[tuple[LoadRow, _Study]] = []
    for each in studies:
        try:
            rows.append((each.row(rate), each))
        except NothingFits as error:
            problem = error
    if not rows:
        raise problem
    most = (1 - TOLERANCE) * max(row.output_tokens_per_s_per_gpu for row, _ in rows)

    def rank(row: LoadRow) -> tuple[float, ...]:
        if study.limits == LatencyLimits():
            return row.output_tokens_per_s_per_gpu < most, row.tpot_p99_ms
        return len(row.misses), row.gpus, row.tpot_p99_ms

    return min(rows, key=lambda each: rank(each[0]))[1]


def _mean_text(tokens: np.ndarray) -> str:
    return f"{tokens.mean():.0f} on average, up to {tokens.max()}"


@dataclass(frozen=True)
class _Study:
    """The simulations of one question."""

    question: Question
    recorded: Requests | None
    prompts: Lengths
    outputs: Lengths
    traffic: Traffic
    limits: LatencyLimits
    preset: str
    gamma: int | None
    price: float | None
    watts: tuple[float, float]  # of a GPU that processes prompts, and of one that only decodes; 0 if unknown

    @property
    def parallel(self) -> Parallel:
        """Degrees of a replica."""
        return self.question.workload.parallel

    @cached_property
    def replica(self) -> Replica:
        """The plan on one GPU or rank, at the fastest or the given gamma."""
        question = self.question
        plan = best_of_preset(self.preset, question).plan
        if self.gamma is not None:
            require(plan.speculation.active, f"gamma is {self.gamma}; allowed: none, as {self.preset} drafts nothing")
            plan = replace(plan, speculation=plan.speculation.with_gamma(self.gamma))
        model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
        return Replica(plan, question, self.max_tokens, model.of(plan).best if plan.speculation.active else 1.0)

    @property
    def plan_name(self) -> str:
        """The preset, with its gamma where it drafts."""
        speculation = self.replica.plan.speculation
        return f"{self.preset}, gamma {speculation.gamma}" if speculation.active else self.preset

    @cached_property
    def server(self) -> Server:
        """A replica's server."""
        return self.replica.server(self.traffic.batched_tokens, self.traffic.max_num_seqs)

    @property
    def max_tokens(self) -> int:
        """The longest sequence: the model's limit, or that of constant lengths or of the trace."""
        limit = self.question.shape.max_context
        if self.recorded is not None:
            return int((self.recorded.prompt_tokens + self.recorded.output_tokens).max())
        fixed = int(self.prompts.mean + self.outputs.mean)
        return max(fixed, limit if self.prompts.variation or self.outputs.variation else 0)

    @property
    def longest(self) -> int:
        """The longest sequence that the engine takes: the model's limit binds the requests of a trace."""
        options = self.question.options
        return self.max_tokens if self.recorded is None else longest_context(self.question.shape, 0, yarn=options.yarn)

    def requests(self, rate: float | None) -> Requests:
        """The requests of a rate, the same for every number of replicas: seeds depend on nothing else."""
        rng, traffic = np.random.default_rng(self.traffic.seed), self.traffic
        if self.recorded is not None:
            requests = self.recorded if rate is None else self.recorded.at_rate(rate)
        else:
            lengths = self.prompts, self.outputs
            requests = generate_requests(
                rate or 1.0, traffic.requests, *lengths, self.max_tokens, traffic.burstiness, rng
            )
        if traffic.prefix_share:
            requests = requests.with_prefix_share(traffic.prefix_share, PAGE_TOKENS)
        return requests.with_drafts(self.replica.plan.speculation.gamma, self.replica.acceptance, rng)

    def row(self, rate: float | None) -> LoadRow:
        """The row of a rate, with as few replicas as meet the limits. Raises NothingFits where no number does."""
        every = self.requests(rate)
        fits = self.server.fits(every) & (every.prompt_tokens + every.output_tokens <= self.longest)
        requests, rejected = every.selected(fits), int((~fits).sum())
        if not len(requests):
            raise NothingFits(f"no request fits {self._limits}")
        offered = every.rate if rate is None else rate
        if replicas := self.traffic.replicas or int(self.limits == LatencyLimits()):
            return self._on(replicas, requests, offered, rejected)
        self._require_possible(requests)
        return self._smallest(requests, offered, rejected)

    def _smallest(self, requests: Requests, rate: float, rejected: int) -> LoadRow:
        """The row with the fewest replicas that meet the limits, by doubling and then by halving the interval."""
        too_few, enough = 0, 1
        while _missed(row := self._on(enough, requests, rate, rejected)):
            too_few, enough = enough, 2 * enough
            if too_few >= min(MAX_REPLICAS, len(requests)):
                raise NothingFits(
                    f"{too_few} replicas miss {' and '.join(_missed(row))} at {rate:g}/s; allowed: looser limits, a "
                    "faster GPU or another plan"
                )
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            candidate = self._on(middle, requests, rate, rejected)
            too_few, enough, row = (middle, enough, row) if _missed(candidate) else (too_few, middle, candidate)
        return row

    def _require_possible(self, requests: Requests) -> None:
        """Raises NothingFits where a request that is alone on a GPU misses a limit."""
        sample = requests.selected(slice(0, 1000))
        spaced = replace(sample, arrival_s=np.arange(len(sample)) * 1e6)
        latencies = _latencies(spaced, simulate(spaced, self.server))
        limits = self.limits.ttft_s, self.limits.tpot_s
        for name, seconds, limit in zip(("TTFT", "TPOT"), latencies, limits, strict=True):
            if limit is not None and (reached := _percentile(seconds, 99)) > limit:
                raise NothingFits(
                    f"the 99th percentile of {name} is {time_text(1e3 * reached)} even without load; allowed: a limit "
                    f"above that, not {time_text(1e3 * limit)}"
                )

    def _serve(self, requests: Requests, replicas: int) -> _Outcome:
        """Serves the requests on replicas, and on the data-parallel ranks of each, that take turns."""
        servers = replicas * self.parallel.data
        first_s, finish_s, results = np.empty(len(requests)), np.empty(len(requests)), []
        for index in range(min(servers, len(requests))):
            every = slice(index, None, servers)
            result = simulate(requests.selected(every), self.server)
            first_s[every], finish_s[every] = result.first_s, result.finish_s
            results.append(result)
        return _Outcome(first_s, finish_s, results, sum(result.cached_tokens for result in results))

    def _disaggregated(self, requests: Requests, replicas: int) -> _Outcome:
        """Prompts on replicas of their own; then the KV cache goes over the network, and others decode.

        A GPU sends its share of the cache to one of the other replica, over its own link between nodes.
        """
        prefilled = self._serve(requests.prompts_alone(), self.traffic.prefill_replicas or 1)
        link = link_between_nodes()
        moved_s = link.latency_s + requests.prompt_tokens * self.replica.kv_sizes.token / link.bytes_per_s
        several = np.flatnonzero(requests.output_tokens > 1)
        arrival_s = (prefilled.first_s + moved_s)[several]
        order = np.argsort(arrival_s, kind="stable")
        decoded = self._serve(requests.selected(several[order]).handed_over(arrival_s[order]), replicas)
        finish_s = prefilled.first_s.copy()
        finish_s[several[order]] = decoded.finish_s
        return _Outcome(prefilled.first_s, finish_s, [*prefilled.results, *decoded.results], prefilled.cached_tokens)

    def _on(self, replicas: int, requests: Requests, rate: float, rejected: int) -> LoadRow:
        """Serves the requests on so many replicas, beside those that process prompts alone, if there are any."""
        prefilling = self.traffic.prefill_replicas or 0
        outcome = (self._disaggregated if prefilling else self._serve)(requests, replicas)
        served, servers = outcome.results, (replicas + prefilling) * self.parallel.data
        gpus = (replicas + prefilling) * self.parallel.gpus
        ttft_s, tpot_s = _latencies(requests, outcome)
        limits = self.limits.ttft_s, self.limits.tpot_s
        # A request without a TPOT misses no limit on it.
        late = [seconds > (limit or math.inf) for seconds, limit in zip((ttft_s, tpot_s), limits, strict=True)]
        span_s = max(result.end_s for result in served) - float(requests.arrival_s[0])
        prompt_s, decode_s = (sum(getattr(result, name) for result in served) for name in ("prompt_s", "decode_s"))
        tokens, outputs = int(requests.prompt_tokens.sum()), int(requests.output_tokens.sum())
        times = {
            f"{name}_p{percentile}_ms": 1e3 * _percentile(seconds, percentile)
            for name, seconds in (("ttft", ttft_s), ("tpot", tpot_s))
            for percentile in PERCENTILES
        }
        bounds = ("ttft", self.limits.ttft_s), ("tpot", self.limits.tpot_s)
        misses = [name.upper() for name, limit in bounds if limit is not None and times[f"{name}_p99_ms"] > 1e3 * limit]
        spent = None if self.price is None else self.price / HOUR_S * gpus * span_s
        share = prompt_s / (prompt_s + decode_s)
        joules = np.dot(self.watts, (prompt_s, decode_s)) * self.parallel.gpus / self.parallel.data
        held = sum(result.kv_token_s for result in served) / (span_s * servers * self.server.kv_tokens)
        return LoadRow(
            rate=rate, replicas=replicas, gpus=gpus, **times, requests_per_s=len(requests) / span_s,
            output_tokens_per_s=outputs / span_s, output_tokens_per_s_per_gpu=outputs / span_s / gpus,
            prompt_tokens_per_s=tokens / span_s, goodput_per_s=float(np.sum(~np.any(late, axis=0))) / span_s,
            busy=(prompt_s + decode_s) / (span_s * servers), kv_mean=held,
            kv_peak=max(result.kv_peak_tokens for result in served) / self.server.kv_tokens,
            cached_share=outcome.cached_tokens / tokens,
            preemptions=sum(result.preemptions for result in served), rejected=rejected,
            keeps_up=bool(np.ptp(requests.arrival_s) >= KEEPS_UP * span_s),
            misses=(*misses, *(("rejected",) if rejected else ())),
            dollars_per_million_prompt=None if spent is None else 1e6 * spent * share / tokens,
            dollars_per_million_output=None if spent is None else 1e6 * spent * (1 - share) / outputs,
            dollars_per_hour=self.price,
            joules_per_output_token=float(joules / outputs) or None,
        )  # fmt: skip

    @property
    def _limits(self) -> str:
        """The limits of a sequence, in words."""
        tokens, name = min((self.server.kv_tokens, "the KV cache"), (self.longest, "the model's context"))
        return f"{name} of {int(tokens)} tokens"

    def notes(self, rows: Sequence[LoadRow]) -> Iterator[str]:
        """Caveats of the predictions and of the simulation."""
        yield from self.question.notes()
        yield from self.question.limit_notes()
        hardware, (prompt_watts, decode_watts) = listed(self.question.profile.hardware), self.watts
        if decode_watts < prompt_watts:
            source = f"the board's limit, and {decode_watts:g} W while decoding ({hardware.sources['decode_watts']})"
            yield f"energy is that of GPUs at {prompt_watts:g} W while they process prompts, {source}"
        elif decode_watts == hardware.board_watts:
            taken = f"GPUs that run steps are taken at their listed {decode_watts:g} W" * (decode_watts > 0)
            yield f"energy was not measured: {taken or 'no power is listed or given'}"
        if self.question.engine is None:
            yield "this package's runtime serves fixed batches: a server that adds requests between rounds is assumed"
        else:
            yield "steps with prompts are fitted to vLLM serving Llama-3.1-8B in bf16 on one H200 (docs/traffic.md)"
        if rejected := max(row.rejected for row in rows):
            yield f"{rejected} requests do not fit {self._limits}: rejected"
        if not all(row.keeps_up for row in rows):
            yield "where fewer requests are served than arrive, queues grow with the number of requests simulated"


def _missed(row: LoadRow) -> tuple[str, ...]:
    """The limits that a row misses and that more replicas may meet."""
    return tuple(name for name in row.misses if name != "rejected")


@dataclass(frozen=True)
class _Outcome:
    """When each request had its first and its last token, [requests], and the results of all servers.

    cached_tokens: of prompts, found in a prefix cache.
    """

    first_s: np.ndarray
    finish_s: np.ndarray
    results: list[Served]
    cached_tokens: int


def _latencies(requests: Requests, served: Served | _Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to the first token, and per output token after it, NaN where there is none: [requests]."""
    others = np.where(requests.output_tokens > 1, requests.output_tokens - 1, np.nan)
    return served.first_s - requests.arrival_s, (served.finish_s - served.first_s) / others


def _percentile(seconds: np.ndarray, percentile: float) -> float:
    """A percentile of those that are not NaN; 0 where none is."""
    return float(np.nanpercentile(seconds, percentile)) if np.isfinite(seconds).any() else 0.0
