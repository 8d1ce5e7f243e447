// Cohort for libtorch: all headers that need libtorch. Takes seconds to compile; the headers can be included one by
// one.
#pragma once

#include <cohort/cohort.h>
#include <cohort/torch/autocast.h>
#include <cohort/torch/autograd.h>
#include <cohort/torch/checkpoint.h>
#include <cohort/torch/comm_hooks.h>
#include <cohort/torch/data.h>
#include <cohort/torch/elastic.h>
#include <cohort/torch/finite.h>
#include <cohort/torch/local_sgd.h>
#include <cohort/torch/metrics.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/optim.h>
#include <cohort/torch/parallel.h>
#include <cohort/torch/pipeline.h>
#include <cohort/torch/recompute.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/sharded.h>
#include <cohort/torch/tensor.h>
#include <cohort/track.h>
