"""Which families a test runs, and how its outputs are compared."""

from __future__ import annotations

import pytest
from support.engine_families import FAMILIES
from support.engine_process import Completion
from support.engine_rig import Rig, check_audit, difference


def families(*in_ci: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """All families except `but`; those not named run only with `-m long`."""
    return pytest.mark.parametrize(
        "rig",
        [
            pytest.param(name, marks=() if name in in_ci else pytest.mark.long)
            for name in FAMILIES
            if name not in but
        ],
        indirect=True,
    )


def check_equal(rig: Rig, ours: list[Completion], plain: list[Completion]) -> None:
    """Bit-equal log-probabilities.

    Not of an MLA hit against a cold run: there the engine's own suffix prefill differs from its
    prefill. Its bytes are compared by the audit, its hits with each other.
    """
    if rig.family.is_mla and any(one.cached_tokens for one in ours):
        assert check_audit(rig.audit_path, rig.family.chunk_tokens) > 0
        return
    found = [difference(one, other) for one, other in zip(ours, plain, strict=True)]
    assert max(found) == 0.0, found


def check_tokens(
    rig: Rig, ours: list[Completion], alone: list[Completion], together: list[Completion]
) -> None:
    """Equal tokens, wherever the engine without the connector repeats itself in a batch."""
    if rig.family.is_mla:
        return
    for one, single, batched in zip(ours, alone, together, strict=True):
        if single.tokens == batched.tokens:
            assert one.tokens == single.tokens
