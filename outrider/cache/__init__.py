"""Key and value pools of blocks, a block table per sequence: stage, then commit a path or discard."""

from outrider.cache.blocks import BLOCK_SLOTS, BlockAllocator
from outrider.cache.manager import CacheManager, Slots

__all__ = ["BLOCK_SLOTS", "BlockAllocator", "CacheManager", "Slots"]
