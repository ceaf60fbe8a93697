// Kernels do nothing, but for the one of torch.cuda._sleep, which lasts until somebody waits.
#include <cuda_runtime_api.h>

#include <cstring>
#include <set>
#include <vector>

#include "process.h"
#include "streams.h"

using namespace stand_in;

namespace {

std::set<const void*>& spinning() {
  static auto& kernels = *new std::set<const void*>;
  return kernels;
}

// The configuration of kernel<<<...>>>, from its evaluation to the launch.
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  USE_DEVICE();
  if (spinning().count(kernel) != 0) {
    stream_of(stream).submit(Task{Task::Kind::SPIN, {}, nullptr});
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->stream);
}

// What the compiler's own code calls: to register kernels, and to launch them.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  if (std::strstr(name, "spin_kernel") != nullptr) spinning().insert(kernel);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       cudaStream_t* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *stream = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t,
                               cudaStream_t stream) {
  return launch(kernel, stream);
}

}  // extern "C"
