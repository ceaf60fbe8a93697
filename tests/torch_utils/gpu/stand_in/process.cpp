#include "stand_in.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

namespace stand_in {

namespace {

// None of these is destroyed: torch's own destructors call CUDA after those of this library.
auto& contexts = *new std::map<int, std::size_t>;  // the bytes on each device with a context
auto& made_mutex = *new std::recursive_mutex;

pid_t initialized_by = 0;
bool is_forked = false;  // From a process that had initialised the driver.
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::string& chosen_fault = *new std::string;
int calls_until_fault = 0;

void at_exit() {
  if (initialized_by == getpid()) ledger::clear();
}

void before_fork() { made_mutex.lock(); }
void in_parent() { made_mutex.unlock(); }
void in_child() {
  is_forked = is_forked || initialized_by != 0;
  made_mutex.unlock();
}

}  // namespace

std::recursive_mutex& mutex() { return made_mutex; }
int current_device() { return current; }
bool is_initialized() { return initialized_by != 0 && !is_forked; }
bool has_context(int device) { return contexts.count(device) != 0; }
cudaError_t fail(cudaError_t error) { return last_error = error; }

bool has_fault(const char* name) {
  return chosen_fault == name;
}

bool fails_allocation() { return has_fault("out of memory") && --calls_until_fault <= 0; }

int device_count() {
  const char* count = std::getenv("CUDA_STAND_IN_DEVICES");
  return count == nullptr ? 1 : std::atoi(count);
}

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
  if (has_fault("broken device")) return fail(cudaErrorLaunchFailure);
  if (!has_context(current)) {
    contexts[current] = CONTEXT;
    ledger::write(current, CONTEXT);
  }
  return cudaSuccess;
}

bool take(int device, std::size_t bytes) {
  if (ledger::used(device) + bytes > CAPACITY) return false;
  ledger::write(device, contexts[device] += bytes);
  return true;
}

void give_back(int device, std::size_t bytes) {
  ledger::write(device, contexts[device] -= bytes);
}

// The number of bytes is the size of a sparse file, in a folder that all processes read.
namespace ledger {

static std::string path(const std::string& name) {
  return std::string(std::getenv("CUDA_STAND_IN")) + "/" + name;
}

static int opened(const std::string& name) {
  return open(path(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

void open_driver() { opened("nvidia-uvm"); }

void write(int device, std::size_t bytes) {
  const int file = opened(std::to_string(getpid()) + "-" + std::to_string(device));
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
  close(file);
}

void clear() {
  for (int device = 0; device < device_count(); ++device) {
    unlink(path(std::to_string(getpid()) + "-" + std::to_string(device)).c_str());
  }
}

std::vector<Entry> read(int device) {
  std::vector<Entry> found;
  for (const auto& file : std::filesystem::directory_iterator(path(""))) {
    unsigned pid = 0;
    int of = 0;
    if (std::sscanf(file.path().filename().c_str(), "%u-%d", &pid, &of) != 2) continue;
    // A process that was killed has left its file: the driver has taken everything back.
    if (of != device || kill(static_cast<pid_t>(pid), 0) != 0) continue;
    std::error_code ended;
    const auto bytes = std::filesystem::file_size(file, ended);
    if (!ended) found.push_back({pid, bytes});
  }
  return found;
}

std::size_t used(int device) {
  std::size_t bytes = RESERVED;
  for (const Entry& entry : read(device)) bytes += entry.bytes;
  return bytes;
}

}  // namespace ledger

}  // namespace stand_in

using namespace stand_in;

// For tests, through ctypes: a fault from now on, until another name. "out of memory" fails the
// allocation so many calls later and all after it.
extern "C" void stand_in_set_fault(const char* name, int calls) {
  const std::lock_guard<std::recursive_mutex> guard(mutex());
  chosen_fault = name;
  calls_until_fault = calls;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard<std::recursive_mutex> guard(mutex());
  if (const cudaError_t refused = initialize()) return refused;
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }

// From CUDA 12 on it makes the context at once (CUDA Runtime API, cudaSetDevice).
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  current = device;
  USE_DEVICE();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
