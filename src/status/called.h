// What programs call of Cohort's goes by its own name, not by those of the operations that it consists of: on the
// status page, and in their errors.
#pragma once

#include "status/status_page.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <string_view>

namespace cohort::status {

/// The program is in `name`, such as "Preemption::requested", as long as this lives.
class Call {
 public:
  explicit Call(std::string_view name) noexcept { StatusPage::own().begin_call(name); }
  ~Call() { StatusPage::own().end_call(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

/// Runs `body` as `name`, which errors of operations begin with, too.
template <class Body>
auto called(std::string_view name, const Body& body) {
  const Call call(name);
  try {
    return body();
  } catch (const Error& error) {
    if (error.context().operation.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", name, error.what()), error.context());
  }
}

}  // namespace cohort::status
