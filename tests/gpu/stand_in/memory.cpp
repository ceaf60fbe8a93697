#include "memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

#include "capture.h"
#include "ledger.h"
#include "process.h"
#include "streams.h"

namespace stand_in {

namespace {

using Mappings = std::map<const char*, std::shared_ptr<Physical>>;

Mappings& mappings() {
  static auto& all = *new Mappings;
  return all;
}

// The mapping that an address lies in.
Mappings::iterator find(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  auto found = mappings().upper_bound(wanted);
  if (found == mappings().begin()) return mappings().end();
  --found;
  return wanted < found->first + found->second->bytes ? found : mappings().end();
}

char* map_file(int file, std::size_t bytes, void* address) {
  const int fixed = address == nullptr ? 0 : MAP_FIXED;
  void* made = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, file, 0);
  return made == MAP_FAILED ? nullptr : static_cast<char*>(made);
}

}  // namespace

std::shared_ptr<Physical> Physical::allocate(int device, std::size_t bytes) {
  if (!take(device, bytes)) return nullptr;
  // Nothing of the host's memory is used but what is written to.
  const int file = memfd_create("device-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    if (file >= 0) close(file);
    give_back(device, bytes);
    return nullptr;
  }
  return std::shared_ptr<Physical>(new Physical(device, bytes, file));
}

Physical::~Physical() {
  close(file);
  give_back(device, bytes);
}

char* map(const std::shared_ptr<Physical>& memory, void* address) {
  char* made = map_file(memory->file, memory->bytes, address);
  if (made != nullptr) mappings()[made] = memory;
  return made;
}

std::shared_ptr<Physical> unmap(void* address) {
  const auto found = mappings().find(static_cast<char*>(address));
  if (found == mappings().end()) return nullptr;
  const std::shared_ptr<Physical> memory = found->second;
  munmap(address, memory->bytes);
  mappings().erase(found);
  return memory;
}

bool is_on_device(const void* address) { return find(address) != mappings().end(); }

int device_of(const void* address) {
  return is_on_device(address) ? find(address)->second->device : -1;
}

}  // namespace stand_in

using namespace stand_in;

cudaError_t cudaMalloc(void** address, size_t bytes) {
  USE_DEVICE();
  *address = nullptr;
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  const size_t rounded = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  const auto memory = Physical::allocate(current_device(), rounded);
  if (memory) *address = map(memory);
  return *address == nullptr ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

// It may wait for the device (CUDA Runtime API, cudaFree), and torch relies on that: it gives
// segments back with work on their own stream still queued.
cudaError_t cudaFree(void* address) {
  USE_DEVICE();
  if (address == nullptr) return cudaSuccess;
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  finish_device(current_device());
  return unmap(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  USE_DEVICE();
  *total = ledger::CAPACITY;
  *free = ledger::CAPACITY - ledger::used(current_device());
  return cudaSuccess;
}

// Memory for another process: the name of its file there.
struct Handle {
  pid_t pid;
  int file;
  size_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  USE_DEVICE();
  const auto found = find(address);
  if (found == mappings().end()) return fail(cudaErrorInvalidValue);
  const Handle made{getpid(), found->second->file, found->second->bytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &made, sizeof made);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  USE_DEVICE();
  Handle given;
  std::memcpy(&given, &handle, sizeof given);
  const auto pid = std::to_string(given.pid), number = std::to_string(given.file);
  const int file = open(("/proc/" + pid + "/fd/" + number).c_str(), O_RDWR | O_CLOEXEC);
  *address = file < 0 ? nullptr : map_file(file, given.bytes, nullptr);
  if (file >= 0) close(file);
  return *address == nullptr ? fail(cudaErrorInvalidResourceHandle) : cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }  // Mapped until the process ends.

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  std::memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}

// Another process's event: reached.
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
  return cudaEventCreate(event);
}
