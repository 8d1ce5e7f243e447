// optimizer.safetensors of a checkpoint as what Python's torch.optim.Optimizer.state_dict() returns. Any thread.
#pragma once

#include "base/result.h"
#include "formats/pt.h"
#include "formats/weights.h"

#include <string>

namespace cohort::formats {

/// {"state": {NUMBER: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [NUMBER...]}]}, parameters numbered in
/// the order of the groups. Tensors view `optimizer`. Corrupt, naming `name`, if it is not as docs/reference/
/// checkpoint-format.md says.
Result<PtValue> torch_optimizer(const Weights& optimizer, const std::string& name);

}  // namespace cohort::formats
