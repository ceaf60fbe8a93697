#include "process.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "ledger.h"

namespace stand_in {

namespace {

// None of these is destroyed: torch's own destructors call CUDA after those of this library.
std::map<int, std::size_t>& contexts() {  // Of each device with a context, the memory in bytes.
  static auto& held = *new std::map<int, std::size_t>;
  return held;
}

pid_t initialized_by = 0;
bool is_forked = false;  // From a process that had initialised the driver.
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

void at_exit() {
  if (initialized_by == getpid()) ledger::clear();
}

void before_fork() { mutex().lock(); }
void in_parent() { mutex().unlock(); }
void in_child() {
  is_forked = is_forked || initialized_by != 0;
  mutex().unlock();
}

}  // namespace

std::recursive_mutex& mutex() {
  static auto& made = *new std::recursive_mutex;
  return made;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

bool has_fault(const char* name) {
  const char* fault = std::getenv("CUDA_STAND_IN_FAULT");
  return fault != nullptr && std::strcmp(fault, name) == 0;
}

int current_device() { return current; }

cudaError_t initialize() {
  if (is_forked) return fail(cudaErrorInitializationError);
  if (initialized_by == 0) {
    initialized_by = getpid();
    ledger::open_driver();
    std::atexit(at_exit);
    pthread_atfork(before_fork, in_parent, in_child);
  }
  return cudaSuccess;
}

cudaError_t use_device() {
  if (const cudaError_t refused = initialize()) return refused;
  if (!has_context(current)) {
    contexts()[current] = ledger::CONTEXT;
    ledger::write(current, ledger::CONTEXT);
  }
  return cudaSuccess;
}

bool has_context(int device) { return contexts().count(device) != 0; }

bool take(int device, std::size_t bytes) {
  if (ledger::used(device) + bytes > ledger::CAPACITY) return false;
  ledger::write(device, contexts()[device] += bytes);
  return true;
}

void give_back(int device, std::size_t bytes) {
  if (has_fault("keeps-freed-memory")) return;
  ledger::write(device, contexts()[device] -= bytes);
}

}  // namespace stand_in

using namespace stand_in;

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard<std::recursive_mutex> guard(mutex());
  if (const cudaError_t refused = initialize()) return refused;
  *count = ledger::device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

// From CUDA 12 on it makes the context at once (CUDA Runtime API, cudaSetDevice).
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= ledger::device_count()) return fail(cudaErrorInvalidDevice);
  current = device;
  USE_DEVICE();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
