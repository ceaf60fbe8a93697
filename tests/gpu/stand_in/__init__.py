"""A stand-in for CUDA's runtime and driver, cuBLAS and NVML, under torch as it is for CUDA.

Memory of a device is host memory, and kernels do nothing; see docs/gpu.md. It is not a GPU.
"""
