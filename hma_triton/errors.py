"""One tree of errors. Every message names the value, the limit, and the layer, group or id.

::

    HmaError
     ├ GeometryError            (ValueError)      layouts and groups
     │   ├ AmbiguousLayoutError                   two readings fit; both are named
     │   ├ UnsupportedLayoutError                 refused by name
     │   └ GroupMismatchError                     infos against tensors: counts, layers, blocks
     ├ PlanError                (ValueError)      block ids, ranges, objects
     │   ├ BlockIdError                           a list too short, an id out of range
     │   └ AlignmentError                         a range not on a block or chunk edge
     ├ TransferError            (RuntimeError)    a copy that could not be done
     │   └ IncompleteRetrieveError                an id the engine gave has no stored bytes
     ├ CapacityError            (MemoryError)     arena, shared memory, pinned memory
     ├ ConfigError              (ValueError)      settings and files of settings
     ├ ProtocolError                              a malformed or unexpected message
     ├ RemoteError  .code                         the server answered with an error
     └ ServerUnavailableError   (ConnectionError) no server, or no answer in time
"""

from __future__ import annotations


class HmaError(Exception):
    """The root: ``except HmaError`` catches everything this package raises on purpose."""


class GeometryError(HmaError, ValueError):
    """A cache layout or a group of layers that cannot be served as given."""


class AmbiguousLayoutError(GeometryError):
    """Two readings of one tensor fit and nothing tells them apart. The message names both."""


class UnsupportedLayoutError(GeometryError):
    """A layout that is refused by its name: fragmented blocks, overlapping strides and the like."""


class GroupMismatchError(GeometryError):
    """Declared groups and real tensors differ, or a block or chunk does not divide."""


class PlanError(HmaError, ValueError):
    """A request for a copy that cannot be planned: block ids, token ranges, objects."""


class BlockIdError(PlanError):
    """A block-id list that is too short, or an id outside the pool."""


class AlignmentError(PlanError):
    """A token count or range that does not end on a block or chunk edge."""


class TransferError(HmaError, RuntimeError):
    """A copy that was planned but could not be finished."""


class IncompleteRetrieveError(TransferError):
    """The engine named a block to fill for which no stored bytes exist."""


class CapacityError(HmaError, MemoryError):
    """Not enough arena, shared memory or pinned memory."""


class ConfigError(HmaError, ValueError):
    """A setting, or a file of settings, that cannot be used."""


class ProtocolError(HmaError):
    """A malformed or unexpected message."""


class RemoteError(HmaError):
    """The server answered with an error; ``code`` is its stable name."""

    def __init__(self, message: str, code: str = "error") -> None:
        super().__init__(message)
        self.code = code


class ServerUnavailableError(HmaError, ConnectionError):
    """No server, or none that answered in time."""
