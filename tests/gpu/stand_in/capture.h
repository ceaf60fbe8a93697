// The capture of streams into graphs, and what is prohibited meanwhile.
#pragma once

#include <cuda_runtime_api.h>

#include "streams.h"

namespace stand_in {

// For a call that waits for a stream or asks how far it is, which has no answer for what is only
// captured: it fails, and so does the capture (CUDA C++ Programming Guide, Prohibited and Unhandled
// Operations).
cudaError_t refuse_if_captured(const Stream& stream);

// For a call that CUDA counts as potentially unsafe during a capture, because it is not queued in a
// stream: cudaMalloc, for one. Who is refused depends on the mode of each capture and of the calling
// thread (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode).
cudaError_t refuse_if_unsafe();

}  // namespace stand_in
