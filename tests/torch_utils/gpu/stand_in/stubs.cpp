// Calls that succeed and do nothing. They are named without the headers' types: a caller's
// arguments are of no interest, and 0 is success in each of the libraries.
#include <cstring>

#define SUCCEEDS(name) \
  extern "C" int name(...) { return 0; }

// These set their first argument as well.
#define ANSWERS(name, value) \
  extern "C" int name(int* answer, ...) { return *answer = value, 0; }

ANSWERS(cudaDeviceCanAccessPeer, 0) ANSWERS(cudaDriverGetVersion, 13000)
ANSWERS(cudaRuntimeGetVersion, 13000) ANSWERS(nvmlSystemGetCudaDriverVersion_v2, 13000)
ANSWERS(cuDeviceGetAttribute, 0)
ANSWERS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)

// These need a device, and fail if it is broken.
extern "C" int stand_in_use_device();
#define USES_DEVICE(name) \
  extern "C" int name(...) { return stand_in_use_device(); }

USES_DEVICE(cudaStreamQuery) USES_DEVICE(cudaStreamSynchronize) USES_DEVICE(cudaStreamWaitEvent)
USES_DEVICE(cudaDeviceSynchronize) USES_DEVICE(cudaEventQuery) USES_DEVICE(cudaEventRecord)
USES_DEVICE(cudaEventRecordWithFlags) USES_DEVICE(cudaEventSynchronize)
USES_DEVICE(cudaLaunchKernel) USES_DEVICE(cudaLaunchKernelExC) USES_DEVICE(__cudaLaunchKernel)

// The rest of the CUDA runtime.
SUCCEEDS(__cudaRegisterFatBinaryEnd) SUCCEEDS(__cudaRegisterFunction)
SUCCEEDS(__cudaRegisterVar) SUCCEEDS(__cudaUnregisterFatBinary)
SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaEventDestroy) SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaMemcpyToSymbol) SUCCEEDS(cudaStreamDestroy)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)

// The driver.
SUCCEEDS(cuCtxSetCurrent)

// NVML. torch looks the first four up with the others.
SUCCEEDS(nvmlDeviceGetNvLinkRemoteDeviceType) SUCCEEDS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
SUCCEEDS(nvmlDeviceGetGpuFabricInfoV)
SUCCEEDS(nvmlShutdown)

// cuBLAS: products are not computed. Its workspaces are torch's, from its caching allocator.
SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode) SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasSgemv_v2) SUCCEEDS(cublasSgemmStridedBatched) SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx) SUCCEEDS(cublasLtGetVersion) SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulDescCreate) SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute) SUCCEEDS(cublasLtMatmulPreferenceCreate)
SUCCEEDS(cublasLtMatmulPreferenceDestroy) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutCreate) SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)

// Those that hand something out.
extern "C" {

int cublasCreate_v2(void** handle) {
  static char made;
  *handle = &made;
  return 0;
}

int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* algorithms, int* count) {
  std::memset(algorithms, 0, 64);  // The algorithm, of a cublasLtMatmulHeuristicResult_t.
  *count = 1;
  return 0;
}

}  // extern "C"
