// Calls that succeed and do nothing. They are named without the headers' types: a caller's
// arguments are of no interest, and 0 is success in each of the libraries.

#include <cstring>

#define SUCCEEDS(name) \
  extern "C" int name(...) { return 0; }

// The CUDA runtime.
SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaGraphDebugDotPrint)
SUCCEEDS(cudaMemcpyToSymbol)

// The driver.
SUCCEEDS(cuCtxSetCurrent)

// NVML.
SUCCEEDS(nvmlInit)  // By this name for torch's Python, by the next one for the others.
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlInitWithFlags)
SUCCEEDS(nvmlShutdown)

// cuBLAS: products are not computed. Its workspaces are torch's, from its caching allocator.
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasLtGetVersion)
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulDescCreate)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceCreate)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutCreate)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
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
