"""`HMATritonConnector`: what vLLM loads. A facade that forwards every hook to one of two halves.

Loaded with `kv_connector_module_path`. In the scheduler's process it holds a `SchedulerHalf`, in
each worker's a `WorkerHalf`. Loads are asynchronous: a synchronous load comes too late for
recurrent state, and on a hybrid it has no way to fail (vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm

from hma_triton.client import HmaClient
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.embedded_server import embedded_url
from hma_triton.integration.vllm.engine_checks import (
    SUPPORTED_VERSIONS,
    check_version,
    refuse_untested,
    reuse_warnings,
    start_warnings,
)
from hma_triton.integration.vllm.engine_identity import engine_identity, instance_id
from hma_triton.integration.vllm.engine_shape import EngineShape, engine_shape
from hma_triton.integration.vllm.warn_once import logger

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        KVConnectorBase_V1,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    from hma_triton.integration.vllm.registration import PoolRegistration
    from hma_triton.integration.vllm.scheduler_half import SchedulerHalf
    from hma_triton.integration.vllm.stats import HMAPromMetrics, HMAStats
    from hma_triton.integration.vllm.stored_events import StoredEvents
    from hma_triton.integration.vllm.worker_half import WorkerHalf
except ImportError as error:
    raise ImportError(
        f"HMATritonConnector needs vLLM {', '.join(SUPPORTED_VERSIONS)}.x; vLLM {vllm.__version__}"
        f" lacks what it builds on ({error})"
    ) from error


class HMATritonConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefix cache in host memory for hybrid models; see docs/connector.md.

    Raises (at start-up):
        ConfigError: an unknown or unfit `hma.*` key, or a feature that was never run.
        GeometryError: groups that cannot be served.
        RemoteError: the server refuses the registration.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
        warnings = refuse_untested(vllm_config, allow=settings.allow_untested)
        shape = engine_shape(
            kv_cache_config,
            chunk_tokens=settings.chunk_tokens,
            dcp_size=vllm_config.parallel_config.decode_context_parallel_size,
            on_cpu=vllm_config.device_config.device_type == "cpu",
        )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        url = settings.server_url or embedded_url(instance_id(vllm_config))
        client = HmaClient(
            url,
            timeout_s=settings.timeout_s,
            connect_timeout_s=settings.start_timeout_s,
            role=f"vllm-{role.name.lower()}",
            curve_key=settings.curve_key or None,
        )
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _scheduler_half(client, vllm_config, shape, settings)
            unknown_version = check_version(vllm.__version__)
            warnings += [unknown_version] if unknown_version else []
            warnings += start_warnings(vllm_config, own_server=not settings.server_url)
            warnings += reuse_warnings(vllm_config, shape)
            for text in warnings:
                logger.warning("hma_triton: %s", text)
        else:
            rank = int(vllm_config.parallel_config.rank)
            registration = PoolRegistration(
                client,
                engine_identity(vllm_config),
                kv_cache_config,
                rank,
                shape.chunk_tokens,
                settings,
            )
            self._worker = WorkerHalf(client, registration, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is lost is a later miss."""
        return False

    @property
    def worker(self) -> WorkerHalf:
        """The worker half, in a worker's process."""
        assert self._worker is not None
        return self._worker

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half, in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    # worker hooks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        self.worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self.worker.finished_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> Any:
        return self.worker.take_meta()

    # scheduler hooks

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.update_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self.scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        return self.scheduler.reset_cache()

    # both

    def get_kv_connector_stats(self) -> HMAStats | None:
        half = self._worker if self._scheduler is None else self._scheduler
        assert half is not None
        return half.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HMAStats:
        return HMAStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HMAPromMetrics:
        return HMAPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()


def _scheduler_half(
    client: HmaClient, vllm_config: Any, shape: EngineShape, settings: ConnectorSettings
) -> SchedulerHalf:
    transfer = vllm_config.kv_transfer_config
    events = vllm_config.kv_events_config
    with_events = events is not None and events.enable_kv_cache_events
    logger.info(
        "hma_triton: chunks of %d tokens (blocks of %s)%s",
        shape.chunk_tokens,
        sorted(set(shape.tokens_per_block.values())),
        f"; {shape.leave_tokens} tokens of a prompt are always computed"
        if shape.leave_tokens
        else "",
    )
    return SchedulerHalf(
        client,
        instance_id(vllm_config),
        shape,
        settings,
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        world_size=int(vllm_config.parallel_config.world_size),
        events=StoredEvents() if with_events else None,
    )
