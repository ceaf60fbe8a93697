// libcuda.so.1, as far as torch asks it: contexts, and memory that is mapped piece by piece.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>


#include "ledger.h"
#include "memory.h"
#include "process.h"
#include "streams.h"

using namespace stand_in;

using Guard = std::lock_guard<std::recursive_mutex>;

CUresult cuInit(unsigned) {
  const Guard guard(mutex());
  return initialize() == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

// Asked of memory alone: whether handles of it can be passed to other machines and processes.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  const Guard guard(mutex());
  *flags = 0;
  *active = has_context(device) || has_fault("every-device-in-use");
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

// What is not here is refused when it is called: torch asks for all that it might ever need.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found == nullptr ? reinterpret_cast<void*>(refuse) : found;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Virtual memory (CUDA Driver API, Virtual Memory Management): torch's expandable segments.

using Memory = std::shared_ptr<Physical>;

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, bytes, PROT_NONE, FLAGS, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(made);
  return made == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  const Guard guard(mutex());
  const Memory memory = Physical::allocate(properties->location.id, bytes);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Memory(memory));
  return CUDA_SUCCESS;
}

// The memory goes with the last of its handles and its mappings (CUDA Driver API, cuMemRelease).
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Guard guard(mutex());
  delete reinterpret_cast<Memory*>(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  const Guard guard(mutex());
  const char* made = map(*reinterpret_cast<Memory*>(handle), reinterpret_cast<void*>(address));
  return made == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;  // It is mapped for reading and writing.
}

// It waits for the device, as torch expects of it.
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const Guard guard(mutex());
  auto* piece = reinterpret_cast<char*>(address);
  for (size_t done = 0; done < bytes;) {
    const Memory memory = unmap(piece + done);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    finish_device(memory->device);
    done += memory->bytes;
  }
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(piece, bytes, PROT_NONE, FLAGS, -1, 0);  // Reserved as before.
  return CUDA_SUCCESS;
}
