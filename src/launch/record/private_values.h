// What job.json leaves out: values that are for nobody's eyes. Pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// True for names that say that their value is for nobody's eyes: API_KEY, hf-token, SLURM_JWT, db_pass, ...
bool looks_private(std::string_view name);

/// Whether an environment variable may be written into a file: it is on the list of those that change how a job runs,
/// and neither its name nor its value looks private.
bool is_recorded(std::string_view name, std::string_view value);

/// A command line without what its words give away: --api-key=X, TOKEN=X, --env=TOKEN=X, --password X.
std::vector<std::string> without_secrets(const std::vector<std::string>& words);

}  // namespace cohort::launch
