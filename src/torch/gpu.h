// What of a GPU's tensors libtorch does not say without being built for CUDA. Any thread.
#pragma once

#include <cohort/buffer.h>
#include <cohort/torch/torch_api.h>

namespace cohort {

/// As a CUstream: the one in which libtorch works on this GPU now, in this thread. Throws Internal where it cannot be
/// told.
void* current_stream(at::Device gpu);
/// Where the tensor lies, with the current stream of a GPU. Throws InvalidArgument for what is neither the host's
/// memory nor CUDA's.
Device buffer_device(const at::Tensor& tensor);
/// The same of a kind of device, in words that are equal on all ranks: "" or " on cuda".
const char* device_text(const at::Tensor& tensor);

}  // namespace cohort
