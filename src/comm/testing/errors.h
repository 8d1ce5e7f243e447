// For tests: what operations say when they fail.
#pragma once

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>

namespace cohort::comm::testing {

/// The text of the error with this code that `body` throws; fails the test if it throws none or another.
inline std::string what_of(const std::function<void()>& body, ErrorCode code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace cohort::comm::testing
