"""What runs inside an engine process: commands from the test, one at a time, on a vLLM `LLM`."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.engine_process import Completion


def preload() -> None:
    """Imports what every engine needs. No torch operation runs, so that a fork is safe."""
    import torch
    import vllm
    import vllm.entrypoints.llm
    import vllm.v1.engine.core_client
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)


class Driver:
    """One engine and the commands on it."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._counter = 0

    def start(self, settings: dict[str, Any], environment: dict[str, str], log: str) -> None:
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        from vllm import LLM

        register_architecture(settings["model"])
        self._llm = LLM(**settings)

    def generate(
        self, prompts: list[list[int]], together: bool, sampling: dict[str, Any]
    ) -> list[Completion]:
        parameters = self._parameters(sampling)
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        results = []
        for batch in batches:
            outputs = self._llm.generate(
                [_request(prompt, sampling) for prompt in batch],
                parameters,
                use_tqdm=False,
                lora_request=_adapter(sampling),
            )
            results += [_completion(output) for output in outputs]
        return results

    def add(
        self, name: str, prompt: list[int], sampling: dict[str, Any], priority: int = 0
    ) -> None:
        self._llm.llm_engine.add_request(
            name, _request(prompt, sampling), self._parameters(sampling), priority=priority
        )

    def step(self, count: int) -> dict[str, Completion]:
        """Up to `count` engine steps; the requests that finished in them."""
        finished: dict[str, Completion] = {}
        for _ in range(count):
            if not self._llm.llm_engine.has_unfinished_requests():
                break
            for output in self._llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = _completion(output)
        return finished

    def abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)

    def reset(self, connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(self._llm, *arguments)

    def stop(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    def _parameters(self, sampling: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        values = {"max_tokens": 6, "temperature": 0.0, "logprobs": 5, **sampling}
        values.pop("cache_salt", None)
        values.pop("adapter", None)
        return SamplingParams(detokenize=False, ignore_eos=True, **values)


def register_architecture(folder: str) -> None:
    """Spares vLLM the subprocess (8 s) in which it would look at a class it has not seen before."""
    from vllm import ModelRegistry

    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    if name in ModelRegistry.models:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _request(prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"prompt_token_ids": prompt}
    if "cache_salt" in sampling:
        request["cache_salt"] = sampling["cache_salt"]
    return request


def _adapter(sampling: dict[str, Any]) -> Any:
    """The adapter that the sampling names as [name, number, folder]."""
    if "adapter" not in sampling:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*sampling["adapter"])


def _completion(output: Any) -> Completion:
    choice = output.outputs[0]
    logprobs = tuple(
        {token: entry.logprob for token, entry in step.items()} for step in choice.logprobs or ()
    )
    return Completion(
        tuple(choice.token_ids),
        logprobs,
        output.num_cached_tokens or 0,
        choice.finish_reason,
        len(output.prompt_token_ids),
    )


def serve(connection: Connection) -> None:
    """Answers commands until `stop` or until the test's end of the connection is gone."""
    connection.send(os.getpid())
    driver = Driver()
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            driver.stop()
            return
        try:
            answer = (True, getattr(driver, command)(*arguments))
        except Exception:  # whatever the engine raises is the test's to judge
            answer = (False, traceback.format_exc())
        connection.send(answer)
        if command == "stop":
            return
