// From a run record to a figure of its curves. Pure: any thread may call.
#pragma once

#include "track/figure.h"
#include "track/record_reader.h"

namespace cohort::track {

/// Losses and accuracies, and a panel for each other name that was logged; over epochs, or over steps where the record
/// has no epochs. After a `resume` at step S, what
/// earlier lines say of later steps counts no more: it was done again.
Figure figure_of(const RecordLines& record);

}  // namespace cohort::track
