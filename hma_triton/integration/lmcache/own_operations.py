"""LMCache's own operations as they were before ours: what falls through goes to them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.integration.lmcache.operation import read_format
from hma_triton.integration.lmcache.plan_types import BatchStep, KernelGroupSpec, StagingCopy
from hma_triton.integration.lmcache.pools import pointer_count


@dataclass(frozen=True, slots=True)
class OwnOperations:
    """Operations and plan types of one `device_ops` object, read before ours were put there.

    `execute_plan` and the three plan types are None where LMCache has no compiled extension.
    """

    device_ops: Any
    transfer: Callable[..., None]
    execute_plan: Callable[..., None] | None
    kernel_group_spec: Callable[..., Any] | None
    staging_copy: Callable[..., Any] | None
    launch_var: Callable[..., Any] | None
    batch_step: Callable[..., Any] | None

    def copy_staging(
        self,
        copies: Sequence[StagingCopy],
        direction: Any,
        device: torch.device,
        host_buffer_alignment: int,
    ) -> None:
        """Whole objects between host and staging slots, in order, on the current stream.

        LMCache's own copy goes to a CUDA runtime wherever one is installed, and fails on a machine
        without a device; between host addresses it is not needed.
        """
        for copy in copies:
            if device.type == "cpu":
                ctypes.memmove(copy.dest, copy.src, copy.nbytes)
                continue
            self.device_ops.lmcache_memcpy_async(
                copy.dest,
                copy.src,
                copy.nbytes,
                direction,
                copy.host_offset,
                host_buffer_alignment,
            )

    def tensor_at(self, address: int, count: int, device: torch.device) -> torch.Tensor:
        """`count` int64 at `address` of `device`, as LMCache's backend makes them a tensor."""
        tensor: torch.Tensor = self.device_ops.tensor_from_ptr(
            address, (count,), torch.int64, device
        )
        return tensor

    def run_plan(
        self,
        direction: Any,
        device: torch.device | str,
        host_buffer_alignment: int,
        specs: Sequence[KernelGroupSpec],
        steps: Sequence[BatchStep],
    ) -> None:
        """The plan on LMCache's own entry, or launch by launch on its own operation."""
        if self.execute_plan is not None:
            self._run_native(direction, device, host_buffer_alignment, specs, steps)
            return
        retrieve, place = int(direction) == 0, torch.device(device)
        for step in steps:
            if retrieve:
                self.copy_staging(step.staging, direction, place, host_buffer_alignment)
            for launch in step.launches:
                self._launch(specs[launch.group_idx], launch, direction, place)
            if not retrieve:
                self.copy_staging(step.staging, direction, place, host_buffer_alignment)

    def _launch(
        self, spec: KernelGroupSpec, launch: Any, direction: Any, device: torch.device
    ) -> None:
        count = pointer_count(read_format(spec.engine_kv_format), int(spec.shape_desc.nl))
        ids_address = spec.block_ids_base + launch.block_ids_offset * 8
        self.transfer(
            self.tensor_at(spec.paged_buffer_ptrs, count, device),
            list(spec.lmcache_objects_ptrs[: launch.num_objects]),
            self.tensor_at(ids_address, launch.total_blocks, device),
            device,
            direction,
            spec.shape_desc,
            spec.lmcache_chunk_size,
            spec.engine_kv_format,
            launch.skip_prefix_n_blocks,
        )

    def _run_native(
        self,
        direction: Any,
        device: torch.device | str,
        host_buffer_alignment: int,
        specs: Sequence[KernelGroupSpec],
        steps: Sequence[BatchStep],
    ) -> None:
        assert self.execute_plan and self.kernel_group_spec and self.batch_step
        assert self.staging_copy and self.launch_var
        native_specs = [
            self.kernel_group_spec(
                spec.paged_buffer_ptrs,
                list(spec.lmcache_objects_ptrs),
                spec.shape_desc,
                spec.lmcache_chunk_size,
                spec.engine_kv_format,
                spec.block_ids_base,
                spec.block_ids_capacity,
            )
            for spec in specs
        ]
        native_steps = [
            self.batch_step(
                [self.staging_copy(c.dest, c.src, c.nbytes, c.host_offset) for c in step.staging],
                [
                    self.launch_var(
                        v.group_idx,
                        v.block_ids_offset,
                        v.total_blocks,
                        v.num_objects,
                        v.skip_prefix_n_blocks,
                    )
                    for v in step.launches
                ],
            )
            for step in steps
        ]
        self.execute_plan(direction, device, host_buffer_alignment, native_specs, native_steps)
