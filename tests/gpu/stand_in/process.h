// This process and its devices: initialisation, contexts, errors, forks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>

namespace stand_in {

// Calls come from any thread; each holds this while it runs.
std::recursive_mutex& mutex();

// Return an error, and keep it for this thread's cudaGetLastError.
cudaError_t fail(cudaError_t error);

// Whether CUDA_STAND_IN_FAULT names this fault: what a negative control switches on.
bool has_fault(const char* name);

int current_device();

// What cuInit does: afterwards, a forked child cannot use CUDA.
cudaError_t initialize();

// Initialise, and make the primary context of the current device unless it is there: so does the
// first call that needs one (CUDA C++ Programming Guide, Initialization).
cudaError_t use_device();

bool has_context(int device);

// Count memory of a device as held by this process; false if there is not so much.
bool take(int device, std::size_t bytes);
void give_back(int device, std::size_t bytes);

}  // namespace stand_in

// What every call that needs the current device begins with.
#define USE_DEVICE()                                                          \
  const std::lock_guard<std::recursive_mutex> guard(::stand_in::mutex());     \
  if (const cudaError_t refused = ::stand_in::use_device()) return refused
