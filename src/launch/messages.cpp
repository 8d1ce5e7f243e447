#include "launch/messages.h"

#include "base/codec.h"

#include <optional>
#include <type_traits>
#include <utility>

namespace cohort::launch {
namespace {

using codec::Reader;
using codec::Writer;

// One list of fields per message serves both directions: `visit_fields(message, archive)` names them in order.
template <class M, class A>
void visit_fields(M& m, A& a, const Hello*) {
  a(m.protocol, m.version, m.host_index, m.host, m.pid, m.cores, m.free_port, m.build, m.nodes, m.ranks, m.nodes_id);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Started*) {
  a(m.pids, m.threads);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartFailed*) {
  a(m.rank, m.reason);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Output*) {
  a(m.rank, m.stream, m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Exited*) {
  a(m.rank, m.status.code, m.status.signal, m.status.core_dumped, m.before_stop, m.out_of_memory, m.after_ns,
    m.last_stderr, m.last, m.words, m.cause);
}
template <class M, class A>
void visit_fields(M& m, A& a, const CauseReport*) {
  a(m.code, m.rank, m.peer, m.sequence, m.host, m.operation);
}
template <class M, class A>
void visit_fields(M& m, A& a, const GroupReport*) {
  a(m.id, m.rank, m.size, m.begun, m.ended, m.operation, m.waiting, m.waited_ns, m.longest_ns, m.longest_number,
    m.message, m.peer, m.message_number);
}
template <class M, class A>
void visit_fields(M& m, A& a, const NamedReport*) {
  a(m.waiting, m.name, m.ended);
}
template <class M, class A>
void visit_fields(M& m, A& a, const TimesReport*) {
  a(m.steps, m.steps_ns, m.operations, m.bytes, m.busy_ns, m.waited_ns, m.wire_ns, m.wire_bytes, m.exposed_ns);
}
template <class M, class A>
void visit_fields(M& m, A& a, const RankReport*) {
  a(m.rank, m.pid, m.joined, m.state, m.cpu_ms, m.step, m.tells_stacks, m.saves_when_asked, m.preempted_by, m.groups,
    m.named, m.times);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Reports*) {
  a(m.ranks);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Stacks*) {
  a(m.rank, m.text);
}
template <class M, class A>
void visit_fields(M&, A& a, const AskStacks*) {
  a();
}
template <class M, class A>
void visit_fields(M& m, A& a, const InputTaken*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Trouble*) {
  a(m.text);
}
template <class M, class A>
void visit_fields(M& m, A& a, const AllGone*) {
  a(m.swept, m.stuck);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Ends*) {
  a(m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Told*) {
  a(m.signal);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Refused*) {
  a(m.why);
}
template <class M, class A>
void visit_fields(M& m, A& a, const WorkerPlan*) {
  a(m.rank, m.environment);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StartJob*) {
  a(m.path, m.arguments, m.environment, m.folder, m.log_folder, m.workers, m.input, m.tail_lines, m.open_files,
    m.bind_to_cores, m.elsewhere, m.run_folder, m.divides_cores);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Input*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const OutputTaken*) {
  a(m.bytes);
}
template <class M, class A>
void visit_fields(M& m, A& a, const SignalWorkers*) {
  a(m.signal);
}
template <class M, class A>
void visit_fields(M& m, A& a, const StopWorkers*) {
  a(m.signal, m.grace_ms, m.saving_ms);
}
template <class M, class A>
void visit_fields(M& m, A& a, const Finish*) {
  a(m.status);
}

/// What messages hold more of than numbers and texts.
template <class T>
concept Record = std::is_same_v<T, WorkerPlan> || std::is_same_v<T, CauseReport> || std::is_same_v<T, GroupReport> ||
    std::is_same_v<T, NamedReport> || std::is_same_v<T, RankReport> || std::is_same_v<T, TimesReport>;

class Encoder {
 public:
  template <class... T>
  void operator()(const T&... fields) {
    (put(fields), ...);
  }
  std::string take() { return writer_.take(); }
  void put(std::uint8_t value) { writer_.number(value); }

 private:
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(T value) { writer_.number(value); }
  void put(bool value) { writer_.number(static_cast<std::uint8_t>(value ? 1 : 0)); }
  void put(Stream value) { writer_.number(static_cast<std::uint8_t>(value)); }
  void put(const std::string& value) { writer_.text(value); }
  template <Record T>
  void put(const T& value) {
    visit_fields(value, *this, &value);
  }
  template <class T>
  void put(const std::vector<T>& values) {
    writer_.number(static_cast<std::uint32_t>(values.size()));
    for (const T& value : values) put(value);
  }
  Writer writer_;
};

class Decoder {
 public:
  explicit Decoder(std::string_view bytes) : reader_(bytes) {}
  template <class... T>
  void operator()(T&... fields) {
    (get(fields), ...);
  }
  Result<void> finish() const {
    if (error_) return tl::unexpected(*error_);
    if (!reader_.at_end()) return fail(ErrorCode::Corrupt, "message is longer than its fields");
    return {};
  }

 private:
  void spoil(Error error) {
    if (!error_) error_ = std::move(error);
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void get(T& value) {
    if (error_) return;
    if (auto number = reader_.number<T>())
      value = *number;
    else
      spoil(number.error());
  }
  void get(bool& value) {
    std::uint8_t byte = 0;
    get(byte);
    if (byte > 1) spoil(Error(ErrorCode::Corrupt, "neither true nor false"));
    value = byte == 1;
  }
  void get(Stream& value) {
    std::uint8_t byte = 0;
    get(byte);
    if (byte > 1) spoil(Error(ErrorCode::Corrupt, "there is no such stream"));
    value = static_cast<Stream>(byte);
  }
  void get(std::string& value) {
    if (error_) return;
    if (auto text = reader_.text(kLongestMessage))
      value.assign(*text);
    else
      spoil(text.error());
  }
  template <Record T>
  void get(T& value) {
    visit_fields(value, *this, &std::as_const(value));
  }
  template <class T>
  void get(std::vector<T>& values) {
    std::uint32_t count = 0;
    get(count);
    // Every element takes 4 bytes at least, so a false count cannot make us take much memory.
    if (!error_ && count > reader_.rest().size() / 4)
      spoil(Error(ErrorCode::Corrupt, "list is longer than its message"));
    for (std::uint32_t i = 0; i < count && !error_; ++i) get(values.emplace_back());
  }
  Reader reader_;
  std::optional<Error> error_;
};

template <std::size_t Index = 0>
Result<Message> decode_alternative(std::size_t tag, std::string_view body) {
  if constexpr (Index == std::variant_size_v<Message>) {
    return fail(ErrorCode::Corrupt, "message of unknown kind {}", tag);
  } else {
    if (tag != Index) return decode_alternative<Index + 1>(tag, body);
    std::variant_alternative_t<Index, Message> message;
    Decoder decoder(body);
    visit_fields(message, decoder, &std::as_const(message));
    if (auto done = decoder.finish(); !done) return tl::unexpected(done.error());
    return Message(std::move(message));
  }
}

}  // namespace

std::string encode(const Message& message) {
  Encoder encoder;
  encoder.put(static_cast<std::uint8_t>(message.index()));
  std::visit([&encoder](const auto& alternative) { visit_fields(alternative, encoder, &alternative); }, message);
  return encoder.take();
}

Result<Message> decode(std::string_view bytes) {
  if (bytes.empty()) return fail(ErrorCode::Corrupt, "empty message");
  return decode_alternative(static_cast<unsigned char>(bytes.front()), bytes.substr(1));
}

}  // namespace cohort::launch
