"""The policy: megatron-core model construction and its weights in Hugging Face format.

Imported before anything of megatron-core, whose functions bind torch.compile when they are defined: on a machine without a GPU that
would compile each of them with a C++ compiler, per process and per shape, for nothing.
"""

import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    warnings.filterwarnings("ignore", message=".*Apex")
    warnings.filterwarnings("ignore", message="full scope is deprecated")
