// What programs call of Cohort's goes by its own name, not by those of the operations that it consists of: on the
// status page, and in their errors.
#pragma once

#include "status/status_page.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <string_view>

namespace cohort::status {

/// Runs `body` as `name`, such as "Preemption::requested".
template <class Body>
auto called(std::string_view name, const Body& body) {
  struct Call {
    explicit Call(std::string_view its_name) { StatusPage::own().begin_call(its_name); }
    ~Call() { StatusPage::own().end_call(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
  } const call(name);
  try {
    return body();
  } catch (const Error& error) {
    if (error.context().operation.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", name, error.what()), error.context());
  }
}

}  // namespace cohort::status
