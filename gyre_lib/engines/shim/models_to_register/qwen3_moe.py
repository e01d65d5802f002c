"""Qwen3 mixture of experts."""

from sglang.srt.models.qwen3_moe import EntryClass as EntryClass
