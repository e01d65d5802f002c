"""Import stand-ins for SGLang's CPU engine. This folder goes on PYTHONPATH of engine processes only, and only when the device is cpu.

SGLang imports triton, torchvision and the compiled kernels of `sgl_kernel` unconditionally, although its CPU engine with the torch backend
calls almost none of them. Each folder here is a top-level package of that name; none of them may be importable by any other process.
"""
