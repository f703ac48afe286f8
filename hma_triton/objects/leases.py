"""What lookups promised: pins that end by release, by the last rank's retrieve, or by time.

One lease per (instance, request): a repeated lookup replaces it, so pins never add up. A lease
belongs to the connection that asked and ends with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hma_triton.objects.chunk_index import Records
from hma_triton.objects.namespace import Namespace
from hma_triton.objects.store import ObjectStore

LeaseKey = tuple[str, str]


@dataclass(slots=True, eq=False)
class Lease:
    """Pinned records of one (instance, request); `ranks` have not retrieved yet."""

    namespace: Namespace
    records: Records
    owner: bytes
    expires_ns: int
    ranks: set[int]


class LeaseTable:
    """All leases over one store; each lasts `lease_ns` nanoseconds at most."""

    def __init__(self, store: ObjectStore, lease_ns: int) -> None:
        self._store = store
        self._lease_ns = lease_ns
        # all leases last equally long, so the first one ends first
        self._leases: OrderedDict[LeaseKey, Lease] = OrderedDict()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, key: LeaseKey, namespace: Namespace, records: Records, owner: bytes, now_ns: int
    ) -> None:
        """Pin `records` for the key, in place of what it held before."""
        pinned = self._store.pin(namespace, records)
        self.release(key)
        if pinned.size:
            ranks = set(range(namespace.shape.world_size))
            expires = now_ns + self._lease_ns
            self._leases[key] = Lease(namespace, pinned, owner, expires, ranks)
        else:
            self._store.unpin(namespace, pinned)

    def retrieved(self, key: LeaseKey, rank: int) -> None:
        """One rank has its bytes; the last one ends the lease."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.ranks.discard(rank)
            if not lease.ranks:
                self.release(key)

    def release(self, key: LeaseKey) -> bool:
        """End the key's lease; whether there was one."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return False
        self._store.unpin(lease.namespace, lease.records)
        return True

    def release_owner(self, owner: bytes) -> int:
        """End all leases of a connection; gives how many."""
        keys = [key for key, lease in self._leases.items() if lease.owner == owner]
        for key in keys:
            self.release(key)
        return len(keys)

    def release_instance(self, instance_id: str) -> int:
        """End all leases of an instance; gives how many."""
        keys = [key for key in self._leases if key[0] == instance_id]
        for key in keys:
            self.release(key)
        return len(keys)

    def expire(self, now_ns: int) -> int:
        """End leases whose time is over; gives how many."""
        ended = 0
        while self._leases:
            key, lease = next(iter(self._leases.items()))
            if lease.expires_ns > now_ns:
                break
            self.release(key)
            ended += 1
        self.expired += ended
        return ended

    def next_expiry_ns(self) -> int | None:
        """When the first lease ends."""
        for lease in self._leases.values():
            return lease.expires_ns
        return None
