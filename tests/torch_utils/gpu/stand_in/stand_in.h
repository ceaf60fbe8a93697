// This process, its devices and its faults.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace stand_in {

constexpr std::size_t MIB = std::size_t{1} << 20;
constexpr std::size_t CAPACITY = 40960 * MIB;  // Of one device,
constexpr std::size_t RESERVED = 600 * MIB;    // of which the driver keeps this for itself,
constexpr std::size_t CONTEXT = 500 * MIB;     // and a context of one process costs this.

// Calls come from any thread; each holds this while it runs.
std::recursive_mutex& mutex();

// Return an error, and keep it for this thread's cudaGetLastError.
cudaError_t fail(cudaError_t error);

// Whether stand_in_set_fault names this fault.
bool has_fault(const char* name);

// Whether stand_in_set_fault("out of memory", calls) has chosen this allocation.
bool fails_allocation();

int device_count();  // As CUDA_STAND_IN_DEVICES says; one without it.
int current_device();
bool is_initialized();

// What cuInit does: afterwards, a forked child cannot use CUDA.
cudaError_t initialize();

// Initialise, and make the primary context of the current device unless it exists: so does the
// first call that needs one (CUDA C++ Programming Guide, Initialization). A broken device refuses
// every call from then on.
cudaError_t use_device();

bool has_context(int device);

// Count memory of a device as held by this process; false if there is not so much.
bool take(int device, std::size_t bytes);
void give_back(int device, std::size_t bytes);

// What each process holds of each device: a folder with a file for each, which all of them read.
namespace ledger {

struct Entry {
  unsigned pid;
  std::size_t bytes;
};

// Keep a file named "nvidia-uvm" open, as cuInit and NVML do.
void open_driver();

void write(int device, std::size_t bytes);
void clear();  // Forget this process, at its end.
std::vector<Entry> read(int device);
std::size_t used(int device);  // What all processes and the driver hold.

}  // namespace ledger

}  // namespace stand_in

// What every call that needs the current device begins with.
#define USE_DEVICE()                                                          \
  const std::lock_guard<std::recursive_mutex> guard(::stand_in::mutex());     \
  if (const cudaError_t refused = ::stand_in::use_device()) return refused
