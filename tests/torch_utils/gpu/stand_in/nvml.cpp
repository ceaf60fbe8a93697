// libnvidia-ml.so.1: what all processes hold. Its header is in no package, so that its types are
// declared here (NVML API Reference).
#include "stand_in.h"

using namespace stand_in;

extern "C" {

struct nvmlProcessInfo_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
};

constexpr int INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7;

// A handle is the device's number plus one: null is none.
static int device_of(void* handle) { return static_cast<int>(reinterpret_cast<long>(handle)) - 1; }

// It opens the driver's file, as driver 580 does, and makes no context.
int nvmlInit_v2() {
  ledger::open_driver();
  return 0;
}
int nvmlInit() { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(device_count());
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= static_cast<unsigned>(device_count())) return INVALID_ARGUMENT;
  *handle = reinterpret_cast<void*>(static_cast<long>(index) + 1);
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  // "0000:01:00.0" is device 1; see cudaDeviceGetPCIBusId.
  return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(id[6] - '0'), handle);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count,
                                            nvmlProcessInfo_t* processes) {
  const auto entries = ledger::read(device_of(handle));
  const unsigned room = *count;
  *count = static_cast<unsigned>(entries.size());
  if (*count > room) return INSUFFICIENT_SIZE;
  constexpr unsigned NONE = ~0u;  // No part of a device.
  for (const auto& entry : entries) *processes++ = {entry.pid, entry.bytes, NONE, NONE};
  return 0;
}

// What torch asks for by this name has the same layout in libraries of today.
int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, nvmlProcessInfo_t* found) {
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
}

}  // extern "C"
