// Registrations of the methods of training: the one table of them, for C++ and Python. A method that is not here is
// given by whoever makes its Transaction.
#pragma once

#include "train/step/method.h"

namespace cohort::step {

/// nn::DistributedDataParallel. Which parameters there are is fixed where training state is `divided`.
Method data_parallel(bool divided);
/// nn::PowerSGDState.
Method power_sgd();
/// optim::Sharded.
Method sharded();
/// optim::LocalSGD and DiLoCo.
Method local_steps();

}  // namespace cohort::step
