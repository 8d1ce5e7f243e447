#include "base/result.h"

namespace cohort {

std::string errno_text(int error_number) {
  const char* description = strerrordesc_np(error_number);
  const char* name = strerrorname_np(error_number);
  return fmt::format("{} ({})", description != nullptr ? description : "unknown error",
                     name != nullptr ? std::string(name) : std::to_string(error_number));
}

}  // namespace cohort
