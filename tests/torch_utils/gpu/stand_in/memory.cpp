// Memory of the devices and page-locked memory, both in the host's; copies are done at once.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "stand_in.h"

using namespace stand_in;

namespace {

constexpr std::size_t GRANULARITY = std::size_t{2} << 20;  // Sizes are rounded up to this.

struct Block {
  int device;  // -1 for page-locked memory
  std::size_t bytes;
};

auto& blocks = *new std::map<const char*, Block>;

const Block* find(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  auto found = blocks.upper_bound(wanted);
  if (found == blocks.begin()) return nullptr;
  --found;
  return wanted < found->first + found->second.bytes ? &found->second : nullptr;
}

bool is_on_device(const void* address) {
  const Block* block = find(address);
  return block != nullptr && block->device >= 0;
}

}  // namespace

cudaError_t cudaMalloc(void** address, size_t bytes) {
  USE_DEVICE();
  *address = nullptr;
  const size_t rounded = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (fails_allocation() || !take(current_device(), rounded)) {
    return fail(cudaErrorMemoryAllocation);
  }
  // Nothing of the host's memory is used but what is written to.
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *address = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
  blocks[static_cast<char*>(*address)] = {current_device(), rounded};
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  USE_DEVICE();
  if (address == nullptr) return cudaSuccess;
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return fail(cudaErrorInvalidValue);
  munmap(address, found->second.bytes);
  give_back(found->second.device, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  USE_DEVICE();
  *total = CAPACITY;
  *free = CAPACITY - ledger::used(current_device());
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  USE_DEVICE();
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*address == nullptr) return fail(cudaErrorMemoryAllocation);
  blocks[static_cast<char*>(*address)] = {-1, bytes};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  USE_DEVICE();
  if (blocks.erase(static_cast<char*>(address)) == 0) return fail(cudaErrorInvalidValue);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard<std::recursive_mutex> guard(mutex());
  const Block* block = find(address);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = is_on_device(address) ? cudaMemoryTypeDevice
                     : block != nullptr    ? cudaMemoryTypeHost
                                           : cudaMemoryTypeUnregistered;
  attributes->device = block == nullptr ? -1 : block->device;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  USE_DEVICE();
  std::memcpy(to, from, bytes);
  // A boolean that the program reads is what a kernel has found out, such as that all values are
  // finite. No kernel has looked: it is taken for a yes.
  if (bytes == 1 && is_on_device(from) && !is_on_device(to)) *static_cast<char*>(to) = 1;
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  USE_DEVICE();
  std::memset(address, value, bytes);
  return cudaSuccess;
}
