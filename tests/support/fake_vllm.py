"""A vLLM whose steps take known times on a clock of its own: `LLM`, and the parts of its engine that scripts use.

It schedules as vLLM does by default: a step while the one before runs, in the order of arrival, prompts in chunks. The
host takes its time to launch each step, and reads the tokens of the one before after that.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from ridgeplan.planner.traffic.simulate import StepTimes


@dataclass
class Clock:
    """Stands for the module `time`."""

    now_s: float = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1e-6)

    def strftime(self, _: str) -> str:
        return "2026-11-30"


@dataclass
class Request:
    req_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    num_computed_tokens: int = 0
    emitted: int = 0

    @property
    def prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def scheduled_to_end(self) -> bool:
        return self.num_computed_tokens >= self.prompt + self.max_tokens - 1


@dataclass
class Scheduler:
    """The scheduler and what it gave to the device. `clock.now_s` advances only where a result is waited for."""

    clock: Clock
    times: StepTimes
    budget: int
    max_num_seqs: int
    host_s: float = 0.0
    launch_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        assert not throttle_prefills
        budget, computed, sizes = self.budget, {}, {}
        # Decoding sequences and the prompt in progress are in the order of arrival; the former take one token each.
        active = [request for request in self.running if not request.scheduled_to_end]
        new = []
        while self.waiting and len(self.running) < self.max_num_seqs and sum(map(needed, [*active, *new])) < budget:
            new.append(self.waiting.popleft())
            self.running.append(new[-1])
        for request in (*active, *new):
            if size := min(needed(request), budget):
                sizes[request.req_id], computed[request.req_id] = size, request.num_computed_tokens
                request.num_computed_tokens, budget = request.num_computed_tokens + size, budget - size
        cached = [request.req_id for request in active if request.req_id in sizes]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.req_id, prompt_token_ids=request.prompt_token_ids, num_computed_tokens=0)
                for request in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[computed[name] for name in cached]
            ),
            num_scheduled_tokens=sizes,
            computed=computed,
        )

    def update_from_output(self, output: Any, _: Any) -> list[Any]:
        outputs = []
        for request in list(self.running):
            name = request.req_id
            if output.computed.get(name, 0) + output.num_scheduled_tokens.get(name, 0) >= request.prompt:
                request.emitted += 1
                finished = request.emitted == request.max_tokens
                tokens = SimpleNamespace(token_ids=[7])
                outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[tokens]))
                if finished:
                    self.running.remove(request)
        return outputs

    def launch(self, output: Any, free_s: float) -> float:
        """Launches a step on a device that is free from a time on; returns when it ends."""
        prompts = {request.req_id: request.prompt for request in self.running}
        decodes = [done for name, done in output.computed.items() if done >= prompts[name]]
        chunks = [
            (output.num_scheduled_tokens[name], done) for name, done in output.computed.items() if done < prompts[name]
        ]
        seconds = self.times.decode_s(len(decodes), sum(decodes))
        if chunks:
            seconds = self.times.mixed_s(len(decodes), sum(decodes), chunks)
        ended_s = max(free_s, self.clock.now_s + self.host_s) + seconds
        self.clock.now_s += self.launch_s if chunks else self.host_s
        return max(ended_s, self.clock.now_s)


def needed(request: Request) -> int:
    """Tokens that a step takes of a request, within its budget: the rest of its prompt, or one."""
    return max(request.prompt - request.num_computed_tokens, 1)


class Engine:
    """`LLMEngine` with the core, whose queue holds two steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.queue, self.free_s = scheduler, deque(), 0.0
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        config = SimpleNamespace(num_gpu_blocks=50_000, block_size=16, gpu_memory_utilization=0.9)
        self.vllm_config = SimpleNamespace(
            cache_config=config,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=scheduler.budget, async_scheduling=True),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
        )

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        assert prompt["type"] == "token" and params.ignore_eos and params.output_kind == "delta"
        self.scheduler.waiting.append(Request(name, prompt["prompt_token_ids"], params.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def abort_request(self, names: Sequence[str]) -> None:
        scheduler = self.scheduler
        scheduler.waiting = deque(request for request in scheduler.waiting if request.req_id not in names)
        scheduler.running = [request for request in scheduler.running if request.req_id not in names]

    def step(self) -> list[Any]:
        """Schedules a step, and returns the outputs of the one before when it ends."""
        scheduler = self.scheduler
        if self.has_unfinished_requests():
            output = scheduler.schedule()
            if output.num_scheduled_tokens:
                self.free_s = scheduler.launch(output, self.free_s)
            self.queue.append((self.free_s, output))
            if len(self.queue) < 2:
                return []
        if not self.queue:
            return []
        end_s, output = self.queue.popleft()
        scheduler.clock.now_s = max(scheduler.clock.now_s, end_s)
        outputs: list[Any] = scheduler.update_from_output(output, None)
        return outputs


def fake_vllm(clock: Clock, times: StepTimes, *host: float) -> dict[str, ModuleType]:
    """Modules by name. The engine's options are those that it was started with."""

    class LLM:
        def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, **arguments: Any) -> None:
            assert arguments["load_format"] == "dummy" and arguments["skip_tokenizer_init"]
            clock.now_s += 90.0
            self.llm_engine = Engine(Scheduler(clock, times, max_num_batched_tokens, max_num_seqs, *host))

        def collective_rpc(self, of: Any) -> list[Any]:
            return [of(SimpleNamespace(model_runner=SimpleNamespace(model_memory_usage=16e9)))]

    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vars(vllm).update(LLM=LLM, SamplingParams=SimpleNamespace, __version__="0.24.0")
    vars(params).update(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    return {"vllm": vllm, "vllm.sampling_params": params}
