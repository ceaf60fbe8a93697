"""A stand-in for CUDA's runtime and driver, cuBLAS and NVML, for an unchanged torch for CUDA.

Device memory is host memory, and kernels do nothing; see docs/gpu.md.
"""
