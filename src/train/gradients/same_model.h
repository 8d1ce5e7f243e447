// Do all ranks mean the same model? Compared before the first byte of it is sent, so that a difference is an error with
// names instead of garbage. Collective; one thread at a time per communicator.
#pragma once

#include "train/gradients/ranks.h"

#include <string>
#include <vector>

namespace cohort::gradients {

/// Each line describes one thing ("parameter 'fc.weight': float32 [10, 50]"). Throws Mismatch on every rank, with the
/// same text, if the lines of any rank differ from rank 0's; it names the first line that does, and both sides.
/// `who`: on whose behalf.
void require_same_on_all_ranks(Ranks& ranks, const std::vector<std::string>& lines, const char* who);

}  // namespace cohort::gradients
