// The only header through which Cohort includes libtorch. With clang 14 in C++20 every torch header fails to compile
// unless <ATen/core/ivalue.h> came first (libstdc++'s constexpr vector meets the incomplete c10::IValue); and this is
// the one place to know that libtorch is expensive (seconds per file), so include as little of it as you can. Works
// with libtorch 1.13 and 2.x.
#pragma once

// clang-format off
#include <ATen/core/ivalue.h>  // first: see above
#include <ATen/ATen.h>
#include <torch/data/datasets/base.h>
#include <torch/data/samplers/base.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/types.h>
#include <torch/version.h>
// clang-format on
