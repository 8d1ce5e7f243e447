// The table of the methods of training, for C++ and Python. Code that uses a method which is not listed here passes its
// own Method to Transaction.
#pragma once

#include "train/step/method.h"

namespace cohort::step {

/// nn::DistributedDataParallel. If training state is `divided`, the set of parameters is fixed.
Method data_parallel(bool divided);
/// nn::PowerSGDState.
Method power_sgd();
/// optim::Sharded.
Method sharded();
/// optim::LocalSGD and DiLoCo.
Method local_steps();

}  // namespace cohort::step
