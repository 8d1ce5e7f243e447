// The store of the job that started this process (`cohort run`): COHORT_STORE and the job's secret. Any thread.
#pragma once

#include "store/store.h"

#include <memory>

namespace cohort::store {

/// Throws Unavailable where there is no job, and what connecting throws.
std::shared_ptr<Store> connect_job_store(Store::Deadline deadline);

}  // namespace cohort::store
