// libcuda.so.1, as far as torch and the tests ask it.
#include <cuda.h>
#include <dlfcn.h>

#include "stand_in.h"

using namespace stand_in;

using Guard = std::lock_guard<std::recursive_mutex>;

CUresult cuInit(unsigned) {
  const Guard guard(mutex());
  return initialize() == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGetCount(int* count) {
  const Guard guard(mutex());
  if (!is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  const Guard guard(mutex());
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::size_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  const Guard guard(mutex());
  *context = nullptr;
  return has_context(current_device()) ? cuDevicePrimaryCtxRetain(context, current_device())
                                       : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stand-in's driver";
  return CUDA_SUCCESS;
}

static CUresult refuse(...) { return CUDA_ERROR_NOT_SUPPORTED; }

// What is missing here is refused when it is called: torch asks for all that it might ever need.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found == nullptr ? reinterpret_cast<void*>(refuse) : found;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
