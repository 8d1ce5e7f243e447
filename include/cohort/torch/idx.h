// IDX files, the format of MNIST, as tensors. A pure function: any thread may call.
#pragma once

#include <cohort/torch/torch_api.h>

#include <string>

namespace cohort::data {

/// Reads an IDX file, plain or gzip (told apart by content), into a tensor of its shape and type: MNIST's images are
/// uint8 [60000, 28, 28], its labels uint8 [60000]. Throws Unavailable if the file does not exist, Io if it cannot be
/// read, Corrupt, naming the file and what is wrong, if it is damaged or no IDX file.
at::Tensor read_idx(const std::string& path);

}  // namespace cohort::data
