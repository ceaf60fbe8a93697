// Calls of the runtime that hand something out. All work is done when it is submitted, kernels do
// nothing, and so little of what a device reports about itself matters.
#include <cstdio>
#include <cstring>

#include "stand_in.h"

using namespace stand_in;
namespace {

template <typename Handle>
cudaError_t make(Handle* handle) {
  USE_DEVICE();
  static char made;
  *handle = reinterpret_cast<Handle>(&made);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) { return make(made); }
cudaError_t cudaEventCreate(cudaEvent_t* made) { return make(made); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) { return make(made); }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  return function(data), cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int) {
  std::memset(prop, 0, sizeof *prop);
  std::strcpy(prop->name, "stand-in, no device");
  prop->major = 9;
  prop->multiProcessorCount = 132;
  prop->totalGlobalMem = CAPACITY;
  prop->warpSize = 32;
  prop->maxThreadsPerMultiProcessor = 2048;
  prop->maxThreadsPerBlock = 1024;
  prop->sharedMemPerBlock = prop->sharedMemPerBlockOptin = prop->sharedMemPerMultiprocessor = 48 << 10;
  for (int axis = 0; axis < 3; ++axis) prop->maxThreadsDim[axis] = prop->maxGridSize[axis] = 64;
  prop->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
           : attribute == cudaDevAttrWarpSize               ? 32
                                                            : 1024;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return std::snprintf(text, length, "0000:%02x:00.0", device), cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *greatest = -5;
  return *least = 0, cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

// What the compiler's own code calls: to register kernels, and to launch them.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, cudaStream_t* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  return *stream = nullptr, cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) { return make(kernel); }

// For the calls in stubs.cpp that fail on a broken device.
int stand_in_use_device() {
  USE_DEVICE();
  return cudaSuccess;
}

}  // extern "C"
