// The store of the job that started this process (`cohort run`): COHORT_STORE and the job's secret. Any thread.
#pragma once

#include "store/store.h"

#include <memory>
#include <string_view>

namespace cohort::store {

/// Under this key the job says in which of its epochs it is; not there: in the first, 0.
inline constexpr std::string_view kEpochKey = "job/epoch";

/// Throws Unavailable where there is no job, and what connecting throws.
std::shared_ptr<Store> connect_job_store(Store::Deadline deadline);

}  // namespace cohort::store
