"""The model families of the engine tests, with what they are expected to do."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# Prompt lengths of the sequential cases: several chunks and a tail; a last block boundary at an
# even and at an odd multiple of the block; a prompt that ends on a chunk's edge.
LENGTHS = (1301, 777, 700, 512)
TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class Family:
    """One model and the whole-chunk prefix that comes back for prompts of `LENGTHS` tokens.

    `is_mla`: the build turns the engine's own prefix cache off, and its prefill and suffix
    prefill differ. `is_recurrent`: hits exist only where a step ended on a block's edge.
    """

    name: str
    hits: tuple[int, int, int, int]
    block_tokens: int = 128
    chunk_tokens: int = 256
    is_mla: bool = False
    is_recurrent: bool = False

    @property
    def repeats_after_preemption(self) -> bool:
        """Whether a prefill computes outputs as the decode steps did that they came from."""
        return not self.is_mla and not self.is_recurrent

    def settings(self, model: str, **changes: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        values: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": 400,
            "max_model_len": 2048,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "seed": 0,
            "gpu_memory_utilization": 0.3,
        }
        return values | changes


_EVEN = (1280, 768, 512, 512)
FAMILIES = {
    family.name: family
    for family in (
        Family("gemma3", _EVEN),
        Family("gpt_oss", _EVEN),
        # the last token of a prompt is never served from recurrent state
        Family("qwen3_next", (1280, 768, 512, 256), 256, is_recurrent=True),
        # chunks of exactly one block: 700 tokens end at an odd multiple of it
        Family("lfm2", (1280, 768, 640, 384), chunk_tokens=128, is_recurrent=True),
        Family("deepseek_v2", (1280, 768, 512, 256), 16, is_mla=True),
        Family("gemma4", _EVEN),
        # the engine asks for no block of a chunk that ends with the prompt, and then needs it
        Family("llama4", (1280, 768, 512, 256)),
        Family("llama", _EVEN),
        Family("gemma3n", _EVEN),
        Family("ministral", _EVEN),
        Family("mistral_swa", _EVEN),
        Family("qwen3", _EVEN),
        Family("cohere2", _EVEN),
        Family("deepseek_v3", (1280, 768, 512, 256), 16, is_mla=True),
    )
}
MLA = tuple(family.name for family in FAMILIES.values() if family.is_mla)
CORE = ("gemma3", "gpt_oss", "qwen3_next", "lfm2", "deepseek_v2", "gemma4", "llama4", "llama")


def prompt(length: int, seed: int = 0, *, after: list[int] | None = None) -> list[int]:
    """`length` tokens that follow from the seed, behind the tokens of `after`."""
    source = random.Random(f"{length}/{seed}")
    head = list(after or ())
    return head + [source.randrange(5, 500) for _ in range(length - len(head))]


def prompts(seed: int = 0) -> list[list[int]]:
    """One prompt of each of `LENGTHS`, without common prefixes."""
    return [prompt(length, seed) for length in LENGTHS]
