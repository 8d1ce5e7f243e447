// Cohort for libtorch: everything that needs it. Takes seconds to compile; the parts can be included one by one.
#pragma once

#include <cohort/cohort.h>
#include <cohort/torch/checkpoint.h>
#include <cohort/torch/data.h>
#include <cohort/torch/elastic.h>
#include <cohort/torch/finite.h>
#include <cohort/torch/metrics.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/optim.h>
#include <cohort/torch/ps.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>
