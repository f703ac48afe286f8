"""The engine process of `bench e2e`: commands as JSON lines on two inherited pipes.

Commands: `start` (arguments of vllm.LLM), `first_token` (prompt; seconds until one token is out),
`reset` (the engine's own prefix cache), `decode` (prompts, tokens; seconds per step and seconds per
step spent in the connector's hooks), `stop`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


class EngineSide:
    """One vLLM engine in this process, scheduler and worker included."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._hook_seconds = 0.0
        self._depth = 0

    def start(self, arguments: dict[str, Any]) -> float:
        """Seconds that the start took."""
        from vllm import LLM

        began = time.perf_counter()
        self._llm = LLM(**arguments)
        return time.perf_counter() - began

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """One token for `prompt`: seconds, tokens that came from a cache, and the token."""
        began = time.perf_counter()
        (output,) = self._generate([prompt], 1)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "cached": output.num_cached_tokens or 0,
            "token": output.outputs[0].token_ids[0],
        }

    def reset(self) -> bool:
        """Drop the engine's own prefix cache, once nothing holds blocks any more."""
        deadline = time.monotonic() + 30
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("blocks are held 30 s after the last request")
            self._llm.llm_engine.step()
            time.sleep(0.01)
        return True

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Decode `tokens` tokens of `prompts` in one batch, stepwise, after all prefills."""
        from vllm import SamplingParams

        self._time_hooks()
        engine = self._llm.llm_engine
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for index, prompt in enumerate(prompts):
            engine.add_request(
                f"d{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, sampling
            )
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in engine.step()}
        steps, self._hook_seconds = [], 0.0
        hooks = []
        while engine.has_unfinished_requests():
            before, began = self._hook_seconds, time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - began)
            hooks.append(self._hook_seconds - before)
        # the last steps end requests: they are not steps with nothing to move
        steps, hooks = sorted(steps[:-2]), sorted(hooks[:-2])
        middle = len(steps) // 2
        return {"step_s": steps[middle], "hooks_s": hooks[middle], "steps": len(steps)}

    def stop(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[list[int]], tokens: int) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._llm.generate(requests, sampling, use_tqdm=False)

    def _time_hooks(self) -> None:
        """Time every hook of the connector's two objects, outermost calls only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return
        core = self._llm.llm_engine.engine_core.engine_core
        for connector in (core.scheduler.connector, get_kv_transfer_group()):
            if getattr(connector, "_hma_timed", False):
                continue
            connector._hma_timed = True
            for name in dir(type(connector)):
                if not name.startswith("_") and callable(getattr(type(connector), name)):
                    setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return hook(*arguments, **named)
            self._depth += 1
            began = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                self._depth -= 1
                self._hook_seconds += time.perf_counter() - began

        return timed


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer one line per command until `stop` or the end of the input."""
    side = EngineSide()
    for line in commands:
        name, arguments = json.loads(line)
        value = getattr(side, name)(*arguments)
        answers.write(json.dumps(value) + "\n")
        answers.flush()
        if name == "stop":
            return


def main() -> None:
    """`e2e_engine COMMANDS ANSWERS [MODULE...]`: descriptors of the pipes."""
    commands, answers = int(sys.argv[1]), int(sys.argv[2])
    if "--hide-llvmlite" in sys.argv:
        _hide_llvmlite_dunders()
    with os.fdopen(commands) as source, os.fdopen(answers, "w") as target:
        serve(source, target)


def _hide_llvmlite_dunders() -> None:
    """vLLM 0.32 reads `__dict__` of all it finds imported; llvmlite's library object answers every
    unknown name with a C function. LMCache imports it before vLLM's worker starts."""
    from llvmlite.binding import ffi

    original = ffi._lib_wrapper.__getattr__

    def without_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    ffi._lib_wrapper.__getattr__ = without_dunders


if __name__ == "__main__":
    main()
