"""Pools of key and value blocks, a block table per sequence: stage, then commit or discard."""

from outrider.cache.blocks import BLOCK_SLOTS, BlockAllocator
from outrider.cache.manager import CacheManager, LayerPool, Slots
from outrider.cache.prefixes import PrefixIndex

__all__ = ["BLOCK_SLOTS", "BlockAllocator", "CacheManager", "LayerPool", "PrefixIndex", "Slots"]
