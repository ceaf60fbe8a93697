// libnvidia-ml.so.1: what all processes hold. Its header is in no package, so that its types are
// declared here (NVML API Reference).
#include <cstring>

#include "ledger.h"

using namespace stand_in;

extern "C" {

struct nvmlMemory_t {
  unsigned long long total, free, used;
};

struct nvmlProcessInfo_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
};

constexpr int NVML_ERROR_INVALID_ARGUMENT = 2;
constexpr int NVML_ERROR_INSUFFICIENT_SIZE = 7;

// A handle is the device's number plus one: null is none.
static int device_of(void* handle) { return static_cast<int>(reinterpret_cast<long>(handle)) - 1; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(ledger::device_count());
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= static_cast<unsigned>(ledger::device_count())) return NVML_ERROR_INVALID_ARGUMENT;
  *handle = reinterpret_cast<void*>(static_cast<long>(index) + 1);
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  // "0000:01:00.0" is device 1; see cudaDeviceGetPCIBusId.
  return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(id[6] - '0'), handle);
}

int nvmlDeviceGetMemoryInfo(void* handle, nvmlMemory_t* memory) {
  memory->total = ledger::CAPACITY;
  memory->used = ledger::used(device_of(handle));
  memory->free = memory->total - memory->used;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count,
                                            nvmlProcessInfo_t* processes) {
  const auto entries = ledger::read(device_of(handle));
  const unsigned room = *count;
  *count = static_cast<unsigned>(entries.size());
  if (*count > room) return NVML_ERROR_INSUFFICIENT_SIZE;
  constexpr unsigned NONE = ~0u;  // No part of a device.
  for (const auto& entry : entries) *processes++ = {entry.pid, entry.bytes, NONE, NONE};
  return 0;
}

// What torch asks for by this name has the same layout in libraries of today.
int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count,
                                         nvmlProcessInfo_t* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

// torch looks these up with the others, and does not call them here.
constexpr int NVML_ERROR_NOT_SUPPORTED = 3;
int nvmlDeviceGetNvLinkRemoteDeviceType(...) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(...) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(...) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(...) { return NVML_ERROR_NOT_SUPPORTED; }

const char* nvmlErrorString(int) { return "an error of the stand-in's NVML"; }

}  // extern "C"
