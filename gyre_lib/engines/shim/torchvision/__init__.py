"""Torchvision, absent: SGLang imports it for vision models, which this engine does not serve."""

from absent_package import declare_absent

declare_absent("torchvision", "0.28.0")
