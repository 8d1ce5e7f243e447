// Answers of a page to `cohort watch HOST:PORT`: any bytes are refused or read, and the result can be drawn.
#include "observe/watch/screen.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::watch;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto view = parse_view(bytes);
  if (!view) return 0;
  Look look;
  for (look.columns = 20; look.columns < 200; look.columns += 60) {
    for (const Rows rows : {Rows::Ranks, Rows::Hosts}) {
      look.shown = rows;
      look.selected = size % 7;
      for (const std::string& line : draw(*view, look)) {
        if (line.find('\n') != std::string::npos) std::abort();
      }
    }
    look.host = size % 3;
    (void)draw(*view, look);
    (void)order_of(*view, look);
    look.host.reset();
  }
  (void)line_of(*view, 0);
  (void)to_text(*view, Rows::Hosts);
  return 0;
}
