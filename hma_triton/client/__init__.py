"""The client: `HmaClient`, and the tickets that its submitting calls give."""

from hma_triton.client.hma_client import HmaClient
from hma_triton.client.ticket import Ticket

__all__ = ["HmaClient", "Ticket"]
