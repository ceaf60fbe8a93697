// Page-locked host memory, and copies between the host and a device.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "capture.h"
#include "memory.h"
#include "process.h"
#include "streams.h"

using namespace stand_in;

namespace {

std::map<const char*, size_t>& page_locked() {
  static auto& all = *new std::map<const char*, size_t>;
  return all;
}

bool is_page_locked(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  auto found = page_locked().upper_bound(wanted);
  if (found == page_locked().begin()) return false;
  --found;
  return wanted < found->first + found->second;
}

bool is_pageable(const void* address) {
  return !is_on_device(address) && !is_page_locked(address);
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 1 && is_on_device(from) && !is_on_device(to)) {
    // A single boolean that the program reads is what a kernel has found out, such as that all
    // values are finite. No kernel has looked: it is taken for a yes.
    *static_cast<char*>(to) = 1;
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*address == nullptr) return fail(cudaErrorMemoryAllocation);
  page_locked()[static_cast<char*>(*address)] = bytes;
  return cudaSuccess;
}

// That it waits is written nowhere: queued work that still reads this memory reads rubbish.
cudaError_t cudaFreeHost(void* address) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  const auto found = page_locked().find(static_cast<char*>(address));
  if (found == page_locked().end()) return fail(cudaErrorInvalidValue);
  std::memset(address, 0xff, found->second);
  finish_device(current_device());
  page_locked().erase(found);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  page_locked()[static_cast<char*>(address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  USE_DEVICE();
  if (const cudaError_t refused = refuse_if_unsafe()) return refused;
  const bool was_there = page_locked().erase(static_cast<char*>(address)) != 0;
  return was_there ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard<std::recursive_mutex> guard(mutex());
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = is_on_device(address)     ? cudaMemoryTypeDevice
                     : is_page_locked(address) ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  attributes->device = device_of(address);
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

// With pageable host memory it returns when the copy is done, or has been staged (CUDA Runtime API,
// API synchronization behavior).
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  USE_DEVICE();
  Stream& within = stream_of(stream);
  if (is_pageable(to) || is_pageable(from)) {
    if (const cudaError_t refused = refuse_if_captured(within)) return refused;
    within.finish();
  }
  within.submit([=] { copy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  USE_DEVICE();
  stream_of(stream).submit([=] { std::memset(address, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}
