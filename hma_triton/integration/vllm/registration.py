"""A worker's pool, given to the server: at start-up, or later when the server was away then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hma_triton.client import HmaClient
from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import HmaError, RemoteError, ServerUnavailableError
from hma_triton.group_view import EngineGroupInfo, expand_engine_block_ids
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.embedded_server import EmbeddedServer, ensure_embedded_server
from hma_triton.integration.vllm.engine_identity import EngineIdentity, replicated_infos
from hma_triton.integration.vllm.kv_cache_groups import VllmRegistration, register_from_vllm
from hma_triton.integration.vllm.metadata import GroupIds
from hma_triton.integration.vllm.warn_once import logger
from hma_triton.messages import RegisterReply
from hma_triton.tensor_ipc import device_of, export_kv_caches
from hma_triton.tensor_ipc_cuda import StepEvents

GIB = 1 << 30
NOT_A_REFUSAL = ("unsupported_version", "shutting_down", "busy")
"""Codes of a server that cannot serve us now; any other code refuses the registration itself."""


class PoolRegistration:
    """What one rank registers, and whether the server has it."""

    def __init__(
        self,
        client: HmaClient,
        identity: EngineIdentity,
        kv_cache_config: Any,
        rank: int,
        chunk_tokens: int,
        settings: ConnectorSettings,
    ) -> None:
        self._client = client
        self._identity = identity
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._pool: VllmRegistration | None = None
        self._server: EmbeddedServer | None = None
        self._step_events: StepEvents | None = None
        self.rank = rank
        self.chunk_tokens = chunk_tokens
        self.registered = False

    @property
    def instance_id(self) -> str:
        """The engine's name for the server."""
        return self._identity.instance_id

    @property
    def infos(self) -> tuple[EngineGroupInfo, ...]:
        """One per block-id list of a request, in order."""
        return self._known_pool.infos

    @property
    def kv_caches(self) -> Mapping[str, Any]:
        """The edited caches by layer name, in registration order."""
        return self._known_pool.kv_caches

    @property
    def _known_pool(self) -> VllmRegistration:
        if self._pool is None:
            raise ServerUnavailableError("no pool yet: register_kv_caches comes first")
        return self._pool

    def expand(self, block_ids: GroupIds) -> list[list[int]]:
        """One block-id list per info."""
        return expand_engine_block_ids(self.infos, block_ids)

    def register(self, kv_caches: Mapping[str, Any]) -> bool:
        """Register at start-up. False: there is no server (yet); the reason is logged.

        Raises:
            HmaError: groups that cannot be served, no shared memory, or a refusal of the server.
        """
        self._pool = register_from_vllm(
            self._kv_cache_config, kv_caches, dcp_size=self._identity.dcp_size
        )
        # Later it would be too late: a running engine reads and writes the storage.
        export_kv_caches(self._pool.kv_caches)
        device = device_of(self._pool.kv_caches)
        if device.type == "cuda":
            self._step_events = StepEvents(device, CudaDriver(device.index or 0))
        try:
            if not self._settings.server_url:
                self._server = ensure_embedded_server(
                    self.instance_id,
                    int(self._settings.host_gb * GIB),
                    self._settings.start_timeout_s,
                )
            self._client.connect(self._settings.start_timeout_s)
            reply = self._send()
        except ServerUnavailableError as error:
            logger.warning("hma_triton: no cache server, the engine runs without it: %s", error)
            return False
        except RemoteError as error:
            if error.code not in NOT_A_REFUSAL:
                raise
            logger.warning("hma_triton: no use of this cache server: %s", error)
            return False
        self._log(reply)
        return True

    def retry(self) -> bool:
        """Register now, if the server can be had; never raises."""
        try:
            self._client.connect(self._settings.lookup_timeout_s)
            self._log(self._send())
        except HmaError as error:
            logger.debug("hma_triton: registration tried again: %s", error)
            return False
        return True

    def is_reachable(self, timeout_s: float) -> bool:
        """Whether the server answers within `timeout_s`."""
        try:
            self._client.ping(timeout_s)
        except HmaError:
            return False
        return True

    def step_event(self) -> Any:
        """What marks the end of this step's work on the pool's device; None on the CPU."""
        return None if self._step_events is None else self._step_events.mark()

    def registration_arguments(self) -> dict[str, Any]:
        """The arguments of the client's registration, without instance, pool and rank."""
        pool = self._known_pool
        names: Sequence[str] = list(pool.kv_caches)
        world_size = self._identity.world_size
        return {
            "model_name": self._identity.model_name,
            "world_size": world_size,
            "engine_type": "vllm",
            "layout_hints": pool.layout_hints.to_wire(),
            "engine_group_infos": pool.infos,
            "namespace": self._settings.namespace,
            "chunk_tokens": self.chunk_tokens,
            "facts": msgspec.structs.replace(self._identity.facts, edits=pool.layout_hints.edits),
            "replicated_infos": replicated_infos(
                self._kv_cache_config, names, pool.infos, world_size
            ),
        }

    def close(self) -> None:
        """Take the pool back, and end the server that this process started."""
        if self.registered and self._client.connected:
            try:
                self._client.unregister(
                    self.instance_id, self.rank, timeout_s=self._settings.timeout_s
                )
            except HmaError as error:
                logger.debug("hma_triton: unregister: %s", error)
        if self._step_events is not None:
            self._step_events.close()
        if self._server is not None:
            self._server.close()

    def _send(self) -> RegisterReply:
        reply = self._client.register_kv_caches(
            self.instance_id,
            self._known_pool.kv_caches,
            rank=self.rank,
            timeout_s=self._settings.start_timeout_s,
            **self.registration_arguments(),
        )
        self.registered = True
        return reply

    def _log(self, reply: RegisterReply) -> None:
        logger.info(
            "hma_triton: rank %d registered %d layers in %d groups; a chunk is %d tokens and %d"
            " bytes on this rank (%s)",
            self.rank,
            len(self.kv_caches),
            len(self.infos),
            reply.chunk_tokens,
            sum(reply.object_nbytes),
            reply.backend,
        )
