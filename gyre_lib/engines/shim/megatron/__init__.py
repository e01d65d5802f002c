"""Megatron, absent from engines: SGLang imports it for a debugging aid if it is there, which costs seconds and is never used."""

raise ImportError("engines run without megatron")
